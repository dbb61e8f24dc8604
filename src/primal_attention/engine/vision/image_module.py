"""Training of image classifiers: cross-entropy with mixed and smoothed labels, and J squared after the batch's mean.

A batch is (uint8 images (B, 3, S, S), labels (B,)). Images that are larger than the model's are cut on the device;
those that workers have cut already only wait for erasing and mixing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.engine.module import Batch, TrainingModule
from primal_attention.engine.vision.image_augment import AUGMENT, augment_pixels, erase, mix, smooth
from primal_attention.engine.vision.image_batches import NOBODY
from primal_attention.models.vision import ImageClassifier

if TYPE_CHECKING:
    from primal_attention.engine.vision.image import ImageRecipe


class ImageModule(TrainingModule):
    """An image classifier in training."""

    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    model: ImageClassifier

    def __init__(self, model: nn.Module, recipe: ImageRecipe, classes: int) -> None:
        super().__init__(model, recipe)
        self.classes = classes
        self.strength = AUGMENT[recipe.augment]
        self.on_device = recipe.data.cache == "device"

    @torch.no_grad()
    def augment(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and class probabilities, as the loss wants them."""
        with torch.autocast(images.device.type, enabled=False):  # positions in half precision are off by a pixel
            size = self.model.image_size
            pixels = augment_pixels(images, size, self.strength) if self.on_device else images / 255
            pixels = self.model.normalise(pixels)
            if self.strength.erase:
                pixels = erase(pixels, self.strength.erase)
            return mix(pixels, smooth(labels, self.classes, self.strength.smoothing), self.strength)

    def task_loss(self, batch: Batch) -> Tensor:
        images, targets = self.augment(*batch)
        return F.cross_entropy(self.model(images), targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, ignore_index=NOBODY, reduction="sum"),
            "cases": (labels != NOBODY).sum(),
        }
