"""Long-Range Arena's tasks as labelled sequences of small integers, and the readers of the sets as they are released.

    data = load_text("data/imdb")      # train.parquet and test.parquet, or aclImdb's train/pos/*.txt, …
    data = load_retrieval("data/aan")  # new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv
    data = load_image("data/cifar10")  # data_batch_1.bin … test_batch.bin, or train_images.npy, train_labels.npy, …

Text: the film reviews of IMDb (Maas et al., 2011). A token is a byte of the text in UTF-8, and 0 is padding. A tenth of
the training reviews is the validation split. Retrieval: does one paper cite the other (AAN, Radev et al., 2013)? A row
has five columns between tabs and no header: label, two ids, two texts. Image: CIFAR-10 (Krizhevsky, 2009) in gray, 1024
tokens each. Gray is 0.2989 R + 0.5870 G + 0.1140 B. The last tenth of the training images is the validation split.

Arrays are memory-mapped, so a set larger than memory can be trained on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from primal_attention.data.storage import Arrays, cached, reading
from primal_attention.data.uea import stratified_holdout
from primal_attention.utils.errors import DataError, import_package
from primal_attention.utils.files import read_text

TEXT_LENGTH = 4000
LABELS = ("neg", "pos")
PAIRS = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
PAIR_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
WRAPPED = re.compile(r"b(['\"])(.*)\1", re.DOTALL)  # how Python prints bytes: some releases have it
RECORD = 1 + 3 * 32 * 32  # bytes of an image: a label and the planes red, green, blue
GRAY = np.array([2989, 5870, 1140], dtype=np.int32)  # weights of the planes, times 10000
BINARY = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}

Progress = Callable[[int], object]
"""Called with the number of samples that were finished since the last call."""


@dataclass(frozen=True)
class TokenSplit:
    """Samples of one split. `second` is the other sequence of each sample where the task is about pairs."""

    tokens: np.ndarray  # (samples, length) uint8 or uint16, 0 at padding
    labels: np.ndarray  # (samples,) int64
    second: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TokenData:
    """A classification problem over token sequences. Without `padded`, token 0 is a token like others."""

    name: str
    train: TokenSplit
    valid: TokenSplit
    test: TokenSplit
    vocabulary: int
    classes: int
    padded: bool

    @property
    def length(self) -> int:
        return self.train.tokens.shape[1]

    @property
    def splits(self) -> dict[str, TokenSplit]:
        return {"train": self.train, "valid": self.valid, "test": self.test}


def select_rows(arrays: Arrays, rows: np.ndarray | slice = slice(None)) -> TokenSplit:
    """Return a split from some rows of the arrays `tokens`, `labels` and, for pairs, `second`."""
    second = arrays["second"][rows] if "second" in arrays else None
    return TokenSplit(arrays["tokens"][rows], arrays["labels"][rows].astype(np.int64), second)


def load_tables(
    folder: Path, files: Mapping[str, str], source: str, read: Callable[[Path, int], Arrays], length: int
) -> dict[str, TokenSplit]:
    """Read one file per split by `read(file, length)`. `source` says where missing files come from."""
    splits = {}
    for name, file in ((name, folder / file_name) for name, file_name in files.items()):
        if not file.is_file():
            raise DataError(f"{file} is missing: the {name} split; {source}")
        splits[name] = select_rows(cached(folder, name, [file], length, partial(read, file, length)))
    return splits


def stack(sequences: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack to (samples, length) uint8 with zeros on the right; longer sequences are cut."""
    out = np.zeros((len(sequences), length), dtype=np.uint8)
    for row, sequence in zip(out, sequences, strict=True):
        row[: len(sequence)] = sequence[:length]
    return out


# Text and retrieval


def load_text(folder: str | Path, length: int = TEXT_LENGTH) -> TokenData:
    """Read the reviews; split validation samples off train, class by class, with a fixed seed."""
    folder = Path(folder)
    train, test = (_load_reviews(folder, part, length) for part in ("train", "test"))
    remaining, valid = stratified_holdout(train["labels"], 0.1, seed=0)
    splits = {"train": select_rows(train, remaining), "valid": select_rows(train, valid), "test": select_rows(test)}
    return TokenData("text", **splits, vocabulary=256, classes=2, padded=True)


def encode_bytes(text: str, length: int = TEXT_LENGTH) -> np.ndarray:
    """Return the first bytes of a text; a zero byte, which means padding, becomes a space."""
    data = np.frombuffer(text[:length].encode("utf-8")[:length], dtype=np.uint8)
    return np.where(data == 0, np.uint8(ord(" ")), data)


def _load_reviews(folder: Path, part: str, length: int) -> Arrays:
    parquet = folder / f"{part}.parquet"
    if parquet.is_file():
        return cached(folder, part, [parquet], length, partial(_read_parquet, parquet, length))
    for home in (folder / part, folder / "aclImdb" / part):
        if all((home / label).is_dir() for label in LABELS):
            files = [file for label in LABELS for file in sorted((home / label).glob("*.txt"))]
            return cached(folder, part, files, length, partial(_read_folders, home, files, length))
    raise DataError(
        f"{folder}: no {part} split; expected {parquet.name}, or the reviews in {part}/pos/*.txt and {part}/neg/*.txt "
        "as in the aclImdb archive (https://ai.stanford.edu/~amaas/data/sentiment)"
    )


def _read_folders(home: Path, files: Sequence[Path], length: int) -> Arrays:
    labels = [LABELS.index(file.parent.name) for file in files]
    return _review_arrays(list(map(read_text, files)), labels, length, home)


def _read_parquet(file: Path, length: int) -> Arrays:
    parquet = import_package("pyarrow.parquet", f"reading {file}")
    with reading(file, "a parquet file with the columns text and label"):
        table = parquet.read_table(file, columns=["text", "label"])
        texts, names = table["text"].to_pylist(), table["label"].to_pylist()
    codes: dict[object, int] = {LABELS[0]: 0, LABELS[1]: 1, 0: 0, 1: 1}
    for number, (text, name) in enumerate(zip(texts, names, strict=True)):
        if not isinstance(text, str) or not isinstance(name, (str, int)) or name not in codes:
            what = f"label {str(name)[:40]!r}" if isinstance(text, str) else f"a text of type {type(text).__name__}"
            raise DataError(f"{file}, row {number}: expected a text and a label pos or neg (got {what})")
    return _review_arrays(texts, [codes[name] for name in names], length, file)


def _review_arrays(texts: Sequence[str], labels: Sequence[int], length: int, place: Path) -> Arrays:
    for code, label in enumerate(LABELS):
        if labels.count(code) < 2:
            raise DataError(f"{place}: fewer than two reviews with label {label} among {len(labels)}")
    tokens = stack([encode_bytes(text, length) for text in texts], length)
    return {"tokens": tokens, "labels": np.array(labels, dtype=np.uint8)}


def load_retrieval(folder: str | Path, length: int = TEXT_LENGTH) -> TokenData:
    """Read the three files of pairs."""
    own = f"'primal data retrieval --articles FOLDER --out {folder}' makes pairs of other articles"
    source = f"Long-Range Arena's release has the AAN pairs; {own}"
    splits = load_tables(Path(folder), PAIRS, source, _read_pairs, length)
    return TokenData("retrieval", **splits, vocabulary=256, classes=2, padded=True)


def _read_pairs(file: Path, length: int) -> Arrays:
    texts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    labels: list[int] = []
    csv.field_size_limit(2**31 - 1)  # a cell has the text of a paper
    with reading(file, "a table divided by tabs"), file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t"), start=1):
            if len(row) != 5 or row[0] not in PAIR_LABELS:
                raise DataError(
                    f"{file}, row {number}: expected label (0 or 1), two ids and two texts between tabs "
                    f"(got {len(row)} columns, the first {row[0][:20] if row else ''!r})"
                )
            labels.append(PAIR_LABELS[row[0]])
            for column, text in zip(texts, row[3:], strict=True):
                wrapped = WRAPPED.fullmatch(text)
                column.append(encode_bytes(wrapped[2] if wrapped else text, length))
    if not labels:
        raise DataError(f"{file}: no pairs")
    first, second = (stack(column, length) for column in texts)
    return {"tokens": first, "second": second, "labels": np.array(labels, dtype=np.uint8)}


# Image


def load_image(folder: str | Path) -> TokenData:
    """Read the images; validation is the end of train."""
    folder = Path(folder)
    train, test = (_load_pixels(folder, part) for part in ("train", "test"))
    samples = len(train["labels"])
    if samples < 10:
        raise DataError(f"{folder}: {samples} training images are too few for a validation split of a tenth")
    cut = samples - samples // 10
    splits = {"train": select_rows(train, slice(cut)), "valid": select_rows(train, slice(cut, None))}
    return TokenData("image", **splits, test=select_rows(test), vocabulary=256, classes=10, padded=False)


def _load_pixels(folder: Path, part: str) -> Arrays:
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
    tokens, labels = [], []
    for file in files:
        with reading(file, "a readable file"):
            data = np.fromfile(file, dtype=np.uint8)
        if len(data) == 0 or len(data) % RECORD:
            raise DataError(f"{file}: {len(data)} bytes are not a whole number of 32×32 images ({RECORD} bytes each)")
        records = data.reshape(-1, RECORD)
        labels.append(_check_image_labels(records[:, 0], len(records), file))
        planes = records[:, 1:].reshape(len(records), 3, -1)
        tokens.append((np.einsum("ncp,c->np", planes, GRAY) + 5000) // 10000)  # rounded to the nearest level
    return {"tokens": np.concatenate(tokens).astype(np.uint8), "labels": np.concatenate(labels)}


def _read_arrays(images_file: Path, labels_file: Path) -> Arrays:
    arrays = []
    for file in (images_file, labels_file):
        with reading(file, "an array file of numpy"):
            arrays.append(open_memmap(file, mode="c"))
    images, labels = arrays
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32):
        got = f"(got {images.dtype} of shape {images.shape})"
        raise DataError(f"{images_file}: gray images must be uint8 of shape (samples, 32, 32) {got}")
    labels = _check_image_labels(labels, len(images), labels_file)
    return {"tokens": images.reshape(len(images), -1), "labels": labels}


def _check_image_labels(labels: np.ndarray, images: int, file: Path) -> np.ndarray:
    if labels.shape != (images,) or labels.dtype.kind not in "iu" or not np.isin(labels, range(10)).all() or not images:
        got = f"(got {labels.dtype} of shape {labels.shape})"
        raise DataError(f"{file}: labels must be integers from 0 to 9, one for each of the {images} images {got}")
    return labels
