"""Text classification byte by byte: the film reviews of IMDb (Maas et al., 2011), as Long-Range Arena reads them.

    data = load("data/imdb")      # train.parquet and test.parquet, or aclImdb's train/pos/*.txt, train/neg/*.txt, …

A token is a byte of the text in UTF-8, and 0 is padding. A tenth of the training reviews is the validation split.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import TokenData, select_rows, stack
from primal_attention.data.storage import Arrays, cached, read_text, reading
from primal_attention.data.uea import stratified_holdout
from primal_attention.utils.errors import DataError, import_package

LENGTH = 4000
VALIDATION_FRACTION = 0.1
LABELS = ("neg", "pos")


def load(folder: str | Path, length: int = LENGTH) -> TokenData:
    """Read both files or folders; split validation samples off train, class by class, with a fixed seed."""
    folder = Path(folder)
    train, test = (_load_part(folder, part, length) for part in ("train", "test"))
    kept, valid = stratified_holdout(train["labels"], VALIDATION_FRACTION, seed=0)
    splits = {"train": select_rows(train, kept), "valid": select_rows(train, valid), "test": select_rows(test)}
    return TokenData("text", **splits, vocabulary=256, classes=2, padded=True)


def encode(text: str, length: int = LENGTH) -> np.ndarray:
    """The first bytes of a text; a zero byte, which means padding, becomes a space."""
    data = np.frombuffer(text[:length].encode("utf-8")[:length], dtype=np.uint8)
    return np.where(data == 0, np.uint8(ord(" ")), data)


def _load_part(folder: Path, part: str, length: int) -> Arrays:
    parquet = folder / f"{part}.parquet"
    if parquet.is_file():
        return cached(folder, part, [parquet], length, partial(_read_parquet, parquet, length))
    for home in (folder, folder / "aclImdb"):
        classes = [home / part / label for label in LABELS]
        if all(place.is_dir() for place in classes):
            files = [sorted(place.glob("*.txt")) for place in classes]
            return cached(folder, part, [*files[0], *files[1]], length, partial(_read_folders, classes, files, length))
    raise DataError(
        f"{folder}: no {part} split; expected {parquet.name}, or the reviews in {part}/pos/*.txt and {part}/neg/*.txt "
        "as in the aclImdb archive (https://ai.stanford.edu/~amaas/data/sentiment)"
    )


def _read_folders(classes: Sequence[Path], files: Sequence[Sequence[Path]], length: int) -> Arrays:
    for place, reviews in zip(classes, files, strict=True):
        if len(reviews) < 2:
            raise DataError(f"{place}: {len(reviews)} reviews (*.txt) where at least two are needed")
    texts = [read_text(file) for reviews in files for file in reviews]
    return _to_arrays(texts, [label for label, reviews in enumerate(files) for _ in reviews], length)


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
    labels = [codes[name] for name in names]
    for code, label in enumerate(LABELS):
        if labels.count(code) < 2:
            raise DataError(f"{file}: fewer than two reviews with label {label} among its {len(names)} rows")
    return _to_arrays(texts, labels, length)


def _to_arrays(texts: Sequence[str], labels: Sequence[int], length: int) -> Arrays:
    tokens = stack([encode(text, length) for text in texts], length)
    return {"tokens": tokens, "labels": np.array(labels, dtype=np.uint8)}
