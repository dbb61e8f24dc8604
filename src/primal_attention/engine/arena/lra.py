"""Long-Range Arena: the paper's recipes, one per task, in steps as the benchmark counts them.

primal data listops && primal train lra/listops                  PrimalFormer, the paper's settings
primal train lra/text --model.attention primal+                  Primal.+
primal train lra/image --model.attention nystrom --data.folder data/cifar10
primal train lra-short/text                                      the same model in a fraction of the time

An epoch is the stretch between two evaluations. Validation data choose the epoch, and test is measured once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from primal_attention.engine.config import OptimConfig, Recipe, TrainerConfig, require

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.data.tokens import TokenData
    from primal_attention.engine.experiment import Experiment

EVALUATED_TOKENS = 2**19  # in one batch of an evaluation
IMAGES = ("image", "pathfinder")
MULTIPLE = 10  # landmarks as a multiple of the rank


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
        landmarks = self.model.landmarks or MULTIPLE * rank
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
    from primal_attention.data import bytes as text
    from primal_attention.data import listops, pathfinder, pixels, retrieval

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
    from primal_attention.engine.ablation import without_r_scores
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

    from primal_attention.data.tokens import TokenSplit
    from primal_attention.engine.arena.sequences import SequenceModule
    from primal_attention.engine.arena.streams import TokenBatches, kinds_of, lengths_of, room_of
    from primal_attention.engine.experiment import Experiment

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
