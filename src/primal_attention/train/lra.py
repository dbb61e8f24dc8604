"""Batches of token sequences: on the device where a set fits there, else one step ahead of use; padding cut off.

Padding costs as much as tokens and, where layers leave it out, changes nothing. Evaluations then take cases of like
length together, and a training may do so too: its batches are of a few kinds (`kinds_of`), each cut to one width, so
that each kind's steps have one shape and can be recorded.

Training of classifiers of token sequences: cross-entropy, accuracy, and J squared after the mean over the batch.

A batch is (tokens (B, N), labels (B,)), or (tokens, tokens, labels) where the cases are pairs.

Long-Range Arena: the paper's recipes, one per task, in steps as the benchmark counts them.

primal data listops && primal train lra/listops                  PrimalFormer, the paper's settings
primal train lra/text --model.attention primal+                  Primal.+
primal train lra/image --model.attention nystrom --data.folder data/cifar10
primal train lra-short/text                                      the same model in a fraction of the time

An epoch is the stretch between two evaluations. Validation data choose the epoch, and test is measured once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.train.batches import Batches, derive_seed
from primal_attention.train.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.train.task import Batch, TrainingModule

if TYPE_CHECKING:
    from primal_attention.data.lra.tokens import TokenData
    from primal_attention.train.task import Experiment


RESIDENT = 2**31  # bytes of a set up to which it is kept on the device
WIDTH_MULTIPLE = 64  # widths are multiples of it, which kernels like


def lengths_of(tokens: np.ndarray, at_once: int = 4096) -> Tensor:
    """Per case, the tokens up to the last that is no padding (0), at least 1."""
    found = [
        tokens.shape[1] - np.argmax(np.asarray(tokens[start : start + at_once])[:, ::-1] != 0, axis=1)
        for start in range(0, len(tokens), at_once)
    ]
    # A case without any token has its "last" one at the end: as good as any place.
    return torch.from_numpy(np.concatenate(found))


def room_of(arrays: Sequence[np.ndarray], at_once: int = 4096) -> int:
    """Places that hold the tokens of every case, wherever its padding (0) stands."""
    full = arrays[0].shape[1]
    parts = (tokens[start : start + at_once] for tokens in arrays for start in range(0, len(tokens), at_once))
    return _rounded(max(int(np.count_nonzero(part, axis=1).max()) for part in parts), full)


def kinds_of(lengths: Tensor, full: int, kinds: int, batch_size: int) -> list[int]:
    """Widths of batches, ascending up to `full`: the first is enough for half of the cases, the next for half of the
    rest, and so on. Fewer than `kinds` where one would not fill a batch."""
    widths: list[int] = []
    ordered, taken = lengths.sort().values, 0
    for _ in range(kinds - 1):
        upto = taken + (len(ordered) - taken) // 2
        width = _rounded(int(ordered[max(upto - 1, 0)]), full)
        upto = int((ordered <= width).sum())
        if upto - taken < batch_size or len(ordered) - upto < batch_size:
            break
        widths.append(width)
        taken = upto
    return [*widths, full]


def _rounded(length: int, full: int) -> int:
    return min(-(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, full)


class TokenBatches(Batches):
    """As `Batches`, where the first tensors are (cases, length) tokens and the last the labels.

    lengths: per case; None leaves all cases whole. widths: of the kinds of training batches; without any, they are
    drawn from all cases and left whole.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        lengths: Tensor | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        super().__init__(tensors, batch_size, shuffle_seed, steps)
        self.full = tensors[0].shape[1]
        self.lengths = lengths
        self.widths = list(widths)
        self.held: list[Tensor] | None = None
        if lengths is not None and self.widths:
            kind = torch.searchsorted(torch.tensor(self.widths), lengths)
            self.members = [(kind == k).nonzero().squeeze(1) for k in range(len(self.widths))]

    def to(self, device: torch.device) -> TokenBatches:
        self.device = torch.device(device)
        if sum(t.nbytes for t in self.tensors) <= RESIDENT:
            self.held = [t.to(self.device) for t in self.tensors]
        return self

    # Which cases come together

    def rows(self) -> Iterator[Tensor]:
        if self.lengths is None:
            yield from super().rows()
        elif self.shuffle_seed is None:
            yield from self._by_length()
        elif self.steps and self.widths:
            yield from self._by_kind()
        else:
            yield from super().rows()

    def _by_length(self) -> Iterator[Tensor]:
        """Longest first, as many tokens in a batch as `batch_size` whole cases have."""
        assert self.lengths is not None
        order = self.lengths.argsort(descending=True, stable=True)
        start = 0
        while start < len(order):
            size = self.batch_size * self.full // self.width(order[start : start + 1])
            yield order[start : start + size]
            start += size

    def _by_kind(self) -> Iterator[Tensor]:
        """Whole batches of one kind each, in random order, pass after pass."""
        size = self._size
        per_turn = sum(len(m) // size for m in self.members)
        turn, batches = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                batches = self._kinds_of_turn(turn)
            yield batches[position % per_turn]

    @property
    def _size(self) -> int:
        """Cases of a training batch: all there are, where they do not fill one."""
        return min(self.batch_size, self.cases)

    def _kinds_of_turn(self, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        found = []
        for members in self.members:
            mixed = members[torch.randperm(len(members), generator=generator)]
            found.append(mixed[: len(mixed) // self._size * self._size].view(-1, self._size))
        batches = torch.cat(found)
        return batches[torch.randperm(len(batches), generator=generator)]

    def width(self, rows: Tensor) -> int:
        """What these cases are cut to."""
        if self.lengths is None or (self.shuffle_seed is not None and not self.widths):
            return self.full
        longest = int(self.lengths[rows].max())
        if self.shuffle_seed is None:
            return _rounded(longest, self.full)
        return next(width for width in self.widths if width >= longest)

    # Their tokens

    def __iter__(self) -> Iterator[Any]:
        if self.held is None and self.device.type != "cpu":
            yield from self._streamed()
            return
        tensors = self.held or self.tensors
        for sizes, rows in self.turns():
            index = rows if self.device.type == "cpu" else self._pinned(rows).to(self.device, non_blocking=True)
            yield self._trimmed([t[index] for t in tensors], sizes, rows)

    def _streamed(self) -> Iterator[Any]:
        """Only the rows of a batch are copied. A thread gathers the next ones during a step."""
        turns = self.turns()

        def fetch() -> tuple[list[Tensor], list[int], Tensor] | None:
            turn = next(turns, None)
            if turn is None:
                return None
            return [self._pinned(t[turn[1]]) for t in self.tensors], *turn

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch)
            while (fetched := waiting.result()) is not None:
                waiting = pool.submit(fetch)
                tensors, sizes, rows = fetched
                yield self._trimmed([t.to(self.device, non_blocking=True) for t in tensors], sizes, rows)

    def _pinned(self, t: Tensor) -> Tensor:
        """Only from pinned memory does a copy run beside the computation."""
        return t.pin_memory() if self.device.type == "cuda" else t

    def _trimmed(self, tensors: Sequence[Tensor], sizes: list[int], rows: Tensor) -> Any:
        found = self.cut(tensors, sizes)
        batches = found if isinstance(found, list) else [found]
        widths = [self.width(part) for part in rows.split(sizes)]
        cut = [
            (*(t if width == self.full else t[:, :width] for t in sequences), labels)
            for (*sequences, labels), width in zip(batches, widths, strict=True)
        ]
        return cut if isinstance(found, list) else cut[0]


class SequenceModule(TrainingModule):
    """A classifier of token sequences in training.

    padded: token 0 is padding; else the model gets no mask. any_length: the batches come in several lengths.
    """

    splits_sequences: ClassVar[bool] = True
    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    evaluates_compiled: ClassVar[bool] = False

    def __init__(self, model: nn.Module, recipe: Recipe, *, padded: bool, any_length: bool = False) -> None:
        super().__init__(model, recipe, any_length=any_length)
        self.padded = padded

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        *sequences, _ = batch
        given: list[Tensor | None] = []
        for ids in sequences:
            # Stored in one byte, looked up by eight.
            given += self.tokens(ids.long(), ids == 0 if self.padded else None)
        return tuple(given)

    def task_loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(*self.inputs(batch)), batch[-1])

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        labels = batch[-1]
        logits = model(*self.inputs(batch)).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "cases": torch.tensor(len(labels)),
        }


EVALUATED_TOKENS = 2**19  # in one batch of an evaluation
IMAGES = ("image", "pathfinder")
LANDMARKS_PER_RANK = 10  # landmarks as a multiple of the rank


@dataclass(frozen=True)
class Task:
    """The paper's training of one task, and (rank s, weight η) of PrimalFormer and of Primal.+."""

    steps: int
    warmup: int
    batch_size: int
    evaluate_every: int
    former: tuple[int, float]
    plus: tuple[int, float]


TASKS = {
    "listops": Task(5_000, 1_000, 32, 50, (20, 0.1), (30, 0.05)),
    "text": Task(20_000, 8_000, 32, 500, (20, 0.05), (30, 0.1)),
    "retrieval": Task(30_000, 800, 32, 300, (30, 0.0), (20, 0.05)),
    "image": Task(35_000, 175, 256, 175, (30, 0.1), (30, 0.1)),
    "pathfinder": Task(62_400, 312, 256, 312, (30, 0.1), (20, 0.05)),
}


@dataclass(frozen=True)
class Short:
    """A training of the same model in fewer and smaller steps, at a higher learning rate.

    zero_is_padding, positions: where the labels alone say too little of an image's rows and columns to learn in so few
    steps, black is padding, as it is in the paper's runs, and positions start as a grid; of a list's order, as a line.
    sampling: where sequences would be learned by heart from their landmarks, those move.
    ema: where validation falls again before the rate does, an average over the last steps is measured and kept.
    """

    steps: int
    batch_size: int
    evaluations: int
    lr: float = 1e-3
    warmup: float = 0.1
    zero_is_padding: bool = False
    positions: Literal["random", "line", "grid"] = "random"
    sampling: Literal["even", "random"] = "even"
    ema: float = 0.0


SHORT = {
    "listops": Short(5_000, 32, 20, positions="line", ema=0.998),
    "text": Short(5_000, 32, 20, lr=5e-4, sampling="random", ema=0.998),
    "retrieval": Short(5_000, 32, 20),
    "image": Short(12_000, 64, 20),
    "pathfinder": Short(20_000, 256, 20, lr=5e-4, zero_is_padding=True, positions="grid"),
}
KINDS = 4  # of batches by length: as many shapes as a training records


@dataclass(frozen=True)
class LRAData:
    """Which task and where its files lie."""

    task: Literal["listops", "text", "retrieval", "image", "pathfinder"] = "listops"
    folder: Path | None = None
    """Folder of the task's files; None is $PRIMAL_LRA/TASK or data/lra/TASK."""
    zero_is_padding: bool = False
    """Image, Pathfinder: take black pixels for padding, as the published research code does. Layers then see the others
    only, which costs less the darker the images are."""
    kinds: int = 1
    """Padded tasks: kinds of training batches by length, each cut where its longest cases end; 1 mixes all cases, as
    model.published-padding does."""

    def __post_init__(self) -> None:
        require(self.kinds >= 1, f"data.kinds must be at least 1 (got {self.kinds})")


@dataclass(frozen=True)
class LRAModel:
    """The network; see primal_attention.models.lra."""

    attention: tuple[str, ...] = ("primal",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 64
    num_heads: int = 2
    layers: int = 2
    ffn_dim: int = 128
    dropout: float = 0.1
    rank: int | None = None
    """Directions s of Primal-Attention; None takes the paper's for the task."""
    landmarks: int | None = None
    """Rows that make f(X); None is ten times the rank, as in the paper."""
    sampling: Literal["even", "random"] = "even"
    """Which rows make f(X) in training: evenly spaced ones, or each moved at random by up to half of the spacing. Where
    weights are not data-dependent there is no f(X), and random counts as even."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""
    r_scores: bool = True
    """Let Primal-Attention's r-scores reach its output; off is the paper's ablation (they stay in the objective)."""
    positions: Literal["random", "line", "grid"] = "random"
    """What the learned positions are before training: noise, waves along the sequence (line), or waves along the rows
    and the columns of an image (grid)."""
    published_padding: bool = False
    """Treat padding as the published research code does (primal and softmax layers); sequences then stay whole."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "layers", "ffn_dim", "rank", "landmarks"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name.replace('_', '-')} must be at least 1 (got {value})")
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1) (got {self.dropout})")
        require(len(self.attention) > 0, "model.attention must name at least one kind")


@dataclass(frozen=True)
class LRARecipe(Recipe):
    """A classifier for one task of the arena."""

    benchmark: ClassVar[str] = "lra"

    watch_test: bool = False
    """Measure test at every evaluation too, for the columns LAST and BEST-ON-TEST; validation still chooses."""
    data: LRAData = field(default_factory=LRAData)
    model: LRAModel = field(default_factory=LRAModel)

    def resolved(self) -> LRARecipe:
        attention, task = self.model.attention, TASKS[self.data.task]
        rank, eta = task.plus if attention[-1].endswith("+") or "softmax" in attention else task.former
        rank = self.model.rank or rank
        sampling = self.model.sampling if self.model.data_dependent else "even"
        landmarks = self.model.landmarks or LANDMARKS_PER_RANK * rank
        model = dataclasses.replace(self.model, rank=rank, landmarks=landmarks, sampling=sampling)
        return dataclasses.replace(self, eta=eta if self.eta is None else self.eta, model=model)

    def label(self) -> str:
        return "-".join(self.model.attention)

    def build(self) -> Experiment:
        recipe = self.resolved()
        return build_from(recipe, load(recipe.data))


def paper_recipe(task: str) -> LRARecipe:
    """The paper's settings: AdamW 1e-4, one cycle along straight lines, mixed precision."""
    known = TASKS[task]
    return LRARecipe(
        data=LRAData(task=task),  # type: ignore[arg-type]
        optim=OptimConfig(
            name="adamw",
            lr=1e-4,
            eps=1e-6,
            schedule="onecycle-linear",
            warmup=known.warmup / known.steps,
            clip=0.0,
        ),
        trainer=TrainerConfig(
            epochs=known.steps // known.evaluate_every,
            steps_per_epoch=known.evaluate_every,
            batch_size=known.batch_size,
            precision="bf16-mixed",
            compile="auto",
        ),
    )


def short_recipe(task: str) -> LRARecipe:
    """The paper's model, trained in a fraction of the paper's time: see `SHORT`."""
    paper, short = paper_recipe(task), SHORT[task]
    return dataclasses.replace(
        paper,
        data=dataclasses.replace(paper.data, kinds=KINDS, zero_is_padding=short.zero_is_padding),
        model=dataclasses.replace(paper.model, positions=short.positions, sampling=short.sampling),
        optim=dataclasses.replace(paper.optim, lr=short.lr, warmup=short.warmup, clip=1.0),
        trainer=dataclasses.replace(
            paper.trainer,
            epochs=short.evaluations,
            steps_per_epoch=short.steps // short.evaluations,
            batch_size=short.batch_size,
            ema=short.ema,
        ),
    )


def default_folder(task: str) -> Path:
    """$PRIMAL_LRA/<task>, or data/lra/<task> under the working directory."""
    return Path(os.environ.get("PRIMAL_LRA", "data/lra")) / task


def load(config: LRAData) -> TokenData:
    """Read a task's three splits."""
    from primal_attention.data.lra import image as pixels
    from primal_attention.data.lra import listops, pathfinder, retrieval, text

    readers: dict[str, Callable[[Path], TokenData]] = {
        "listops": listops.load,
        "text": text.load,
        "retrieval": retrieval.load,
        "image": pixels.load,
        "pathfinder": pathfinder.load,
    }
    data = readers[config.task](config.folder or default_folder(config.task))
    return dataclasses.replace(data, padded=True) if config.zero_is_padding else data


def make_model(config: LRAModel, data: TokenData, room: int | None = None) -> nn.Module:
    """The network of a resolved configuration; room: see `LRAClassifier`."""
    from primal_attention.cli.table import without_r_scores
    from primal_attention.models.lra import LRAClassifier

    keywords: dict[str, dict[str, Any]] = {
        "primal": {
            "rank": config.rank,
            "landmarks": config.landmarks,
            "sampling": config.sampling,
            "data_dependent": config.data_dependent,
        },
        "linformer": {"max_length": data.length},
    }
    model = LRAClassifier(
        data.vocabulary,
        data.classes,
        data.length,
        attention=config.attention,
        embed_dim=config.embed_dim,
        num_heads=config.num_heads,
        layers=config.layers,
        ffn_dim=config.ffn_dim,
        dropout=config.dropout,
        pairs=data.train.second is not None,
        attention_kwargs=keywords,
        published_padding=config.published_padding,
        positions=config.positions,
    )
    model.room = room
    return model if config.r_scores else without_r_scores(model)


def build_from(recipe: LRARecipe, data: TokenData) -> Experiment:
    """The experiment of a resolved recipe on data that is already read."""
    import torch

    from primal_attention.data.lra.tokens import TokenSplit
    from primal_attention.train.task import Experiment

    # Where padding takes part in the computation, results depend on how much of it there is.
    cuts = data.padded and not recipe.model.published_padding
    # Padding between tokens that lie on several devices stays where it is.
    gathered = cuts and recipe.data.zero_is_padding and recipe.data.task in IMAGES and recipe.trainer.context == 1
    room = room_of([split.tokens for split in data.splits.values()]) if gathered else None

    def batches(split: TokenSplit, shuffle_seed: int | None = None, steps: int = 0) -> TokenBatches:
        tokens = [split.tokens] if split.second is None else [split.tokens, split.second]
        size = recipe.trainer.batch_size
        lengths = None
        if cuts and room is None and (shuffle_seed is None or recipe.data.kinds > 1):
            lengths = torch.stack([lengths_of(t) for t in tokens]).amax(dim=0)
        widths = []
        if shuffle_seed is None:  # nothing depends on which cases come together here
            size = max(size, EVALUATED_TOKENS // data.length)
        elif lengths is not None:
            widths = kinds_of(lengths, data.length, recipe.data.kinds, size)
        tensors = [torch.from_numpy(a) for a in (*tokens, split.labels)]
        return TokenBatches(tensors, size, shuffle_seed, steps, lengths=lengths, widths=widths)

    model = make_model(recipe.model, data, room)
    train, test = batches(data.train, recipe.seed, recipe.trainer.steps_per_epoch), batches(data.test)
    watched = {"val": batches(data.valid)} | ({"test": test} if recipe.watch_test else {})
    return Experiment(
        module=SequenceModule(model, recipe, padded=data.padded, any_length=len(train.widths) > 1),
        train=train,
        test=test,
        watched=watched,
        select=("val", "accuracy"),
        facts={
            "set": data.name,
            "train_cases": len(data.train),
            "validation_cases": len(data.valid),
            "test_cases": len(data.test),
            "classes": data.classes,
            "vocabulary": data.vocabulary,
            "max_length": data.length,
        },
    )
