"""Images pixel by pixel: CIFAR-10 (Krizhevsky, 2009) in gray, 1024 tokens each, as Long-Range Arena reads it.

    data = load("data/cifar10")   # data_batch_1.bin … test_batch.bin, or train_images.npy, train_labels.npy, test_…

Gray is 0.2989 R + 0.5870 G + 0.1140 B. The last tenth of the training images is the validation split.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import TokenData, select_rows
from primal_attention.data.storage import Arrays, cached, map_array, reading
from primal_attention.utils.errors import DataError

SIZE = 32
CLASSES = 10
RECORD = 1 + 3 * SIZE * SIZE  # bytes: a label and the planes red, green, blue
BINARY = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}


def load(folder: str | Path) -> TokenData:
    """Read train and test; validation is the end of train."""
    folder = Path(folder)
    train, test = (_load_part(folder, part) for part in ("train", "test"))
    samples = len(train["labels"])
    if samples < 10:
        raise DataError(f"{folder}: {samples} training images are too few for a validation split of a tenth")
    cut = samples - samples // 10
    splits = {"train": select_rows(train, slice(cut)), "valid": select_rows(train, slice(cut, None))}
    return TokenData("image", **splits, test=select_rows(test), vocabulary=256, classes=CLASSES, padded=False)


def _load_part(folder: Path, part: str) -> Arrays:
    if (folder / f"{part}_images.npy").is_file():
        return _read_arrays(folder / f"{part}_images.npy", folder / f"{part}_labels.npy")
    for home in (folder, folder / "cifar-10-batches-bin"):
        files = [home / name for name in BINARY[part]]
        if files[0].is_file():
            return cached(folder, part, files, "gray", partial(_read_binary, files))
    raise DataError(
        f"{folder}: no {part} split; expected {part}_images.npy and {part}_labels.npy, or {BINARY[part][0]} of "
        "CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html)"
    )


def _read_binary(files: list[Path]) -> Arrays:
    records = []
    for file in files:
        with reading(file, "a readable file"):
            data = np.fromfile(file, dtype=np.uint8)
        if len(data) == 0 or len(data) % RECORD:
            raise DataError(
                f"{file}: {len(data)} bytes are no whole number of {SIZE}×{SIZE} images ({RECORD} bytes each)"
            )
        records.append(data.reshape(-1, RECORD))
        _check_labels(records[-1][:, 0], file)
    joined = np.concatenate(records)
    return {"tokens": to_gray(joined[:, 1:].reshape(-1, 3, SIZE * SIZE)), "labels": joined[:, 0].copy()}


def to_gray(planes: np.ndarray) -> np.ndarray:
    """(images, 3, pixels) → (images, pixels), rounded to the nearest level."""
    gray = np.empty((len(planes), planes.shape[2]), dtype=np.uint8)
    weights = np.array([2989, 5870, 1140], dtype=np.int32)
    for start in range(0, len(planes), 5000):  # a few images at a time: the sums need four bytes per pixel
        part = planes[start : start + 5000].astype(np.int32)
        gray[start : start + 5000] = (np.einsum("ncp,c->np", part, weights) + 5000) // 10000
    return gray


def _read_arrays(images_file: Path, labels_file: Path) -> Arrays:
    arrays = []
    for file in (images_file, labels_file):
        with reading(file, "an array file of numpy"):
            arrays.append(map_array(file))
    images, labels = arrays
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE):
        raise DataError(
            f"{images_file}: expected gray images of {SIZE}×{SIZE} bytes, (samples, {SIZE}, {SIZE}) uint8 "
            f"(got {images.shape} {images.dtype})"
        )
    if labels.shape != images.shape[:1]:
        raise DataError(f"{labels_file}: {labels.shape} labels where {images_file.name} has {len(images)} images")
    _check_labels(labels, labels_file)
    return {"tokens": images.reshape(len(images), -1), "labels": labels}


def _check_labels(labels: np.ndarray, file: Path) -> None:
    if labels.dtype.kind not in "iu" or len(labels) == 0 or labels.min() < 0 or labels.max() >= CLASSES:
        got = f"{labels.min()} to {labels.max()}" if labels.dtype.kind in "iuf" and len(labels) else f"{len(labels)}"
        raise DataError(
            f"{file}: labels must be integers between 0 and {CLASSES - 1}, one per image (got {got}, {labels.dtype})"
        )
