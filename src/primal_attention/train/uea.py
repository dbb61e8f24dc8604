"""Training of classifiers: cross-entropy, optional label smoothing, augmentation and mixup; accuracy as the score.

A batch is (series (B, N, C), padding mask (B, N), labels (B,)).

Augmentation of padded series on the device, one random draw per case; padding never moves into the series.

UEA time-series classification: the paper's recipes, one per set, and a modern one for all sets.

primal train uea/JapaneseVowels                                PrimalFormer, the paper's settings
primal train uea/JapaneseVowels --model.attention primal+      Primal.+
primal train uea/Handwriting --model.attention softmax --protocol both
primal train uea-modern/NATOPS --data.folder data/uea
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.train.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.train.task import Batch, TrainingModule

if TYPE_CHECKING:
    from primal_attention.data.uea import SeriesData
    from primal_attention.train.task import Experiment


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training series; all off is the paper's way."""

    warp: float = 0.0
    """Strength of a smooth random warp of time, with a small crop."""
    crop: float = 0.1
    """The most that a warp cuts off the two ends together, as a part of the series."""
    unequal: bool = True
    """Warp, scale and jitter also where the series of a set differ in length."""
    scale: float = 0.0
    """Deviation of a random factor and offset per channel."""
    jitter: float = 0.0
    """Deviation of noise added to every value."""
    mixup: float = 0.0
    """Parameter of the beta distribution by which pairs of cases are mixed; 0 does not mix."""
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("warp", "scale", "jitter", "mixup"):
            value = getattr(self, name)
            require(value >= 0, f"augment.{name} must not be negative (got {value})")
        require(0 <= self.crop < 1, f"augment.crop must lie in [0, 1) (got {self.crop})")
        require(
            0 <= self.label_smoothing < 1, f"augment.label-smoothing must lie in [0, 1) (got {self.label_smoothing})"
        )


class ClassificationModule(TrainingModule):
    """A classifier of padded series in training.

    padded: False where all series have one length. The model then gets no mask: with one that hides nothing, softmax
    attention would miss the faster kernels and be timed as slower than it is.
    """

    splits_sequences: ClassVar[bool] = True

    def __init__(self, model: nn.Module, recipe: Recipe, augment: AugmentConfig, *, padded: bool = True) -> None:
        super().__init__(model, recipe)
        plain = padded and not augment.unequal
        self.augment = replace(augment, warp=0.0, scale=0.0, jitter=0.0) if plain else augment
        self.padded = padded

    def _seen(self, mask: Tensor) -> Tensor | None:
        return mask if self.padded else None

    def task_loss(self, batch: Batch) -> Tensor:
        x, mask, y = batch
        config = self.augment
        if config.warp:
            x = warp_time(x, mask, config.warp, crop=config.crop)
        if config.scale:
            x = scale_and_shift(x, config.scale)
        if config.jitter:
            x = jitter(x, config.jitter)
        if not config.mixup:
            logits = self.model(*self.tokens(x, self._seen(mask)))
            return F.cross_entropy(logits, y, label_smoothing=config.label_smoothing)
        x, mask, partner, share = mix(x, mask, config.mixup)
        logits = self.model(*self.tokens(x, self._seen(mask)))
        own = F.cross_entropy(logits, y, label_smoothing=config.label_smoothing, reduction="none")
        other = F.cross_entropy(logits, y[partner], label_smoothing=config.label_smoothing, reduction="none")
        return (share * own + (1 - share) * other).mean()

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        x, mask, y = batch
        logits = model(*self.tokens(x, self._seen(mask))).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == y).sum(),
            "loss": F.cross_entropy(logits, y, reduction="sum"),
            "cases": torch.tensor(len(y)),
        }


def warp_time(x: Tensor, mask: Tensor, strength: float, knots: int = 4, crop: float = 0.1) -> Tensor:
    """Read each series along a smooth random path through its own valid steps, the ends cut by up to `crop` in all.

    The path is the running sum of positive random speeds, so time never turns back. Padding stands on the right.
    """
    batch, steps, _ = x.shape
    lengths = (~mask).sum(dim=1)  # (B,)
    knot_speed = torch.exp(strength * torch.randn(batch, 1, knots + 2, device=x.device))
    speed = torch.nn.functional.interpolate(knot_speed, steps, mode="linear", align_corners=True).squeeze(1)
    speed = speed.masked_fill(mask, 0.0)
    path = speed.cumsum(dim=1) - speed[:, :1]
    path = path / path.amax(dim=1, keepdim=True).clamp(min=1e-6)  # (B, N) from 0 to 1 over the valid steps
    width = 1 - crop * torch.rand(batch, 1, device=x.device)
    start = (1 - width) * torch.rand(batch, 1, device=x.device)
    position = (start + width * path) * (lengths - 1).clamp(min=0).unsqueeze(1)
    low = position.floor().long()
    high = torch.minimum(low + 1, (lengths - 1).clamp(min=0).unsqueeze(1))
    part = (position - low).unsqueeze(-1)
    rows = torch.arange(batch, device=x.device).unsqueeze(1)
    warped = torch.lerp(x[rows, low], x[rows, high], part.to(x.dtype))
    return warped.masked_fill(mask.unsqueeze(-1), 0.0)


def scale_and_shift(x: Tensor, deviation: float) -> Tensor:
    """A random factor around 1 and a random offset around 0 for each case and channel."""
    batch, _, channels = x.shape
    factor = 1 + deviation * torch.randn(batch, 1, channels, device=x.device)
    offset = deviation * torch.randn(batch, 1, channels, device=x.device)
    return x * factor + offset


def jitter(x: Tensor, deviation: float) -> Tensor:
    """Independent noise on every value."""
    return x + deviation * torch.randn_like(x)


def mix(x: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix every case with a partner: (mixed series, its mask, partner index, own share (B,)).

    A step is valid where either case has one, and a shorter case counts as zero beyond its end.
    """
    # Neither a permutation by randperm nor a look at the parameters' range: a recorded step cannot wait for the device.
    partner = torch.rand(len(x), device=x.device).argsort()
    concentration = torch.full((len(x),), beta, device=x.device)
    share = torch.distributions.Beta(concentration, concentration, validate_args=False).sample()
    own = x.masked_fill(mask.unsqueeze(-1), 0.0)
    weight = share.view(-1, 1, 1)
    return weight * own + (1 - weight) * own[partner], mask & mask[partner], partner, share


@dataclass(frozen=True)
class Setting:
    """What the paper tuned per set: rank s, weight η, and landmarks as a multiple of the rank."""

    rank: int
    eta: float
    multiple: int


# set: (PrimalFormer, Primal.+)
PAPER: dict[str, tuple[Setting, Setting]] = {
    "EthanolConcentration": (Setting(30, 0.1, 10), Setting(40, 0.2, 10)),
    "FaceDetection": (Setting(20, 0.1, 5), Setting(40, 0.2, 5)),
    "Handwriting": (Setting(30, 0.2, 5), Setting(20, 0.5, 5)),
    "Heartbeat": (Setting(30, 0.5, 10), Setting(40, 0.5, 10)),
    "JapaneseVowels": (Setting(40, 0.5, 5), Setting(30, 0.2, 5)),
    "PEMS-SF": (Setting(40, 0.1, 5), Setting(40, 0.0, 5)),
    "SelfRegulationSCP1": (Setting(30, 0.5, 10), Setting(30, 0.2, 10)),
    "SelfRegulationSCP2": (Setting(20, 0.0, 10), Setting(20, 0.2, 10)),
    "SpokenArabicDigits": (Setting(20, 0.1, 5), Setting(30, 0.2, 5)),
    "UWaveGestureLibrary": (Setting(20, 0.0, 10), Setting(40, 0.1, 10)),
}
EVALUATED_TOKENS = 2**16  # in one batch of an evaluation
OTHER_SETS = (Setting(30, 0.1, 10), Setting(30, 0.2, 10))


@dataclass(frozen=True)
class UEAData:
    """Which set, where it lies, and how its series are cut."""

    name: str = "JapaneseVowels"
    folder: Path | None = None
    """Folder of the archive; None is $PRIMAL_UEA or data/uea. JapaneseVowels comes with aeon."""
    holdout: float = 0.2
    """Part of the training cases, class by class, that the validation protocol holds out."""
    held: Literal["random", "edge"] = "random"
    """Which cases: any, or those at an edge of their class, one of four by the seed (primal_attention.data.edges)."""
    clip: bool = True
    """Cut test series to the longest training series, as the paper does."""
    principal: bool = False
    """Set the principal directions of the channels, each of unit variance, beside the channels."""

    def __post_init__(self) -> None:
        require(0 < self.holdout < 1, f"data.holdout must lie between 0 and 1 (got {self.holdout})")


@dataclass(frozen=True)
class ClassifierConfig:
    """The network; see primal_attention.models.uea."""

    kind: Literal["paper", "modern"] = "paper"
    attention: tuple[str, ...] = ("primal",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 512
    num_heads: int = 8
    layers: int = 2
    ffn_dim: int = 2048
    dropout: float = 0.1
    rank: int | None = None
    """Directions s of Primal-Attention; None takes the paper's for the set."""
    landmarks: int | None = None
    """Rows that make f(X), at most the series' length; None takes the paper's for the set."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""
    r_scores: bool = True
    """Let Primal-Attention's r-scores reach its output; off is the paper's ablation (they stay in the objective)."""
    stem_kernel: int = 7
    """Kernel of the stem's convolutions (modern)."""
    differences: bool = False
    """Give the stem the steps from one value to the next beside the values (modern)."""
    local_kernel: int = 7
    """Kernel of the convolution beside attention (modern); 0 leaves it out."""
    attend_to_padding: bool = False
    """Let attention see the padding, as the published research code does (paper)."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "layers", "ffn_dim", "rank", "landmarks", "stem_kernel"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name.replace('_', '-')} must be at least 1 (got {value})")
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1) (got {self.dropout})")
        require(len(self.attention) > 0, "model.attention must name at least one kind")
        require(self.local_kernel >= 0, f"model.local-kernel must not be negative (got {self.local_kernel})")


@dataclass(frozen=True)
class UEARecipe(Recipe):
    """A classifier of one set of the archive."""

    benchmark: ClassVar[str] = "uea"

    protocol: Literal["last", "validation", "both"] = "last"
    """last: train on all training cases, report the LAST epoch and, apart, the BEST ON TEST (the paper's way).
    validation: hold cases out and report the epoch they choose. both: one training of each."""
    watch_test: bool = False
    """With held-out cases: measure test at every evaluation too. They still choose; this shows what they know."""
    data: UEAData = field(default_factory=UEAData)
    model: ClassifierConfig = field(default_factory=ClassifierConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def resolved(self) -> UEARecipe:
        setting = paper_setting(self.data.name, self.model.attention)
        rank = self.model.rank or setting.rank
        landmarks = self.model.landmarks or rank * setting.multiple
        model = dataclasses.replace(self.model, rank=rank, landmarks=landmarks)
        return dataclasses.replace(self, eta=setting.eta if self.eta is None else self.eta, model=model)

    def phases(self) -> list[tuple[str, Recipe]]:
        if self.protocol != "both":
            return [("", self)]
        # Early stopping is a choice by held-out data, so it belongs to the second training only.
        last = dataclasses.replace(self, protocol="last", trainer=dataclasses.replace(self.trainer, early_stop=0))
        return [("", last), ("validation", dataclasses.replace(self, protocol="validation", watch_test=False))]

    def label(self) -> str:
        return "-".join(self.model.attention)

    def build(self) -> Experiment:
        return build(self.resolved())


def paper_setting(name: str, attention: tuple[str, ...]) -> Setting:
    """The published setting of a set: PrimalFormer's, or Primal.+'s where softmax layers stand before."""
    former, plus = PAPER.get(name, OTHER_SETS)
    return plus if attention[-1].endswith("+") or "softmax" in attention else former


def paper_recipe(name: str) -> UEARecipe:
    """The paper's settings: RAdam 1e-3, clip 4, batch 16, 100 epochs (Adam on SpokenArabicDigits, 400 on PEMS-SF)."""
    return UEARecipe(
        data=UEAData(name=name),
        optim=OptimConfig(name="adam" if name == "SpokenArabicDigits" else "radam"),
        trainer=TrainerConfig(epochs=400 if name == "PEMS-SF" else 100),
    )


def modern_recipe(name: str) -> UEARecipe:
    """One recipe for every set, Primal-Attention with the KSVD loss in all layers; nothing is tuned per set."""
    return UEARecipe(
        eta=0.1,
        data=UEAData(name=name, clip=False, principal=True),
        model=ClassifierConfig(
            kind="modern",
            embed_dim=128,
            num_heads=8,
            layers=3,
            ffn_dim=512,
            dropout=0.2,
            rank=16,
            landmarks=64,
            local_kernel=15,
        ),
        augment=AugmentConfig(warp=0.4, scale=0.1, jitter=0.03, mixup=0.2, label_smoothing=0.1),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", clip=1.0),
        trainer=TrainerConfig(epochs=400, batch_size=32, ema=0.99),
    )


def make_model(config: ClassifierConfig, channels: int, classes: int, max_length: int) -> nn.Module:
    """The network of a resolved configuration."""
    from primal_attention.cli.table import without_r_scores
    from primal_attention.models.uea import modern_classifier, paper_classifier

    landmarks = min(config.landmarks or max_length, max_length)
    primal = {"rank": config.rank, "landmarks": landmarks, "data_dependent": config.data_dependent}
    keywords: dict[str, dict[str, Any]] = {"primal": primal}
    attention = config.attention[0] if len(config.attention) == 1 else config.attention
    model: nn.Module
    if config.kind == "paper":
        model = paper_classifier(
            channels,
            classes,
            max_length,
            attention=attention,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            layers=config.layers,
            ffn_dim=config.ffn_dim,
            dropout=config.dropout,
            attention_kwargs=keywords,
            attend_to_padding=config.attend_to_padding,
        )
    else:
        model = modern_classifier(
            channels,
            classes,
            attention=attention,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            layers=config.layers,
            ffn_dim=config.ffn_dim,
            dropout=config.dropout,
            stem_kernel=config.stem_kernel,
            differences=config.differences,
            local_kernel=config.local_kernel or None,
            attention_kwargs=keywords,
        )
    return model if config.r_scores else without_r_scores(model)


def build(recipe: UEARecipe) -> Experiment:
    """Read the set, hold out what the protocol asks, standardise by the cases that are trained on, make the model."""
    from primal_attention.data import uea

    return build_from(recipe, uea.load(recipe.data.name, recipe.data.folder))


def build_from(recipe: UEARecipe, data: SeriesData) -> Experiment:
    """The experiment of a resolved recipe on data that is already in memory."""
    import torch

    from primal_attention.data.edges import edge_holdout
    from primal_attention.data.uea import PrincipalChannels, Split, Standardizer, pad, stratified_holdout
    from primal_attention.train.batches import Batches
    from primal_attention.train.task import Experiment

    train, held = data.train, None
    if recipe.protocol == "validation":
        if recipe.data.held == "edge":
            kept, out = edge_holdout(train, recipe.data.holdout, recipe.seed)
        else:
            kept, out = stratified_holdout(train.labels, recipe.data.holdout, recipe.seed)
        train, held = train.take(kept), train.take(out)
    standard = (PrincipalChannels if recipe.data.principal else Standardizer).fit(train.series)
    size = recipe.trainer.batch_size
    wide = max(size, EVALUATED_TOKENS // data.max_length)  # nothing depends on how an evaluation is cut
    clip = recipe.data.clip or recipe.model.kind == "paper"  # the paper's network has a fixed length

    def batches(split: Split, shuffle_seed: int | None = None, steps: int = 0) -> Batches:
        values, mask = pad([standard(s) for s in split.series], length=data.max_length, clip=clip)
        arrays = (torch.from_numpy(values), torch.from_numpy(mask), torch.from_numpy(split.labels))
        return Batches(arrays, wide if shuffle_seed is None else size, shuffle_seed, steps)

    fit, test = batches(train, recipe.seed, recipe.trainer.steps_per_epoch), batches(data.test)
    watched = {} if held is None else {"val": batches(held)}
    if held is None or recipe.watch_test:
        watched["test"] = test
    model = make_model(recipe.model, fit.tensors[0].shape[-1], len(data.classes), data.max_length)
    padded = any(bool(b.tensors[1].any()) for b in (fit, test, *watched.values()))
    return Experiment(
        module=ClassificationModule(model, recipe, recipe.augment, padded=padded),
        train=fit,
        test=test,
        watched=watched,
        select=None if held is None else ("val", "accuracy"),
        facts={
            "set": data.name,
            "train_cases": len(train),
            "test_cases": len(data.test),
            "channels": data.channels,
            "classes": len(data.classes),
            "max_length": data.max_length,
        },
        standardizer=standard,
    )
