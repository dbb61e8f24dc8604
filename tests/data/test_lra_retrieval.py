"""The AAN pairs: a small file in the released layout, and bad input as one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primal_attention.data.lra import retrieval

LINES = [
    "1.0\tP01\tP02\tb'first paper'\tb'second paper'",
    '0.0\tP03\tP04\t"a ""quoted"" word\tand a tab"\tplain é',
    "1\tP05\tP06\tx\t" + "y" * 5000,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in retrieval.FILES.values():
        (tmp_path / name).write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return tmp_path


def words(row: np.ndarray) -> str:
    return bytes(row[row > 0]).decode()


def test_pairs_are_read_as_bytes(folder: Path):
    data = retrieval.load(folder)
    assert (data.length, data.vocabulary, data.classes, data.padded) == (4000, 256, 2, True)
    for split in data.splits.values():
        assert split.labels.tolist() == [1, 0, 1]
        assert [words(row) for row in split.tokens] == ["first paper", 'a "quoted" word\tand a tab', "x"]
        assert [words(row) for row in split.second] == ["second paper", "plain é", "y" * 4000]
    assert isinstance(data.train.second, np.memmap)
