"""Training of classifiers: cross-entropy, optional label smoothing, augmentation and mixup; accuracy as the score.

A batch is (series (B, N, C), padding mask (B, N), labels (B,)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.engine.config import Recipe, require
from primal_attention.engine.module import Batch, TrainingModule
from primal_attention.engine.timeseries.augment import jitter, mix, scale_and_shift, warp_time


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
