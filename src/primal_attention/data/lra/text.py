"""Text classification byte by byte: the film reviews of IMDb (Maas et al., 2011), as Long-Range Arena reads them.

    data = load("data/imdb")      # train.parquet and test.parquet, or aclImdb's train/pos/*.txt, train/neg/*.txt, …

A token is a byte of the text in UTF-8, and 0 is padding. A tenth of the training reviews is held out for validation;
the test reviews choose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import TokenData, TokenSplit, stack
from primal_attention.data.storage import Arrays, cached, read_text, reading
from primal_attention.data.uea import stratified_holdout
from primal_attention.utils.errors import DataError, import_package

LENGTH = 4000
HELD_OUT = 0.1
LABELS = ("neg", "pos")


def load(folder: str | Path, length: int = LENGTH) -> TokenData:
    """Read both halves and split validation cases off the training half, class by class, by a fixed draw."""
    folder = Path(folder)
    train, test = (_half(folder, half, length) for half in ("train", "test"))
    kept, held = stratified_holdout(train["labels"], HELD_OUT, seed=0)

    def split(arrays: Arrays, rows: np.ndarray | slice) -> TokenSplit:
        return TokenSplit(arrays["tokens"][rows], arrays["labels"][rows].astype(np.int64))

    splits = {"train": split(train, kept), "valid": split(train, held), "test": split(test, slice(None))}
    return TokenData("text", **splits, vocabulary=256, classes=2, padded=True)


def encode(text: str, length: int = LENGTH) -> np.ndarray:
    """The first bytes of a text; a zero byte, which stands for padding, becomes a space."""
    data = np.frombuffer(text[:length].encode("utf-8")[:length], dtype=np.uint8)
    return np.where(data == 0, np.uint8(ord(" ")), data)


def _half(folder: Path, half: str, length: int) -> Arrays:
    parquet = folder / f"{half}.parquet"
    if parquet.is_file():
        return cached(folder, half, [parquet], length, partial(_read_parquet, parquet, length))
    for home in (folder, folder / "aclImdb"):
        kinds = [home / half / label for label in LABELS]
        if all(kind.is_dir() for kind in kinds):
            files = [file for kind in kinds for file in sorted(kind.glob("*.txt"))]
            return cached(folder, half, files, length, partial(_read_folders, kinds, length))
    raise DataError(
        f"{folder}: no {half} split; expected {parquet.name}, or the reviews in {half}/pos/*.txt and {half}/neg/*.txt "
        "as in the aclImdb archive (https://ai.stanford.edu/~amaas/data/sentiment)"
    )


def _read_folders(kinds: Sequence[Path], length: int) -> Arrays:
    texts: list[str] = []
    labels: list[int] = []
    for label, kind in enumerate(kinds):
        files = sorted(kind.glob("*.txt"))
        if len(files) < 2:
            raise DataError(f"{kind}: {len(files)} reviews (*.txt) where at least two are needed")
        texts += [read_text(file) for file in files]
        labels += [label] * len(files)
    return _arrays(texts, labels, length)


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
    missing = [label for code, label in enumerate(LABELS) if sum(codes[name] == code for name in names) < 2]
    if missing:
        raise DataError(f"{file}: fewer than two reviews with label {missing[0]} among its {len(names)} rows")
    return _arrays(texts, [codes[name] for name in names], length)


def _arrays(texts: Sequence[str], labels: Sequence[int], length: int) -> Arrays:
    return {
        "tokens": stack([encode(text, length) for text in texts], length),
        "labels": np.array(labels, dtype=np.uint8),
    }
