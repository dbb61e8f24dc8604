"""Batches of images: from files through worker processes, or from pixels that lie on the device already.

Both give uint8 images (B, 3, S, S) and labels (B,), in an order that depends on the seed and the epoch alone. What
workers draw for an image follows from these and its place in the epoch: an epoch may begin anywhere, with any workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from primal_attention.data import image_crops
from primal_attention.data.images import (
    ImageData,
    ImageFiles,
    ImageSplit,
    collate,
    complain,
    decode_once,
    whole_side,
)
from primal_attention.data.series import stratified_holdout
from primal_attention.engine.batches import Batches, derive_seed, set_seed
from primal_attention.engine.vision.image_augment import AUGMENT

if TYPE_CHECKING:
    from primal_attention.engine.vision.image import ImageRecipe

Place = tuple[int, int]  # of an image in an epoch: its batch, and where in the batch
NOBODY = -1  # the label of a row that only fills a batch up


class PixelBatches(Batches):
    """Decoded images, kept whole on the device.

    repeats: how often an image follows itself in a pass, which has as many images as without (repeated augmentation).
    fill: make the last batch as long as the others with rows that no score counts, so that one shape is compiled.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        repeats: int = 1,
        fill: bool = False,
    ) -> None:
        super().__init__(tensors, batch_size, shuffle_seed, steps)
        self.repeats, self.fill = repeats, fill

    def order(self, turn: int) -> Tensor:
        return super().order(turn).repeat_interleave(self.repeats)[: self.cases]

    def __iter__(self) -> Iterator[Any]:
        for turn in super().__iter__():
            yield [self.filled(*batch) for batch in turn] if isinstance(turn, list) else self.filled(*turn)

    def filled(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        short = self.batch_size - len(labels)
        if not self.fill or short <= 0:
            return images, labels
        more = images[:1].expand(short, *images.shape[1:])
        return torch.cat([images, more]), torch.cat([labels, labels.new_full((short,), NOBODY)])


class SeededFiles:
    """Images by (place in an epoch, number): the place decides the draws, whatever the worker drew before.

    name: what a seed is derived from, besides the place.
    """

    def __init__(self, files: ImageFiles, *name: object) -> None:
        self.files, self.name = files, name

    def __getitem__(self, which: tuple[Place, int]) -> tuple[np.ndarray | None, int, int]:
        place, number = which
        with torch.random.fork_rng(devices=[]):  # without workers this is the training's own process
            set_seed(derive_seed(*self.name, *place), torch.device("cpu"))
            return self.files[number]


class FileBatches(PixelBatches):
    """Images that are read, cut and augmented by `workers` processes, some batches ahead of use.

    A file that does not decode is left out of its batch; each pass names the first new one and says how many there are.
    """

    def __init__(
        self,
        split: ImageSplit,
        transform: Callable[[Any], np.ndarray],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        repeats: int = 1,
        fill: bool = False,
        workers: int = 0,
        strict: bool = False,
    ) -> None:
        numbers = torch.arange(len(split))
        super().__init__([numbers, numbers], batch_size, shuffle_seed, steps, repeats=repeats, fill=fill)
        self.files, self.workers, self.strict = ImageFiles(split, transform), workers, strict
        self.device = torch.device("cpu")
        self.broken: set[int] = set()

    def to(self, device: torch.device) -> FileBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[Any]:
        first = self.skip * self.group
        turns = [turn if isinstance(turn, list) else [turn] for turn in Batches.__iter__(self)]
        read = self.read([numbers.tolist() for turn in turns for numbers, _ in turn], first)
        if self.group == 1:
            yield from read
            return
        while together := list(islice(read, self.group)):
            yield together

    def read(self, rows: list[list[int]], first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of these cases; `first` is the first one's number in its epoch."""
        places = ([((b, i), number) for i, number in enumerate(batch)] for b, batch in enumerate(rows, first))
        loader: Any = torch.utils.data.DataLoader(
            SeededFiles(self.files, "image", self.shuffle_seed, self.epoch, self.rank),  # type: ignore[arg-type]
            batch_sampler=places,
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=2 if self.workers else None,
            generator=torch.Generator(),  # else it would use up one of the training's numbers
        )
        known = len(self.broken)
        for images, labels, broken in loader:
            self.broken.update(broken)
            if broken and self.strict:
                complain([self.files.split.files[broken[0]]], len(self.files), strict=True)
            if images is None:
                continue
            yield self.filled(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
        if len(self.broken) > known:
            complain([self.files.split.files[i] for i in sorted(self.broken)], len(self.files), strict=False)


def pixel_batches(recipe: ImageRecipe, data: ImageData) -> tuple[PixelBatches, PixelBatches, PixelBatches]:
    """Training, validation and test batches of a set that is decoded once and kept on the device."""
    side, strict = whole_side(recipe.data.size), recipe.data.strict
    pixels, labels = decode_once(data.folder, f"train-{side}", data.train, side, strict=strict)
    kept, held = stratified_holdout(labels, recipe.data.holdout, recipe.seed)
    test = decode_once(data.folder, f"test-{side}", data.test, side, strict=strict)
    halves = ((pixels[kept], labels[kept]), (pixels[held], labels[held]), test)
    tensors = [tuple(torch.from_numpy(array) for array in half) for half in halves]
    how = _training(recipe, len(kept))
    train = PixelBatches(tensors[0], **how)
    val, tested = (PixelBatches(half, recipe.trainer.batch_size, fill=True) for half in tensors[1:])
    return train, val, tested


def file_batches(recipe: ImageRecipe, data: ImageData) -> tuple[PixelBatches, PixelBatches, PixelBatches]:
    """Training, validation and test batches that workers read from files."""
    strength, size = AUGMENT[recipe.augment], recipe.data.size
    kept, held = stratified_holdout(data.train.labels, recipe.data.holdout, recipe.seed)
    reading: dict[str, Any] = {"workers": recipe.data.workers, "strict": recipe.data.strict}
    crop = image_crops.training(size, smallest=strength.smallest, ops=strength.ops, magnitude=strength.magnitude)
    train = FileBatches(data.train.take(kept), crop, **_training(recipe, len(kept)), **reading)
    val, test = (
        FileBatches(split, image_crops.evaluation(size), recipe.trainer.batch_size, fill=True, **reading)
        for split in (data.train.take(held), data.test)
    )
    return train, val, test


def _training(recipe: ImageRecipe, cases: int) -> dict[str, Any]:
    size = recipe.trainer.batch_size
    return {
        "batch_size": size,
        "shuffle_seed": recipe.seed,
        # Whole batches only, as DeiT's; a set smaller than a batch is one.
        "steps": recipe.trainer.steps_per_epoch or max(1, cases // size),
        "repeats": AUGMENT[recipe.augment].repeats,
    }
