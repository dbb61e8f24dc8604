"""Images in the ImageFolder layout: train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet-1K and Imagenette have it.

    data = load("data/imagenette")                           # files and labels; nothing is decoded yet
    data = load("data/imagenet", classes="imagenet100.txt")  # of 1000 folders only those that the file names
    ImageFiles(data.train, training(224, smallest=0.08, ops=2, magnitude=0.9, erase=0.25))   # for a DataLoader

`val` is the test set. A file that does not decode is an error. Decoding and central crops need Pillow alone.
Augmentation is torchvision's and draws from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from primal_attention.utils.errors import DataError, import_package
from primal_attention.utils.files import read_text

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
FOLDERS = {"train": ("train",), "test": ("val", "validation", "test")}
CROP_FRACTION = 0.875  # of the short side, for evaluation


@dataclass(frozen=True)
class ImageSplit:
    """Files and integer labels of one split."""

    files: tuple[Path, ...]
    labels: np.ndarray  # (samples,) int64

    def __len__(self) -> int:
        return len(self.files)

    def take(self, index: np.ndarray) -> ImageSplit:
        return ImageSplit(tuple(self.files[i] for i in index), self.labels[index])


@dataclass(frozen=True)
class ImageData:
    """A classification problem; label i is class folder i of `classes`."""

    folder: Path
    train: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]


def load(folder: str | Path, classes: str | Path | None = None) -> ImageData:
    """List both splits. `classes`: a file with one class folder per line, to use only those and in that order."""
    folder = Path(folder)
    homes = []
    for names in FOLDERS.values():
        home = next((folder / name for name in names if (folder / name).is_dir()), None)
        if home is None:
            raise DataError(f"{folder} has no folder {' or '.join(names)}: expected {names[0]}/CLASS/*.jpg in it")
        homes.append(home)
    names = _class_names(homes[0], None if classes is None else Path(classes))
    train, test = (_list_files(home, names) for home in homes)
    return ImageData(folder, train, test, names)


def _class_names(home: Path, file: Path | None) -> tuple[str, ...]:
    """Return the class folders, or the first word of each line of a file; ImageNet's lists describe it after that."""
    if file is None:
        names = sorted(place.name for place in home.iterdir() if place.is_dir() and not place.name.startswith("."))
    else:
        names = [line.split()[0] for line in read_text(file).splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file or home} names no class: expected {home}/CLASS/*.jpg, or one CLASS per line of a file")
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{file} names class {repeated!r} twice")
    return tuple(names)


def _list_files(home: Path, classes: Sequence[str]) -> ImageSplit:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (home / name).is_dir():
            raise DataError(f"{home} has no class folder {name!r}")
        members = sorted(f for f in (home / name).rglob("*") if f.suffix.lower() in PICTURES)
        if not members:
            raise DataError(f"{home / name} has no images ({', '.join(sorted(PICTURES))})")
        files += members
        labels += [label] * len(members)
    return ImageSplit(tuple(files), np.array(labels, dtype=np.int64))


def read(file: Path) -> Image | None:
    """Return the image in RGB, or None if it does not decode."""
    pillow = import_package("PIL.Image", "reading images")
    try:
        with pillow.open(file) as image:
            return image.convert("RGB")
    except Exception:  # Pillow's decoders raise almost any type for damaged files
        return None


def crop_centre(image: Image, size: int) -> np.ndarray:
    """Resize the short side to 8/7 of `size` (256 for 224), then crop the central `size` × `size` pixels.

    Returns:
        uint8 (3, size, size).
    """
    from PIL import Image

    side, short = round(size / CROP_FRACTION), min(image.size)
    if short != side:
        width, height = (max(side, round(length * side / short)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class ImageFiles:
    """A map-style dataset of (pixels, label) by (index, seed); a file that does not decode gives its path.

    The seed is that of the transform's random numbers.
    """

    def __init__(self, split: ImageSplit, transform: Callable[[Image], np.ndarray]) -> None:
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, key: tuple[int, int]) -> tuple[np.ndarray, int] | Path:
        import torch

        i, seed = key
        image = read(self.split.files[i])
        if image is None:  # an error of a worker process would come with its traceback
            return self.split.files[i]
        with torch.random.fork_rng(devices=[]):  # without workers this is the training's own process
            torch.default_generator.manual_seed(seed)
            return self.transform(image), int(self.split.labels[i])


def collate(samples: Sequence[tuple[np.ndarray, int] | Path]) -> Any:
    """Return pixels and labels as tensors, or the first path among the samples."""
    import torch

    decoded = [sample for sample in samples if not isinstance(sample, Path)]
    if len(decoded) < len(samples):
        return next(sample for sample in samples if isinstance(sample, Path))
    pixels, labels = zip(*decoded, strict=True)
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


def training(size: int, *, smallest: float, ops: int, magnitude: float, erase: float) -> Callable[[Image], np.ndarray]:
    """Augment a training image by torchvision: normalised float32 (3, size, size).

    Args:
        size: Side of the result.
        smallest: Smallest fraction of the area that the random crop keeps; half of the crops are mirrored.
        ops: Operations of RandAugment.
        magnitude: Their strength, from 0 to 1.
        erase: Probability that a rectangle is replaced by noise.
    """
    import torch

    from primal_attention.models.image import MEAN, STD

    v2 = _torchvision()
    bicubic = v2.InterpolationMode.BICUBIC
    steps = [v2.RandomResizedCrop(size, scale=(smallest, 1.0), interpolation=bicubic), v2.RandomHorizontalFlip()]
    if ops:
        # torchvision's strongest of 31 levels is DeiT's level 10.
        level = round(30 * magnitude)
        steps.append(v2.RandAugment(ops, magnitude=level, num_magnitude_bins=31, fill=[124, 116, 104]))
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if erase:
        steps.append(v2.RandomErasing(erase, value="random"))
    return v2.Compose([*steps, np.asarray])


def mixing(mixup: float, cutmix: float, classes: int) -> Any:
    """Return torchvision's mixup or cutmix of a batch, each for half of the batches if both are positive.

    Args:
        mixup: Parameter of the beta distribution; 0 does not mix.
        cutmix: The same for cutmix.
        classes: Number of classes. The labels become class probabilities.

    Returns:
        A function of images and labels; None if both parameters are 0.
    """
    if not (mixup or cutmix):
        return None
    v2 = _torchvision()
    kinds = {v2.MixUp: mixup, v2.CutMix: cutmix}
    return v2.RandomChoice([kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds.items() if alpha])


def _torchvision() -> Any:
    return import_package("torchvision.transforms.v2", "augmenting training images")
