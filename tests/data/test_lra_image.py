"""CIFAR-10 in gray: the binary files and the arrays, the validation split, bad input as one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primal_attention.data.lra import image as pixels
from primal_attention.utils.errors import DataError


def write_binary(folder: Path, cases: int = 4) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (6, cases, pixels.RECORD), dtype=np.uint8)
    records[:, :, 0] %= 10
    for name, part in zip((*pixels.BINARY["train"], *pixels.BINARY["test"]), records, strict=True):
        part.tofile(folder / name)
    return records


def write_arrays(folder: Path, cases: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = {}
    for half in ("train", "test"):
        arrays[f"{half}_images"] = rng.integers(0, 256, (cases, 32, 32), dtype=np.uint8)
        arrays[f"{half}_labels"] = rng.integers(0, 10, cases, dtype=np.uint8)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return arrays


def test_the_binary_files_become_gray(tmp_path: Path):
    records = write_binary(tmp_path / "cifar-10-batches-bin")
    data = pixels.load(tmp_path)
    assert [len(s) for s in data.splits.values()] == [18, 2, 4]
    assert (data.length, data.vocabulary, data.classes, data.padded) == (1024, 256, 10, False)
    red, green, blue = records[0, 0, 1:].reshape(3, -1).astype(float)
    np.testing.assert_allclose(data.train.tokens[0], 0.2989 * red + 0.587 * green + 0.114 * blue, atol=0.5 + 1e-9)
    assert data.test.labels.tolist() == records[5, :, 0].tolist()
    assert data.valid.labels.tolist() == records[4, 2:, 0].tolist()


def test_gray_arrays_are_taken_as_they_are(tmp_path: Path):
    arrays = write_arrays(tmp_path)
    data = pixels.load(tmp_path)
    assert isinstance(data.train.tokens, np.memmap)
    np.testing.assert_array_equal(data.train.tokens, arrays["train_images"][:18].reshape(18, -1))
    np.testing.assert_array_equal(data.valid.labels, arrays["train_labels"][18:])


def test_missing_files_and_splits_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"no train split; expected train_images\.npy"):
        pixels.load(tmp_path)
    write_arrays(tmp_path)
    (tmp_path / "test_images.npy").unlink()
    with pytest.raises(DataError, match="no test split"):
        pixels.load(tmp_path)
    (tmp_path / "train_labels.npy").unlink()
    with pytest.raises(DataError, match=r"train_labels\.npy is missing"):
        pixels.load(tmp_path)
    binary = tmp_path / "binary"
    write_binary(binary)
    (binary / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin is missing"):
        pixels.load(binary)
