"""UEA time-series classification: the paper's recipes, one modern recipe for every data set, and data of one's own.

    primal train uea/JapaneseVowels                               PrimalFormer, the paper's settings
    primal train uea/Handwriting --model.attention primal+ --protocol both
    primal train uea-modern/NATOPS --data.folder data/uea         the modern recipe
    primal train uea-modern --data.file my.npz                    your own series: .npz, .parquet or .ts

The loss is cross-entropy, the score is accuracy. A batch is (series (B, N, C), padding mask (B, N), labels (B,)).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.data import uea
from primal_attention.data.uea import PrincipalChannels, SeriesData, Split, Standardizer, pad, stratified_holdout
from primal_attention.models.uea import modern_classifier, paper_classifier, without_r_scores
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, require, require_range
from primal_attention.train.task import Batch, Batches, Experiment, TrainingModule, hash_data

EVALUATED_TOKENS = 2**16  # in one evaluation batch


# What the paper tuned per data set: rank s and weight η of PrimalFormer and of Primal.+, landmarks as multiple of s.
PAPER = {
    "EthanolConcentration": ((30, 0.1), (40, 0.2), 10),
    "FaceDetection": ((20, 0.1), (40, 0.2), 5),
    "Handwriting": ((30, 0.2), (20, 0.5), 5),
    "Heartbeat": ((30, 0.5), (40, 0.5), 10),
    "JapaneseVowels": ((40, 0.5), (30, 0.2), 5),
    "PEMS-SF": ((40, 0.1), (40, 0.0), 5),
    "SelfRegulationSCP1": ((30, 0.5), (30, 0.2), 10),
    "SelfRegulationSCP2": ((20, 0.0), (20, 0.2), 10),
    "SpokenArabicDigits": ((20, 0.1), (30, 0.2), 5),
    "UWaveGestureLibrary": ((20, 0.0), (40, 0.1), 10),
}
OTHER_SETS = ((30, 0.1), (30, 0.2), 10)


@dataclass(frozen=True)
class UEAData:
    """The data set, its files, and how its series are prepared."""

    name: str = "JapaneseVowels"
    folder: Path | None = None
    """Folder of the archive; None is $PRIMAL_UEA or data/uea. JapaneseVowels comes with aeon."""
    file: Path | None = None
    """Your own data instead of a set of the archive: .npz (X, y), .parquet or .ts."""
    test_file: Path | None = None
    """Test samples of your own data; None splits data.file by class and seed."""
    holdout: float = 0.2
    """Fraction of the training samples of every class that the validation protocol holds out."""
    clip: bool = True
    """Cut test series to the longest training series, as the paper does."""
    principal: bool = False
    """Append the principal directions of the channels, each of unit variance, to the channels."""

    def __post_init__(self) -> None:
        require_range(self, "data", "holdout", "lie between 0 and 1")
        require(self.test_file is None or self.file is not None, "data.test-file needs --data.file beside it")


@dataclass(frozen=True)
class ClassifierConfig(NetworkConfig):
    """The network; see primal_attention.models.uea."""

    kind: Literal["paper", "modern"] = "paper"
    ffn_dim: int = 2048
    dropout: float = 0.1
    landmarks: int | None = None
    """Rows that make f(X), at most the series' length; None takes the paper's for the data set."""
    data_dependent: bool = True
    """Build Primal-Attention's projection weights from f(X); off uses W_e and W_r themselves."""
    r_scores: bool = True
    """Use Primal-Attention's r-scores in its output; off is the paper's ablation (the objective keeps them)."""
    stem_kernel: int = 7
    """Kernel of the stem's convolutions (modern)."""
    local_kernel: int = 7
    """Kernel of the convolution parallel to attention (modern); 0 leaves it out."""
    tokens: int = 0
    """Average steps in the stem so that the longest training series becomes at most so many tokens (modern); 0 has one
    token per step."""
    attend_to_padding: bool = False
    """Let attention see the padding, as the published research code does (paper)."""


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of the training series; the paper has none."""

    warp: float = 0.0
    """Strength of a smooth random warp of time, with a small crop."""
    scale: float = 0.0
    """Standard deviation of a random factor and offset per channel."""
    jitter: float = 0.0
    """Standard deviation of noise added to every value."""
    mixup: float = 0.0
    """Parameter of the beta distribution of mixup; 0 does not mix."""
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_range(self, "augment", "warp scale jitter mixup", "not be negative")
        require_range(self, "augment", "label_smoothing", "lie in [0, 1)")


@dataclass(frozen=True)
class UEARecipe(Recipe):
    """A classifier of one data set."""

    benchmark: ClassVar[str] = "uea"

    protocol: Literal["last", "validation", "both"] = "last"
    """last: train on all training samples; report the LAST epoch and, separately, the BEST ON TEST, as the paper does.
    validation: hold samples out and report the epoch that they choose. both: one training of each."""
    watch_test: bool = False
    """With a holdout: evaluate test during training too. The holdout still chooses the epoch."""
    data: UEAData = field(default_factory=UEAData)
    model: ClassifierConfig = field(default_factory=ClassifierConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def resolved(self) -> UEARecipe:
        former, plus, landmarks_per_rank = PAPER.get(self.data.name, OTHER_SETS)
        rank, eta = plus if self.model.is_primal_plus else former
        rank = self.model.rank or rank
        model = replace(self.model, rank=rank, landmarks=self.model.landmarks or rank * landmarks_per_rank)
        return replace(self, eta=eta if self.eta is None else self.eta, model=model)

    def phases(self) -> list[tuple[str, Recipe]]:
        if self.protocol != "both":
            return [("", self)]
        validation = replace(self, protocol="validation", watch_test=False)
        return [("", replace(self, protocol="last")), ("validation", validation)]

    def label(self) -> str:
        own = f"{self.data.file.stem}-" if self.data.file else ""
        return own + super().label()

    def build(self) -> Experiment:
        recipe, config = self.resolved(), self.data
        if config.file is not None:
            return build_from(recipe, uea.load_file(config.file, config.test_file, seed=self.seed))
        require(config.name != "", "which data set? primal train uea/NAME, or primal train uea --data.file FILE")
        return build_from(recipe, uea.load(config.name, config.folder))


def paper_recipe(name: str) -> UEARecipe:
    """Return the paper's: RAdam 1e-3, clip 4, batch 16, 100 epochs (Adam on SpokenArabicDigits, 400 on PEMS-SF)."""
    return UEARecipe(
        data=UEAData(name=name),
        optim=OptimConfig(name="adam" if name == "SpokenArabicDigits" else "radam"),
        trainer=TrainerConfig(epochs=400 if name == "PEMS-SF" else 100),
    )


def modern_recipe(name: str) -> UEARecipe:
    """Return one recipe for all data sets: Primal-Attention with the KSVD loss in all layers, nothing tuned per set."""
    return UEARecipe(
        eta=0.1,
        data=UEAData(name=name, clip=False, principal=True),
        model=ClassifierConfig(
            embed_dim=128, layers=3, rank=16, kind="modern", ffn_dim=512, dropout=0.2, landmarks=64, local_kernel=15
        ),
        augment=AugmentConfig(warp=0.4, scale=0.1, jitter=0.03, mixup=0.2, label_smoothing=0.1),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", clip=1.0),
        trainer=TrainerConfig(epochs=400, batch_size=32, ema=0.99),
    )


def make_model(config: ClassifierConfig, channels: int, classes: int, max_length: int) -> nn.Module:
    """Return the network of a resolved configuration."""
    stride = -(-max_length // config.tokens) if config.tokens else 1
    tokens = -(-max_length // stride)
    landmarks = min(config.landmarks or tokens, tokens)
    primal = {"rank": config.rank, "landmarks": landmarks, "data_dependent": config.data_dependent}
    names = ("attention", "embed_dim", "num_heads", "layers", "ffn_dim", "dropout")
    shared: dict[str, Any] = {"attention_kwargs": {"primal": primal}, **{name: getattr(config, name) for name in names}}
    if config.kind == "paper":
        model = paper_classifier(channels, classes, max_length, attend_to_padding=config.attend_to_padding, **shared)
    else:
        shared |= {"stem_kernel": config.stem_kernel, "local_kernel": config.local_kernel or None, "stride": stride}
        model = modern_classifier(channels, classes, **shared)
    return model if config.r_scores else without_r_scores(model)


def build_from(recipe: UEARecipe, data: SeriesData) -> Experiment:
    """Return the experiment of a resolved recipe on data in memory; training samples alone decide the scaling."""
    train, validation = data.train, None
    if recipe.protocol == "validation":
        remaining, holdout = stratified_holdout(train.labels, recipe.data.holdout, recipe.seed)
        train, validation = train.take(remaining), train.take(holdout)
    standardizer = (PrincipalChannels if recipe.data.principal else Standardizer).fit(train.series)
    size = recipe.trainer.batch_size
    evaluated = max(size, EVALUATED_TOKENS // data.max_length)  # scores do not depend on the evaluation's batches
    clip = recipe.data.clip or recipe.model.kind == "paper"  # the paper's network has a fixed length

    def batches(split: Split, shuffle_seed: int | None = None, steps: int = 0) -> Batches:
        values, mask = pad([standardizer(s) for s in split.series], length=data.max_length, clip=clip)
        tensors = [torch.from_numpy(array) for array in (values, mask, split.labels)]
        return Batches(tensors, evaluated if shuffle_seed is None else size, shuffle_seed, steps)

    fit, test = batches(train, recipe.seed, recipe.trainer.steps_per_epoch), batches(data.test)
    watched = {} if validation is None else {"val": batches(validation)}
    if validation is None or recipe.watch_test:
        watched["test"] = test
    model = make_model(recipe.model, fit.tensors[0].shape[-1], len(data.classes), data.max_length)
    has_padding = any(bool(b.tensors[1].any()) for b in (fit, test, *watched.values()))
    return Experiment(
        module=ClassificationModule(model, recipe, padded=has_padding),
        train=fit,
        test=test,
        watched=watched,
        chooses_epoch=validation is not None,
        facts={
            "set": data.name if recipe.data.file is None else recipe.data.file.name,
            "sha256": hash_data((data.train, data.test, data.classes)),
            "train_samples": len(train),
            "test_samples": len(data.test),
            "channels": data.channels,
            "classes": len(data.classes),
            "max_length": data.max_length,
        },
        standardizer=standardizer,
    )


class ClassificationModule(TrainingModule):
    """A classifier of series in training."""

    splits_sequences: ClassVar[bool] = True
    recipe: UEARecipe

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        x, mask, _ = batch
        return self.tokens(x, mask if self.padded else None)

    def task_loss(self, batch: Batch) -> Tensor:
        (x, mask, labels), config = batch, self.recipe.augment
        if config.warp:
            x = warp_time(x, mask, config.warp)
        if config.scale:
            x = scale_and_shift(x, config.scale)
        if config.jitter:
            x = x + config.jitter * torch.randn_like(x)
        loss = partial(F.cross_entropy, label_smoothing=config.label_smoothing)
        if not config.mixup:
            return loss(self.model(*self.inputs((x, mask, labels))), labels)
        x, mask, partner, share = mix(x, mask, config.mixup)
        logits = self.model(*self.inputs((x, mask, labels)))
        own, other = (loss(logits, target, reduction="none") for target in (labels, labels[partner]))
        return (share * own + (1 - share) * other).mean()


def warp_time(x: Tensor, mask: Tensor, strength: float, knots: int = 4, crop: float = 0.1) -> Tensor:
    """Resample each series along a smooth random path through its valid steps, which cuts up to `crop` off the ends.

    The path is the running sum of positive random speeds, so it is monotonic. Padding is on the right.
    """
    batch, steps, _ = x.shape
    last = ((~mask).sum(dim=1, keepdim=True) - 1).clamp(min=0)  # (B, 1)
    knot_speed = torch.exp((strength * torch.randn(batch, 1, knots + 2, device=x.device)).clamp(-30, 30))
    speed = F.interpolate(knot_speed, steps, mode="linear", align_corners=True).squeeze(1)
    speed = speed.masked_fill(mask, 0.0)
    path = speed.cumsum(dim=1) - speed[:, :1]
    path = path / path.amax(dim=1, keepdim=True).clamp(min=1e-6)  # (B, N) from 0 to 1 over the valid steps
    width = 1 - crop * torch.rand(batch, 1, device=x.device)
    start = (1 - width) * torch.rand(batch, 1, device=x.device)
    position = (start + width * path) * last
    low = position.floor().long()
    rows = torch.arange(batch, device=x.device).unsqueeze(1)
    weight = (position - low).unsqueeze(-1).to(x.dtype)
    warped = torch.lerp(x[rows, low], x[rows, torch.minimum(low + 1, last)], weight)
    return warped.masked_fill(mask.unsqueeze(-1), 0.0)


def scale_and_shift(x: Tensor, deviation: float) -> Tensor:
    """Apply a random factor around 1 and a random offset around 0 to each sample and channel."""
    factor, offset = deviation * torch.randn(2, x.shape[0], 1, x.shape[2], device=x.device)
    return x * (1 + factor) + offset


def mix(x: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix every sample with a partner: (mixed series, its mask, partner index, own share (B,)).

    A step is valid where either sample has one; a shorter sample counts as zero beyond its end.
    """
    # No randperm and no argument validation: both wait for the device, which a recorded step must not.
    partner = torch.rand(len(x), device=x.device).argsort()
    concentration = torch.full((len(x),), beta, device=x.device)
    share = torch.distributions.Beta(concentration, concentration, validate_args=False).sample()
    own = x.masked_fill(mask.unsqueeze(-1), 0.0)
    weight = share.view(-1, 1, 1)
    return weight * own + (1 - weight) * own[partner], mask & mask[partner], partner, share
