"""The base classes of the training tasks: batches in memory, task loss, KSVD loss, averaged weights, scores.

    loss = task loss + η · mean_l J_l²

The two losses and J are logged separately. All random numbers of an epoch (dropout, augmentation) follow from the seed
and the epoch's number, and so does the order of its batches. A resumed run repeats what an uninterrupted one does.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from primal_attention.data.storage import one_line
from primal_attention.data.uea import Standardizer
from primal_attention.models.uea import MaskedBatchNorm
from primal_attention.nn.objective import ksvd_loss, primal_layers
from primal_attention.parallel import Context, context_parallel, shard
from primal_attention.train.config import Recipe, TrainerConfig
from primal_attention.utils.errors import DivergedError, RunError

NO_LABEL = -1  # of a row that only fills an evaluation batch
CHECK_EVERY = 50  # steps between two checks of the loss on a device; each check waits for the device
Batch = tuple[Tensor, ...]


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed from any values; similar inputs give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(eq=False)
class Batches:
    """Rows of several tensors of equal length.

    In distributed training each rank takes its share of every batch, so that the union of the ranks' batches is the
    batch of a single process. Subclasses override `order` and `rows` (which samples), `gather` and `finish` (their
    tensors).

    Args:
        tensors: The first dimension counts the samples.
        batch_size: Samples per batch, over all ranks.
        shuffle_seed: None keeps the data's order.
        steps: Batches per epoch, all of full size; the next epoch continues in the pass over the data. 0 is one pass.
    """

    tensors: list[Tensor]
    batch_size: int
    shuffle_seed: int | None = None
    steps: int = 0

    # Set by the loop.
    rank, world, epoch = 0, 1, 0
    skip = 0  # batches to leave out at the start of the next iteration
    group = 1  # batches that are gathered at once

    @property
    def samples(self) -> int:
        return len(self.tensors[0])

    @property
    def samples_per_epoch(self) -> int:
        return self.steps * min(self.batch_size, self.samples) if self.steps else self.samples

    def __len__(self) -> int:
        return self.steps or -(-self.samples // self.batch_size)

    def part(self, number: int) -> float:
        """Return this rank's samples in a batch over the ranks' mean: the weight of its mean.

        A rank that got a repeated sample because there were too few has weight 0.
        """
        size = min(self.batch_size, self.samples if self.steps else self.samples - number * self.batch_size)
        return len(range(self.rank, size, self.world)) * self.world / size

    def to(self, device: torch.device) -> Batches:
        """Move the set to the device: sets are small, and a copy per step would cost more."""
        self.tensors = [t.to(device) for t in self.tensors]
        return self

    def order(self, turn: int) -> Tensor:
        """Return the order of the samples in one pass over the data."""
        if self.shuffle_seed is None:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        return torch.randperm(self.samples, generator=generator)

    def rows(self) -> Iterator[Tensor]:
        """Yield the samples of each batch of the epoch."""
        if not self.steps:
            yield from self.order(self.epoch).split(self.batch_size)
            return
        # Full batches only: steps of one shape are compiled and recorded once.
        per_turn = max(1, self.samples // self.batch_size)
        turn, order = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                order = self.order(turn)
            start = position % per_turn * self.batch_size
            yield order[start : start + self.batch_size]

    def remaining_rows(self) -> Iterator[Tensor]:
        """Yield this rank's samples of each batch, once without the first `skip` batches."""
        skip, self.skip = self.skip, 0
        for rows in islice(self.rows(), skip, None):
            # Every rank needs at least one sample to stay in step, so samples repeat if there are few.
            own = torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)
            yield rows if self.world == 1 else rows[own]

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the tensors of some samples, whose numbers are on the device."""
        return [t[rows] for t in self.tensors]

    def finish(self, batch: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
        """Change a batch of the samples `rows` before it is used."""
        return batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches as tuples of tensors."""
        remaining = self.remaining_rows()
        while group := list(islice(remaining, self.group)):
            sizes = [len(rows) for rows in group]
            samples, device = torch.cat(group), self.tensors[0].device
            if device.type == "cuda":
                samples = samples.pin_memory()  # for a copy that does not wait for the device
            tensors = self.gather(samples.to(device, non_blocking=True))
            batches = zip(*(t.split(sizes) for t in tensors), strict=True)
            for rows, batch in zip(group, batches, strict=True):
                yield self.finish(batch, rows)


class TrainingModule(nn.Module):
    """A model in training. The base class trains a classifier; other benchmarks override the loss and the scores.

    Args:
        model: The model.
        recipe: The resolved recipe.
        padded: False if no sequence has padding. The model then gets no mask, since a mask that hides nothing would
            keep softmax attention from its faster kernels.
        compile_options: Arguments of the model's `compile`.
    """

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "sample"
    """Square J per sample or after the mean over the batch; the paper's benchmarks differ."""
    headline: ClassVar[str] = "accuracy"
    """The score that represents a run; higher is better."""
    splits_sequences: ClassVar[bool] = False
    """True if `task_loss` and `scores` pass their inputs through `tokens`, which context parallelism needs."""
    evaluates_compiled: ClassVar[bool] = True
    """False if evaluation batches have many shapes: a compiled model is then evaluated eagerly."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, padded: bool = True, **compile_options: Any) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.padded = padded
        self.has_primal = bool(primal_layers(model))
        # Copied before the first forward pass, while no layer holds an autograd graph.
        self.averaged = copy.deepcopy(model).requires_grad_(False) if recipe.trainer.ema else None
        self.compiled = compiles(recipe.trainer)
        if self.compiled:
            torch.compiler.reset()  # torch bounds the number of graphs per function, over all models of a process
            model.compile(**compile_options)
        # Set by the loop.
        self.mesh: DeviceMesh | None = None  # of several processes
        self.poll: Callable[[], None] | None = None  # called between evaluation batches
        self.batch_weight = 1.0  # this rank's samples of a batch over the ranks' mean
        self.current_epoch = self.global_step = self.global_rank = 0
        self._sums: dict[str, Tensor] = {}
        self._steps = 0  # batches of this epoch

    # What a benchmark defines

    def task_loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(*self.inputs(batch)), batch[-1])

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the samples of a batch; the key "samples" counts the samples with a label."""
        logits, labels = model(*self.inputs(batch)).float(), batch[-1]
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum"),
            "samples": (labels != NO_LABEL).sum(),
        }

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the model: a batch without its labels."""
        *inputs, _ = batch
        return tuple(inputs)

    # Several processes

    def adopt(self, mesh: DeviceMesh) -> None:
        """Share batches, their statistics, and sequences if the mesh splits them, with the other processes."""
        self.mesh = mesh
        if self.sequence is not None and not self.splits_sequences:
            raise RunError(f"trainer.context must be 1: {self.recipe.benchmark} trains on whole sequences only")
        assert torch.distributed.group.WORLD is not None
        everyone = Context(torch.distributed.group.WORLD)
        for model in (self.model, self.averaged):
            if model is None:
                continue
            if self.sequence is not None:
                try:
                    context_parallel(model, self.sequence)
                except ValueError as error:
                    raise RunError(f"trainer.context {self.sequence.size()}: {error}") from error
            for layer in model.modules():
                if isinstance(layer, MaskedBatchNorm):
                    layer.context = everyone

    @property
    def share(self) -> tuple[int, int]:
        """This process's share of every batch: its index and the number of shares."""
        return (0, 1) if self.mesh is None else (self.mesh.get_local_rank("data"), self.mesh["data"].size())

    @property
    def sequence(self) -> DeviceMesh | None:
        """The processes that share this one's sequences; None if it has them alone."""
        return None if self.mesh is None or self.mesh["context"].size() == 1 else self.mesh["context"]

    def tokens(self, *sequences: Tensor | None) -> tuple[Any, ...]:
        """Return this process's shard of (B, N, …) tensors; all of them if sequences are not split.

        Random numbers drawn before (augmentation) agree among the processes of a sequence. Later ones are independent.
        """
        sequence = self.sequence
        if sequence is None:
            return sequences
        if self.training:
            self._seed("tokens", self._steps, self.global_rank)
        return tuple(None if t is None else shard(t, sequence) for t in sequences)

    # Training

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _seed(self, *what: object) -> None:
        torch.manual_seed(derive_seed("epoch", self.recipe.seed, self.current_epoch, *what))

    def start_epoch(self, epoch: int) -> None:
        self.current_epoch, self._steps = epoch, 0
        self._seed(self.share[0])
        for total in self._sums.values():  # in place: recorded steps add to these tensors
            total.zero_()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss and its parts, scaled so that their mean over the ranks is a single process's value."""
        if self.sequence is not None:
            self._seed("batch", self._steps, self.share[0])
        task = self._weighted(self.task_loss(batch))
        parts = {"task_loss": task}
        loss = task
        if self.has_primal:
            group = None if self.mesh is None else torch.distributed.group.WORLD
            ksvd = ksvd_loss(self.model, self.ksvd_reduction, group=group, part=self.batch_weight)
            loss = torch.add(task, ksvd, alpha=self.recipe.eta or 0.0)
            objectives = {f"J_{name}": layer.objective for name, layer in primal_layers(self.model).items()}
            by_layer = {n: self._weighted(j.detach().float().mean()) for n, j in objectives.items() if j is not None}
            parts |= {"ksvd_loss": ksvd, "J": torch.stack(list(by_layer.values())).mean(), **by_layer}
        parts["loss"] = loss
        return parts

    def _weighted(self, mean: Tensor) -> Tensor:
        return mean if self.batch_weight == 1.0 else self.batch_weight * mean

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch and add its parts to the epoch's sums; DDP synchronizes what runs in forward."""
        parts = self.losses(batch)
        self.add_to_sums(parts)
        return parts["loss"]

    def add_to_sums(self, parts: Mapping[str, Tensor]) -> None:
        values = {key: value.detach().float() for key, value in parts.items()}
        for key, value in values.items():
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(value)
        torch._foreach_add_([self._sums[key] for key in values], list(values.values()))  # one launch

    def count_step(self) -> None:
        """Count a batch whose losses were added; check from time to time that the loss is finite."""
        self._steps += 1
        total = self._sums["loss"]
        if total.device.type == "cpu" or self._steps % CHECK_EVERY == 0:
            self._check_loss(float(total))

    def _check_loss(self, total: float) -> None:
        """Raise if a sum of losses is not finite: one loss that is not keeps it so."""
        if not math.isfinite(total):
            when = f"step {self.global_step} (epoch {self.current_epoch + 1})"
            tries = "a smaller --optim.lr, --optim.clip 1, --trainer.precision 32-true, or a smaller --eta"
            raise DivergedError(f"the loss is not finite by {when}: try {tries}")

    def epoch_means(self) -> dict[str, float]:
        """Return the mean over the epoch's batches and the ranks of the losses, of J, and of each layer's J."""
        totals = torch.stack(list(self._sums.values())) / max(self._steps, 1)
        if self.mesh is not None:
            torch.distributed.all_reduce(totals)
            totals /= torch.distributed.get_world_size()
        means = dict(zip(self._sums, totals.tolist(), strict=True))  # one wait for the device
        self._check_loss(means["loss"])  # before the weights are evaluated or saved
        return means

    def epoch_state(self) -> dict[str, Any]:
        """Return this process's state within an epoch: counts, sums and random generators."""
        return {
            "steps": self._steps,
            "sums": {key: value.tolist() for key, value in self._sums.items()},
            "random": torch.get_rng_state(),
            "random_on_device": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def restore_epoch_state(self, states: Sequence[Mapping[str, Any]], steps: int, world: int) -> None:
        """Continue from the `epoch_state` of every process. With another number of them, generators start anew."""
        same = len(states) == world
        own = [states[self.global_rank]] if same else states
        self._steps = steps
        for key in own[0]["sums"]:  # only the mean over the processes matters, so each may hold the mean
            self._sums[key] = torch.tensor([state["sums"][key] for state in own], device=self.device).mean(dim=0)
        if not same:
            self._seed("resumed", steps, self.share[0])
            return
        torch.set_rng_state(own[0]["random"])
        if own[0]["random_on_device"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own[0]["random_on_device"], self.device)

    # Evaluation

    @property
    def final_model(self) -> nn.Module:
        """The weights that are evaluated and saved: the average if there is one."""
        return self.model if self.averaged is None else self.averaged

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Return the mean scores of the final model over a set, the same in a run and in `primal evaluate`."""
        model = self.final_model
        was_training = model.training
        model.eval()
        sums: dict[str, list[Tensor]] = {}
        is_eager = self.compiled and not self.evaluates_compiled
        stance = torch.compiler.set_stance("force_eager") if is_eager else nullcontext()
        with precision_context(self.recipe.trainer.precision, self.device), stance:
            for batch in batches:
                if self.poll is not None:
                    self.poll()
                for key, value in self.scores(model, batch).items():
                    sums.setdefault(key, []).append(value)
        model.train(was_training)
        # Read at the end: the loop above does not wait for the device.
        totals = {key: sum(torch.stack(values).tolist()) for key, values in sums.items()}
        self._check_loss(totals.get("loss", 0.0))  # the last step may have made the weights infinite
        samples = totals.pop("samples")
        return {key: total / samples for key, total in totals.items()}


@dataclass
class Experiment:
    """What a recipe builds: a module, the data it trains on and the data it is evaluated on.

    Attributes:
        module: The model in training.
        train: Training batches.
        test: Evaluated at the end.
        watched: Sets evaluated during training, by name ("test" or "val").
        chooses_epoch: The accuracy on "val" chooses the epoch whose weights are saved; else it is the last one.
        facts: Name, sizes and SHA-256 of the data, for the summary.
        files: Texts by file name that the weights need besides config.yaml, for the run folder.
        standardizer: Applied to the series, where there are any.
    """

    module: TrainingModule
    train: Batches
    test: Batches
    watched: Mapping[str, Batches]
    chooses_epoch: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    standardizer: Standardizer | None = None


def hash_data(data: Any) -> str:
    """Return one SHA-256 of data in memory: arrays, plain values, and dataclasses, mappings and sequences of them.

    Files count by folder, name and size, not by content: ImageNet has 140 GB.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            add((str(value.dtype), *value.shape))
            digest.update(np.ascontiguousarray(value).data)
        elif dataclasses.is_dataclass(value):
            add(vars(value))
        elif isinstance(value, (Mapping, list, tuple)):
            add(len(value))
            for item in value.items() if isinstance(value, Mapping) else value:
                add(item)
        elif isinstance(value, Path):
            add((value.parent.name, value.name, value.stat().st_size))
        else:
            digest.update(f"{value!r}\n".encode())

    add(data)
    return digest.hexdigest()


def precision_context(precision: str, device: torch.device, *, cache: bool = True) -> AbstractContextManager[Any]:
    """Return the autocast context of a `trainer.precision`."""
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if precision not in dtypes:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtypes[precision], cache_enabled=cache)


def compiles(config: TrainerConfig) -> bool:
    """Return True if a training's model goes through torch.compile."""
    if config.compile != "auto":
        return config.compile == "on"
    one_gpu = config.devices == 1 and config.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    return one_gpu and config.strategy == "auto"


def compile_failure(error: BaseException) -> str | None:
    """Return the cause of a torch.compile error in one line; None for any other error."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # absent if nothing was compiled
    if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
        return None
    return one_line(getattr(error, "inner_exception", error))
