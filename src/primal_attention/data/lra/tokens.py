"""Labelled sequences of small integers, the form that every Long-Range Arena task takes here.

A split's tokens are one array (cases, length) with 0 at padding; arrays are memory-mapped, so a set larger than memory
can be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Progress = Callable[[int], object]
"""Called with the number of samples that were finished since the last call."""


@dataclass(frozen=True)
class TokenSplit:
    """Cases of one split. `second` is the other sequence of each case where the task is about pairs."""

    tokens: np.ndarray  # (cases, length) uint8 or uint16
    labels: np.ndarray  # (cases,) int64
    second: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TokenData:
    """A classification problem over token sequences. padded: 0 stands for padding; else it is a token like others."""

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


def stack(sequences: Sequence[np.ndarray], length: int, dtype: type = np.uint8) -> np.ndarray:
    """(cases, length) with zeros on the right; longer sequences are cut."""
    out: np.ndarray = np.zeros((len(sequences), length), dtype=dtype)
    for row, sequence in zip(out, sequences, strict=True):
        kept = sequence[:length]
        row[: len(kept)] = kept
    return out
