"""Images in the ImageFolder layout: train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet-1K and Imagenette have it.

    data = load("data/imagenette", classes=None)           # files and labels; nothing is decoded yet
    data = load("data/imagenet", classes="imagenet100.txt")  # of 1000 folders only those that the file names
    pixels, kept = decode_all(data.train.files, side=128)   # uint8 (cases, 3, 128, 128), for sets that fit in memory

`val` is the test set. A file that does not decode is named and left out with a count, or an error if `strict`.

What workers do to a picture: the middle of it for evaluation, random parts of it for training.

Plain crops and flips need Pillow alone. DeiT's RandAugment is torchvision's. All draws come from torch's generator,
which whoever reads images seeds for each of them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from primal_attention.data.storage import cached, read_text
from primal_attention.utils.errors import DataError, import_package

if TYPE_CHECKING:
    from PIL.Image import Image


PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
FOLDERS = {"train": ("train",), "test": ("val", "validation", "test")}
KEPT = 0.875  # part of the short side that the evaluated middle has


@dataclass(frozen=True)
class ImageSplit:
    """Files and the integer labels of one half."""

    files: tuple[Path, ...]
    labels: np.ndarray  # (cases,) int64

    def __len__(self) -> int:
        return len(self.files)

    def take(self, index: np.ndarray) -> ImageSplit:
        return ImageSplit(tuple(self.files[i] for i in index), self.labels[index])


@dataclass(frozen=True)
class ImageData:
    """A classification problem: class folders in the order that the labels count them."""

    folder: Path
    train: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]


def load(folder: str | Path, classes: str | Path | None = None) -> ImageData:
    """List both halves. `classes`: a file with one class folder per line, to take those only and in that order."""
    folder = Path(folder)
    homes = {}
    for half, names in FOLDERS.items():
        home = next((folder / name for name in names if (folder / name).is_dir()), None)
        if home is None:
            raise DataError(f"{folder} has no folder {' or '.join(names)}: expected {names[0]}/CLASS/*.jpg in it")
        homes[half] = home
    found = class_list(Path(classes)) if classes is not None else _class_folders(homes["train"])
    halves = {half: _list(home, found) for half, home in homes.items()}
    return ImageData(folder, halves["train"], halves["test"], found)


def class_list(file: Path) -> tuple[str, ...]:
    """The first word of every line: class lists of ImageNet often have a description behind it."""
    names = [line.split()[0] for line in read_text(file).splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file} names no class: one class folder per line is expected")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file} names class {twice!r} twice")
    return tuple(names)


def _class_folders(home: Path) -> tuple[str, ...]:
    names = tuple(sorted(place.name for place in home.iterdir() if place.is_dir() and not place.name.startswith(".")))
    if not names:
        raise DataError(f"{home} holds no class folders: expected {home.name}/CLASS/*.jpg")
    return names


def _list(home: Path, classes: Sequence[str]) -> ImageSplit:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (home / name).is_dir():
            raise DataError(f"{home} has no class folder {name!r}")
        found = sorted(f for f in (home / name).rglob("*") if f.suffix.lower() in PICTURES)
        if not found:
            raise DataError(f"{home / name} holds no images ({', '.join(sorted(PICTURES))})")
        files += found
        labels += [label] * len(found)
    return ImageSplit(tuple(files), np.array(labels, dtype=np.int64))


def read(file: Path) -> Image | None:
    """The picture in RGB, or None if it does not decode."""
    pillow = import_package("PIL.Image", "reading images")
    try:
        with pillow.open(file) as image:
            return image.convert("RGB")
    except Exception:  # Pillow's decoders raise almost any type for damaged files
        return None


def square(image: Image, side: int, size: int | None = None) -> np.ndarray:
    """The short side made `side` long, then the middle of `size` (or `side`) pixels: uint8 (3, size, size)."""
    from PIL import Image

    short = min(image.size)
    if short != side:
        width, height = (max(side, round(length * side / short)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    size = size or side
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return to_array(image.crop((left, top, left + size, top + size)))


def to_array(image: Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def whole_side(size: int) -> int:
    """The short side of which the middle of `size` pixels is evaluated: 256 for 224."""
    return round(size / KEPT)


def decode_all(files: Sequence[Path], side: int, *, strict: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Middle squares of all images, uint8 (kept, 3, side, side), and the numbers of the files that decode."""
    pixels, kept = _decode(files, side)
    complain(_others(files, kept), len(files), strict=strict)
    return pixels, kept


def decode_once(home: Path, name: str, split: ImageSplit, side: int, *, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of a half, from the arrays that an earlier reading left in `home/.cache`."""

    def make() -> dict[str, np.ndarray]:
        pixels, kept = _decode(split.files, side)
        return {"pixels": pixels, "kept": kept}

    arrays = cached(home, name, split.files, {"side": side}, make)
    complain(_others(split.files, arrays["kept"]), len(split), strict=strict)
    return arrays["pixels"], split.labels[arrays["kept"]]


def _decode(files: Sequence[Path], side: int) -> tuple[np.ndarray, np.ndarray]:
    def one(file: Path) -> np.ndarray | None:
        image = read(file)
        return None if image is None else square(image, side)

    # Threads are enough: Pillow decodes and resizes without holding the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pictures = list(pool.map(one, files))
    kept = [i for i, picture in enumerate(pictures) if picture is not None]
    pixels = np.array([pictures[i] for i in kept], dtype=np.uint8).reshape(-1, 3, side, side)
    return pixels, np.array(kept, dtype=np.int64)


def _others(files: Sequence[Path], kept: np.ndarray) -> list[Path]:
    good = set(kept.tolist())
    return [file for i, file in enumerate(files) if i not in good]


def complain(broken: Sequence[Path], total: int, *, strict: bool) -> None:
    """Name what does not decode: an error if `strict` or if nothing is left, else a warning with the count."""
    if not broken:
        return
    if strict:
        raise DataError(f"{broken[0]} does not decode as an image ({len(broken)} of {total} do not)")
    if len(broken) == total:
        raise DataError(f"none of {total} images decodes, {broken[0]} for one")
    warnings.warn(f"{len(broken)} of {total} images do not decode and are skipped, first {broken[0]}", stacklevel=3)


class ImageFiles:
    """A map from a number to (uint8 pixels, label, number), for torch's DataLoader; pixels None where broken."""

    def __init__(self, split: ImageSplit, transform: Callable[[Image], np.ndarray]) -> None:
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> tuple[np.ndarray | None, int, int]:
        image = read(self.split.files[i])
        return None if image is None else self.transform(image), int(self.split.labels[i]), i


def collate(cases: Sequence[tuple[np.ndarray | None, int, int]]) -> Any:
    """(pixels, labels) of what decoded, as tensors, and the numbers of what did not."""
    import torch

    good = [(pixels, label) for pixels, label, _ in cases if pixels is not None]
    broken = [i for pixels, _, i in cases if pixels is None]
    if not good:
        return None, None, broken
    pixels = torch.from_numpy(np.stack([p for p, _ in good]))
    return pixels, torch.tensor([label for _, label in good]), broken


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
