"""What workers do to a picture: the middle of it for evaluation, random parts of it for training.

Plain crops and flips need Pillow alone. DeiT's RandAugment is torchvision's. All draws come from torch's generator,
which whoever reads images seeds for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from primal_attention.data.errors import import_package
from primal_attention.data.images import square, to_array, whole_side

if TYPE_CHECKING:
    from PIL.Image import Image

RATIO = (3 / 4, 4 / 3)  # of width to height, of random parts


def uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def evaluation(size: int) -> Callable[[Image], np.ndarray]:
    return partial(square, side=whole_side(size), size=size)


def training(size: int, *, smallest: float, ops: int, magnitude: float) -> Callable[[Image], np.ndarray]:
    """Random part, flip, and `ops` operations of RandAugment of this strength (from 0 to 1); 0 ops need no torchvision.

    smallest: least part of the picture's area.
    """
    augment = rand_augment(ops, magnitude) if ops else None
    return partial(_part_and_flip, size=size, smallest=smallest, augment=augment)


def _part_and_flip(image: Image, *, size: int, smallest: float, augment: Any) -> np.ndarray:
    from PIL import Image

    image = image.resize((size, size), Image.Resampling.BICUBIC, box=random_box(*image.size, smallest))
    if torch.rand(()) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_array(image if augment is None else augment(image))


def random_box(width: int, height: int, smallest: float) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a part with a random area and shape; the middle square where ten tries fail."""
    for _ in range(10):
        area = width * height * uniform(smallest, 1.0)
        ratio = math.exp(uniform(*map(math.log, RATIO)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = uniform(0, width - w), uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def rand_augment(ops: int, magnitude: float) -> Any:
    v2 = import_package(
        "torchvision.transforms.v2",
        "RandAugment of streamed images",
        ", or use --augment none, or --data.cache device for sets that fit in memory",
    )
    # torchvision's strongest of 31 levels is DeiT's level 10.
    return v2.RandAugment(num_ops=ops, magnitude=round(30 * magnitude), num_magnitude_bins=31, fill=[124, 116, 104])
