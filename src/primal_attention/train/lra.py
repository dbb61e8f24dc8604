"""Long-Range Arena: the paper's recipes, one per task, and shorter trainings of the same models.

    primal data listops && primal train lra/listops               PrimalFormer, the paper's settings
    primal train lra/text --model.attention primal+               Primal.+
    primal train lra/image --model.attention nystrom --data.folder data/cifar10
    primal train lra-short/text                                   the same model in a fraction of the time
    primal train lra-modern/text                                  convolutions beside decay in both directions

The benchmark counts steps: an epoch is what lies between two evaluations. Validation chooses the epoch, and test is
evaluated once. A batch is (tokens (B, N), labels (B,)), or (tokens, tokens, labels) where a sample is a pair.

Padding costs as much as tokens and, where layers ignore it, changes nothing. Evaluation batches therefore hold samples
of similar length, cut where the longest one ends. Training batches may come in a few length buckets (`bucket_widths`),
each cut to one width, so that the steps of a bucket have one shape and can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.data.lra import listops, pathfinder, tokens
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.data.storage import default_folder
from primal_attention.models.lra import LRAClassifier
from primal_attention.models.uea import without_r_scores
from primal_attention.nn.blocks import Activation
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, override, require_range
from primal_attention.train.task import Batch, Batches, Experiment, TrainingModule, derive_seed, hash_data

READERS = {
    "listops": listops.load,
    "text": tokens.load_text,
    "retrieval": tokens.load_retrieval,
    "image": tokens.load_image,
    "pathfinder": pathfinder.load,
}
IMAGES = ("image", "pathfinder")
EVALUATED_TOKENS = 2**19  # in one evaluation batch
LANDMARKS_PER_RANK = 10
WIDTH_MULTIPLE = 64  # kernels prefer widths that are multiples of it
ROWS_AT_ONCE = 4096  # read from memory-mapped arrays


class Task(NamedTuple):
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
# Shorter trainings of the same models: 20 evaluations, at a higher learning rate, and what each task changes. Few steps
# do not teach the order of the tokens, so positions start as a line or a grid, and black pixels are padding, as in the
# paper's runs. Random landmarks: the model memorises sequences by fixed ones. Averaged weights: validation accuracy
# falls before the learning rate does.
SHORT_TRAINING: dict[str, Any] = {
    "optim.lr": 1e-3,
    "optim.warmup": 0.1,
    "optim.clip": 1.0,
    "data.length_buckets": 4,  # as many shapes as a training records
    "trainer.epochs": 20,
    "trainer.steps_per_epoch": 250,
}
SHORT: dict[str, dict[str, Any]] = {
    "listops": {"model.positions": "line", "trainer.ema": 0.998},
    "text": {"optim.lr": 5e-4, "model.sampling": "random", "trainer.ema": 0.998},
    "retrieval": {},
    "image": {"trainer.steps_per_epoch": 600, "trainer.batch_size": 64},
    "pathfinder": {
        "trainer.steps_per_epoch": 1000,
        "optim.lr": 5e-4,
        "data.zero_is_padding": True,
        "model.positions": "grid",
    },
}

MODERN: dict[str, Any] = {
    "eta": 0.1,
    "model.embed_dim": 128,
    "model.num_heads": 4,
    "model.layers": 6,
    "model.ffn_dim": 256,
    "model.activation": "glu",
    "model.local_kernel": 31,
    "model.rank": 20,
    "model.data_dependent": False,
    "model.decay": "learned",
    "model.positions": "line",
    "optim.weight_decay": 0.05,
    "trainer.steps_per_epoch": 1000,
    "trainer.batch_size": 64,
    "trainer.ema": 0.998,
}


@dataclass(frozen=True)
class LRAData:
    """The task and its files."""

    task: Literal["listops", "text", "retrieval", "image", "pathfinder"] = "listops"
    folder: Path | None = None
    """Folder of the task's files; None is $PRIMAL_LRA/TASK or data/lra/TASK."""
    zero_is_padding: bool = False
    """Image, Pathfinder: treat black pixels as padding, as the published research code does. The darker the images,
    the lower the cost."""
    length_buckets: int = 1
    """Padded tasks: length buckets of the training batches, each cut where its longest samples end; 1 mixes all
    lengths, as model.published-padding does."""

    def __post_init__(self) -> None:
        require_range(self, "data", "length_buckets", "be at least 1")


@dataclass(frozen=True)
class LRAModel(NetworkConfig):
    """The network; see primal_attention.models.lra."""

    embed_dim: int = 64
    num_heads: int = 2
    ffn_dim: int = 128
    dropout: float = 0.1
    landmarks: int | None = None
    """Rows that make f(X); None is ten times the rank, as in the paper."""
    sampling: Literal["even", "random"] = "even"
    """Rows that make f(X) in training: evenly spaced, or each moved at random by up to half of the spacing. Without
    data-dependent weights there is no f(X), and random counts as even."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""
    decay: Literal["learned"] | None = None
    """Decay of Primal-Attention without data-dependent weights: sums over the tokens with weights γ^|i−j|."""
    r_scores: bool = True
    """Use Primal-Attention's r-scores in its output; off is the paper's ablation (the objective keeps them)."""
    local_kernel: int | None = None
    """Width of a depthwise convolution beside each attention; None is none."""
    activation: Activation = "gelu"
    """Activation of the feed-forward layers."""
    positions: Literal["random", "line", "grid"] = "random"
    """Initial values of the learned positions: noise, waves along the sequence (line), or waves along the rows and the
    columns of an image (grid)."""
    published_padding: bool = False
    """Treat padding as the published research code does (primal and softmax layers). Sequences are then not cut."""


@dataclass(frozen=True)
class LRARecipe(Recipe):
    """A classifier for one task of the arena."""

    benchmark: ClassVar[str] = "lra"

    watch_test: bool = False
    """Evaluate test during training too, for the columns LAST and BEST-ON-TEST; validation still chooses."""
    data: LRAData = field(default_factory=LRAData)
    model: LRAModel = field(default_factory=LRAModel)

    def resolved(self) -> LRARecipe:
        task = TASKS[self.data.task]
        rank, eta = task.plus if self.model.is_primal_plus else task.former
        rank = self.model.rank or rank
        sampling = self.model.sampling if self.model.data_dependent else "even"
        landmarks = self.model.landmarks or LANDMARKS_PER_RANK * rank
        model = replace(self.model, rank=rank, landmarks=landmarks, sampling=sampling)
        return replace(self, eta=eta if self.eta is None else self.eta, model=model)

    def build(self) -> Experiment:
        return build_from(self.resolved(), load(self.data))


def paper_recipe(name: str) -> LRARecipe:
    """Return the paper's settings: AdamW 1e-4, a linear one-cycle schedule, mixed precision."""
    task = TASKS[name]
    return LRARecipe(
        data=LRAData(task=name),  # type: ignore[arg-type]
        optim=OptimConfig(
            name="adamw", lr=1e-4, eps=1e-6, schedule="onecycle-linear", warmup=task.warmup / task.steps, clip=0.0
        ),
        trainer=TrainerConfig(
            epochs=task.steps // task.evaluate_every,
            steps_per_epoch=task.evaluate_every,
            batch_size=task.batch_size,
            precision="bf16-mixed",
            compile="auto",
        ),
    )


def short_recipe(name: str) -> LRARecipe:
    """Return the paper's model, trained in a fraction of the paper's time."""
    return override(paper_recipe(name), {**SHORT_TRAINING, **SHORT[name]})


def modern_recipe(name: str) -> LRARecipe:
    """Return the settings of a deeper network that are the same for all tasks.

    A data-dependent layer can memorise training sequences by the positions of their tokens. Here the weights do not
    depend on the data, and running sums that decay in both directions mix the tokens.
    """
    return override(paper_recipe(name), {**SHORT_TRAINING, **MODERN})


def load(config: LRAData) -> TokenData:
    """Read a task's three splits."""
    data = READERS[config.task](config.folder or default_folder("lra", config.task))
    return replace(data, padded=True) if config.zero_is_padding else data


def make_model(config: LRAModel, data: TokenData, room: int | None = None) -> nn.Module:
    """Return the network of a resolved configuration; room: see `LRAClassifier`."""
    settings = dict(vars(config))
    has_r_scores = settings.pop("r_scores")
    primal = {name: settings.pop(name) for name in ("rank", "landmarks", "sampling", "data_dependent", "decay")}
    keywords = {"primal": primal, "linformer": {"max_length": data.length}}
    has_pairs, sizes = data.train.second is not None, (data.vocabulary, data.classes, data.length)
    model = LRAClassifier(*sizes, pairs=has_pairs, attention_kwargs=keywords, **settings)
    model.max_tokens = room
    return model if has_r_scores else without_r_scores(model)


def build_from(recipe: LRARecipe, data: TokenData) -> Experiment:
    """Return the experiment of a resolved recipe on data in memory."""
    # Where padding takes part in the computation, results depend on how much of it there is.
    cuts = data.padded and not recipe.model.published_padding
    # Padding between tokens on several devices stays in place.
    gathers = cuts and recipe.data.zero_is_padding and recipe.data.task in IMAGES and recipe.trainer.context == 1
    room = count_room([split.tokens for split in data.splits.values()]) if gathers else None

    def batches(split: TokenSplit, shuffle_seed: int | None = None, steps: int = 0) -> TokenBatches:
        tokens = [split.tokens] if split.second is None else [split.tokens, split.second]
        size, lengths, widths = recipe.trainer.batch_size, None, []
        if cuts and room is None and (shuffle_seed is None or recipe.data.length_buckets > 1):
            lengths = torch.stack([count_lengths(t) for t in tokens]).amax(dim=0)
        if shuffle_seed is None:
            size = max(size, EVALUATED_TOKENS // data.length)  # scores do not depend on the evaluation's batches
        elif lengths is not None:
            widths = bucket_widths(lengths, data.length, recipe.data.length_buckets, size)
        tensors = [torch.from_numpy(array) for array in (*tokens, split.labels)]
        return TokenBatches(tensors, size, shuffle_seed, steps, lengths=lengths, widths=widths)

    train, test = batches(data.train, recipe.seed, recipe.trainer.steps_per_epoch), batches(data.test)
    model = make_model(recipe.model, data, room)
    return Experiment(
        module=SequenceModule(model, recipe, padded=data.padded, any_length=len(train.widths) > 1),
        train=train,
        test=test,
        watched={"val": batches(data.valid)} | ({"test": test} if recipe.watch_test else {}),
        chooses_epoch=True,
        facts={
            "set": data.name,
            "sha256": hash_data(data.splits),
            "train_samples": len(data.train),
            "validation_samples": len(data.valid),
            "test_samples": len(data.test),
            "classes": data.classes,
            "vocabulary": data.vocabulary,
            "max_length": data.length,
        },
    )


class SequenceModule(TrainingModule):
    """A classifier of token sequences in training; token 0 is padding if there is any."""

    splits_sequences: ClassVar[bool] = True
    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    evaluates_compiled: ClassVar[bool] = False

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        *sequences, _ = batch
        inputs: list[Tensor | None] = []
        for ids in sequences:  # stored as bytes, looked up as int64
            inputs += self.tokens(ids.long(), ids == 0 if self.padded else None)
        return tuple(inputs)


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (np.asarray(tokens[start : start + ROWS_AT_ONCE]) for start in range(0, len(tokens), ROWS_AT_ONCE))


def count_lengths(tokens: np.ndarray) -> Tensor:
    """Count the tokens of each sample up to the last one that is not padding (0); all of them if there is none."""
    ends = [tokens.shape[1] - np.argmax(chunk[:, ::-1] != 0, axis=1) for chunk in _chunks(tokens)]
    return torch.from_numpy(np.concatenate(ends))


def count_room(splits: Sequence[np.ndarray]) -> int:
    """Count the positions that hold the tokens of any sample once its padding (0) is left out."""
    most = max(int(np.count_nonzero(chunk, axis=1).max()) for tokens in splits for chunk in _chunks(tokens))
    return _round_width(most, splits[0].shape[1])


def bucket_widths(lengths: Tensor, full: int, buckets: int, batch_size: int) -> list[int]:
    """Return the widths of length buckets, ascending up to `full`.

    The first holds half of the samples, the next one half of the rest, and so on. There are fewer than `buckets` where
    one would not fill a batch.
    """
    widths: list[int] = []
    ordered, taken = lengths.sort().values, 0
    for _ in range(buckets - 1):
        upto = taken + (len(ordered) - taken) // 2
        width = _round_width(int(ordered[max(upto - 1, 0)]), full)
        upto = int((ordered <= width).sum())
        if upto - taken < batch_size or len(ordered) - upto < batch_size:
            break
        widths.append(width)
        taken = upto
    return [*widths, full]


def _round_width(length: int, full: int) -> int:
    return min(-(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, full)


@dataclass(eq=False)
class TokenBatches(Batches):
    """As `Batches`, where the first tensors are (samples, length) tokens and the last one the labels."""

    lengths: Tensor | None = None
    """Lengths of the samples; None cuts no batch."""
    widths: Sequence[int] = ()
    """Widths of the length buckets in training."""

    def order(self, turn: int) -> Tensor:
        """In evaluation the longest samples first. With buckets, batches of one bucket each, in random order.

        Samples that do not fill a batch join the next bucket.
        """
        if self.lengths is not None and self.shuffle_seed is None:
            return self.lengths.argsort(descending=True, stable=True)
        if self.lengths is None or not self.widths:
            return super().order(turn)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        bucket = torch.searchsorted(torch.tensor(self.widths), self.lengths)
        batches, rest = [], torch.empty(0, dtype=torch.long)
        for number in range(len(self.widths)):
            members = (bucket == number).nonzero().squeeze(1)
            members = torch.cat([rest, members[torch.randperm(len(members), generator=generator)]])
            count = len(members) // self.batch_size * self.batch_size
            batches.append(members[:count].view(-1, self.batch_size))
            rest = members[count:]
        full = torch.cat(batches)
        return torch.cat([full[torch.randperm(len(full), generator=generator)].flatten(), rest])

    def width(self, rows: Tensor) -> int:
        """Return the width to which a batch of these samples is cut."""
        full = self.tensors[0].shape[1]
        if self.lengths is None:
            return full
        longest = int(self.lengths[rows].max())
        return next((width for width in self.widths if width >= longest), _round_width(longest, full))

    def finish(self, batch: Batch, rows: Tensor) -> Batch:
        *tokens, labels = batch
        width = self.width(rows)
        return (*(t[:, :width] for t in tokens), labels)
