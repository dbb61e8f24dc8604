"""UEA time-series classification: the paper's recipes, one per set, and a modern one for all sets.

primal train uea/JapaneseVowels                                PrimalFormer, the paper's settings
primal train uea/JapaneseVowels --model.attention primal+      Primal.+
primal train uea/Handwriting --model.attention softmax --protocol both
primal train uea-modern/NATOPS --data.folder data/uea
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from primal_attention.engine.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.engine.timeseries.classify import AugmentConfig

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.data.series import SeriesData
    from primal_attention.engine.experiment import Experiment


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
    """The network; see primal_attention.models.classifier."""

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
    from primal_attention.engine.ablation import without_r_scores
    from primal_attention.models.classifier import modern_classifier, paper_classifier

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
    from primal_attention.data.principal import PrincipalChannels
    from primal_attention.data.series import Split, Standardizer, pad, stratified_holdout
    from primal_attention.engine.batches import Batches
    from primal_attention.engine.experiment import Experiment
    from primal_attention.engine.timeseries.classify import ClassificationModule

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
