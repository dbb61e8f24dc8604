"""Document retrieval byte by byte: is one paper cited by the other? Long-Range Arena's AAN pairs (Radev et al., 2013).

    data = load("data/aan")       # new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv

A row has five columns between tabs and no header: label, two ids, two texts.
"""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.lra.text import LENGTH, encode
from primal_attention.data.lra.tokens import TokenData, TokenSplit, stack
from primal_attention.data.storage import Arrays, cached, reading
from primal_attention.utils.errors import DataError

FILES = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
WRAPPED = re.compile(r"b(['\"])(.*)\1", re.DOTALL)  # how Python prints bytes: some releases have it


def load(folder: str | Path, length: int = LENGTH) -> TokenData:
    """Read the three files."""
    folder = Path(folder)
    splits = {}
    for name, file_name in FILES.items():
        file = folder / file_name
        if not file.is_file():
            raise DataError(f"{file} is missing: the {name} split of the AAN pairs in Long-Range Arena's release")
        arrays = cached(folder, name, [file], length, partial(_read_tsv, file, length))
        splits[name] = TokenSplit(arrays["first"], arrays["labels"].astype(np.int64), arrays["second"])
    return TokenData("retrieval", **splits, vocabulary=256, classes=2, padded=True)


def _read_tsv(file: Path, length: int) -> Arrays:
    texts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    labels: list[int] = []
    csv.field_size_limit(2**31 - 1)  # a cell holds a whole paper
    with reading(file, "a table divided by tabs"), file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t"), start=1):
            if len(row) != 5 or row[0] not in LABELS:
                raise DataError(
                    f"{file}, row {number}: expected label (0 or 1), two ids and two texts between tabs "
                    f"(got {len(row)} columns, the first {row[0][:20] if row else ''!r})"
                )
            labels.append(LABELS[row[0]])
            for column, text in zip(texts, row[3:], strict=True):
                wrapped = WRAPPED.fullmatch(text)
                column.append(encode(wrapped[2] if wrapped else text, length))
    if not labels:
        raise DataError(f"{file}: no pairs")
    first, second = (stack(column, length) for column in texts)
    return {"first": first, "second": second, "labels": np.array(labels, dtype=np.uint8)}
