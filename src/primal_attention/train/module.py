"""The Lightning module that every benchmark's training is: a task loss, the KSVD loss beside it, averaged weights.

    loss = task + η · mean_l J_l²

J and the task loss are kept apart in the logs. All randomness of an epoch (dropout, augmentation) follows from the seed
and the epoch's number, so a run that goes on after a kill repeats what it would have done.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from primal_attention.nn.baselines.random_buffers import RandomBuffers, draw_counts, restore_draw_counts
from primal_attention.nn.objective import ksvd_loss, primal_layers
from primal_attention.train import compiling, diagnosis, distributed
from primal_attention.train.batches import Batches, derive_seed, set_seed
from primal_attention.train.config import Recipe
from primal_attention.train.optimizer import average_share, make_optimizer, schedule, update_average
from primal_attention.utils.errors import DivergedError, RunError

if TYPE_CHECKING:
    from primal_attention.train.cuda_graph import RecordedStep
    from primal_attention.train.distributed import Layout


class Watcher(Protocol):
    """Who looks on between two batches, to save or to stop."""

    def after_batch(self, done: int) -> None: ...
    def while_measuring(self) -> None: ...


CHECK_EVERY = 50  # steps between two looks at the loss on a device that would have to be waited for

Batch = tuple[Tensor, ...]


class TrainingModule(pl.LightningModule):
    """Base of the benchmarks' modules: subclasses say what the task's loss and scores are."""

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "sample"
    """Whether J is squared per case or after the mean over the batch; the paper's benchmarks differ in it."""
    headline: ClassVar[str] = "accuracy"
    """The score that a run is known by; higher is better."""
    splits_sequences: ClassVar[bool] = False
    """Whether `task_loss` and `scores` hand the model its `tokens`, so that processes can share a sequence."""

    evaluates_compiled: ClassVar[bool] = True
    """Whether a compiled model is measured compiled too: where evaluations have one shape, not many."""

    def __init__(self, model: nn.Module, recipe: Recipe, **compile_options: Any) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.has_primal = bool(primal_layers(model))
        # The average starts as a copy: deep copies are taken before the first forward, while no layer holds a graph.
        self.averaged = copy.deepcopy(model).requires_grad_(False) if recipe.trainer.ema else None
        self.compiled = compiling.suits(recipe.trainer)
        if self.compiled:
            compiling.start(model, **compile_options)
        self._sums: dict[str, Tensor] = {}
        self._steps = 0
        self._sharded = False
        self._batches_per_epoch = 0
        self._recorded: RecordedStep | None = None
        self.layout: Layout | None = None  # where there are several processes
        self.watcher: Watcher | None = None
        self._part = 1.0  # of a batch: this process's cases over the mean of the processes'

    # What a benchmark fills in

    def task_loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Sums over the cases of a batch; the key "cases" counts them."""
        raise NotImplementedError

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """What the model is called with: a batch without its labels."""
        *inputs, _ = batch
        return tuple(inputs)

    # Training

    def configure_model(self) -> None:
        config = self.recipe.trainer
        if self.layout is None and self.trainer.world_size > 1:
            device = self.trainer.strategy.root_device.type
            self.adopt(distributed.Layout.of(device, self.trainer.world_size, config.context))
        if config.strategy == "fsdp" and not self._sharded:
            for model in (self.model, self.averaged):
                if model is not None:
                    distributed.shard(model, self.device_mesh["data_parallel"])  # type: ignore[index]
            self._sharded = True

    def adopt(self, layout: Layout | None) -> None:
        """Work with other processes on the same batches, and on the same sequences where they are split."""
        if layout is not None and layout.splits and not self.splits_sequences:
            raise RunError(f"trainer.context must be 1: {self.recipe.benchmark} trains on whole sequences only")
        self.layout = layout
        for model in (self.model, self.averaged):
            if layout is not None and model is not None:
                layout.adapt(model)

    @property
    def share(self) -> tuple[int, int]:
        """Which share of every batch is this process's, of how many."""
        return (0, 1) if self.layout is None else self.layout.data

    def tokens(self, *sequences: Tensor | None) -> tuple[Any, ...]:
        """This process's part of (B, N, …) tensors, as the model takes them: all of it where sequences are not split.

        What was drawn so far, augmentation for instance, is the same for all processes of a sequence; what the model
        draws from here on is each one's own.
        """
        if self.layout is None or not self.layout.splits:
            return sequences
        if self.training:
            self._seed("tokens", self._steps, self.global_rank)
        from primal_attention.parallel import shard

        return tuple(None if t is None else shard(t, self.layout.sequence) for t in sequences)

    def _seed(self, *what: object) -> None:
        set_seed(derive_seed("epoch", self.recipe.seed, self.current_epoch, *what), self.device)

    def on_train_epoch_start(self) -> None:
        self._seed(self.share[0])
        self._steps = 0
        for total in self._sums.values():  # in place: a recorded step adds to these very tensors
            total.zero_()

    def record_steps(self, train: Batches, group: int) -> None:
        """Let this module run its own optimiser, several steps per turn of Lightning's loop; see `graphed`."""
        self.automatic_optimization = False
        self._batches_per_epoch = train.batches_per_epoch
        train.group = group

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Lightning looks at every tensor, and there are hundreds in a turn of recorded steps; `Batches` are there."""
        if isinstance(batch, list) and not self.automatic_optimization and batch[0][0].device == device:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The loss and its parts, such that the mean over the processes is what one process would compute."""
        if self.layout is not None and self.layout.splits:
            self._seed("batch", self._steps, self.share[0])
        task = self._own(self.task_loss(batch))
        parts = {"task_loss": task}
        loss = task
        if self.has_primal:
            group = None if self.layout is None else self.layout.everyone.group
            ksvd = ksvd_loss(self.model, self.ksvd_reduction, group=group, part=self._part)
            loss = torch.add(task, ksvd, alpha=self.recipe.eta or 0.0)
            parts["ksvd_loss"] = ksvd
            parts["J"] = self._own(objective(self.model))
        parts["loss"] = loss
        return parts

    def _own(self, mean: Tensor) -> Tensor:
        """A mean over this rank's cases, as it counts among the ranks' means."""
        return mean if self._part == 1.0 else self._part * mean

    def training_step(self, batch: Any, number: int) -> Tensor | None:
        if not self.automatic_optimization:
            from primal_attention.train.cuda_graph import RecordedStep

            if self._recorded is None:
                self._recorded = RecordedStep(self, self.optimizers(use_pl_optimizer=False))  # type: ignore[arg-type]
            self._recorded.run(batch if isinstance(batch, list) else [batch])
            return None
        if self.layout is not None:
            self._part = self.trainer.train_dataloader.part(number)  # type: ignore[union-attr]
        if self.compiled:  # which leaves the counting of forwards to others
            for layer in self.model.modules():
                if isinstance(layer, RandomBuffers):
                    layer.count_forward()
        parts = self.losses(batch)
        self.add_to_sums(parts)
        self.count_step(batch)
        return parts["loss"]

    def on_train_end(self) -> None:
        self._recorded, self._sums = None, {}  # the recordings hold the memory of a step

    def add_to_sums(self, parts: Mapping[str, Tensor]) -> None:
        values = {key: value.detach().float() for key, value in parts.items()}
        for key, value in values.items():
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(value)
        torch._foreach_add_([self._sums[key] for key in values], list(values.values()))  # all in one launch

    def count_step(self, batch: Batch) -> None:
        """Once per step, after its losses were added: from time to time, look whether they are numbers."""
        self._steps += 1
        total = self._sums["loss"]
        often = 1 if total.device.type == "cpu" else CHECK_EVERY
        # A loss that is no finite number makes the sum none, for the rest of the epoch.
        if self._steps % often == 0 and not torch.isfinite(total):
            raise DivergedError(self._explain(batch, often))

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        stepped = self._steps % self.recipe.trainer.accumulate == 0 or self.trainer.is_last_batch
        if self.automatic_optimization and self.averaged is not None and stepped:
            update_average(self.averaged, self.model, average_share(self.recipe.trainer.ema, self.global_step))
        if self.watcher is not None and stepped and not self.trainer.is_last_batch:
            self.watcher.after_batch(number + 1)

    def position(self) -> dict[str, Any]:
        """Where this process stands within an epoch, besides its weights: sums and random numbers."""
        device = next(self.model.parameters()).device
        return {
            "steps": self._steps,
            "sums": {key: float(value) for key, value in self._sums.items()},
            "random": torch.get_rng_state(),
            "random_on_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def go_on_from(self, processes: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Stand where `position` of every process was taken. With another number of them, random numbers start anew."""
        device = next(self.model.parameters()).device
        same = len(processes) == self.trainer.world_size
        own = [processes[self.global_rank]] if same else processes
        self._steps = steps
        for key in own[0]["sums"]:  # the mean over the processes is what counts, so each may hold it
            self._sums[key] = torch.tensor(sum(p["sums"][key] for p in own) / len(own), device=device)
        if not same:
            self._seed("resumed", steps, self.share[0])
            return
        torch.set_rng_state(own[0]["random"])
        if own[0]["random_on_device"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(own[0]["random_on_device"], device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["draws"] = draw_counts(self.model)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        restore_draw_counts(self.model, checkpoint.get("draws", {}))  # a checkpoint of an earlier version has none

    def epoch_means(self) -> dict[str, float]:
        """Mean over the epoch's steps of the losses and J, over all ranks."""
        if not self._sums:
            return {}
        totals = torch.stack(list(self._sums.values())) / max(self._steps, 1)  # read at once: the host waits once
        if self.trainer.world_size > 1:
            totals = self.trainer.strategy.reduce(totals, reduce_op="mean")  # type: ignore[assignment]
        means = dict(zip(self._sums, totals.tolist(), strict=True))
        if not math.isfinite(means.get("loss", 0.0)):  # before anybody saves or measures what is left of the weights
            raise DivergedError(self._explain(None, self._steps % CHECK_EVERY or CHECK_EVERY))
        return means

    def configure_optimizers(self) -> Any:
        on_gpu = next(self.model.parameters()).device.type == "cuda"
        recordable = on_gpu and not self.automatic_optimization
        optimizer = make_optimizer(self.model, self.recipe.optim, recordable=recordable)
        if self.recipe.optim.schedule == "constant":
            return optimizer
        if self.automatic_optimization:
            total = int(self.trainer.estimated_stepping_batches)
        else:
            total = self.recipe.trainer.epochs * self._batches_per_epoch
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(self.recipe.optim, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    # Evaluation

    @property
    def final_model(self) -> nn.Module:
        """The weights that are measured and saved: the average where there is one."""
        return self.model if self.averaged is None else self.averaged

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Mean scores of the final model over a set, the same in a run and in `primal evaluate`."""
        model = self.final_model
        was_training = model.training
        model.eval()
        found: dict[str, list[Tensor]] = {}
        as_written = compiling.eagerly(self.compiled and not self.evaluates_compiled)
        with precision_context(self.recipe.trainer.precision, next(model.parameters()).device), as_written:
            for batch in batches:
                if self.watcher is not None:
                    self.watcher.while_measuring()
                for key, value in self.scores(model, batch).items():
                    found.setdefault(key, []).append(value)
        model.train(was_training)
        # Read once, at the end: the device is not waited for between the batches.
        sums = {key: sum(torch.stack(values).tolist()) for key, values in found.items()}
        cases = sums.pop("cases")
        return {key: total / cases for key, total in sums.items()}

    # When the loss is no number

    def _explain(self, batch: Batch | None, steps: int) -> str:
        """One line: since when, where it shows, and what to try. `steps` is how many may have passed unseen."""
        now = self.global_step
        when = f"step {now}" if steps == 1 else f"one of the steps {max(0, now - steps)} to {now}"
        when += f" (epoch {self.current_epoch + 1})"
        tries = ", ".join(diagnosis.remedies(self.recipe, self.has_primal))
        return f"the loss is not finite at {when}: {self.first_bad_layer(batch)}; try {tries}"

    def first_bad_layer(self, batch: Batch | None) -> str:
        with compiling.eagerly(self.compiled):
            return diagnosis.first_bad_layer(self.model, batch, self.task_loss)


def objective(model: nn.Module) -> Tensor:
    """Mean J over the model's Primal layers and the batch of the last forward in training mode, without a graph."""
    means = [j.detach().float().mean() for layer in primal_layers(model).values() if (j := layer.objective) is not None]
    return means[0] if len(means) == 1 else torch.stack(means).mean()


def precision_context(precision: str, device: torch.device, *, cache: bool = True) -> AbstractContextManager[Any]:
    """Autocast as the trainer's precision asks."""
    kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if precision not in kinds:
        return nullcontext()
    return torch.autocast(device.type, dtype=kinds[precision], cache_enabled=cache)
