"""Labelled sequences of small integers, the form that every Long-Range Arena task takes here.

Arrays are memory-mapped, so a set larger than memory can be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from primal_attention.data.storage import Arrays
from primal_attention.utils.errors import DataError

Progress = Callable[[int], object]
"""Called with the number of samples that were finished since the last call."""


def no_progress(samples: int) -> None:
    """The `Progress` that reports nothing."""


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
    """A split from some rows of the arrays `tokens` and `labels`."""
    return TokenSplit(arrays["tokens"][rows], arrays["labels"][rows].astype(np.int64))


def stack(sequences: Sequence[np.ndarray], length: int) -> np.ndarray:
    """(samples, length) uint8 with zeros on the right; longer sequences are cut."""
    out = np.zeros((len(sequences), length), dtype=np.uint8)
    for row, sequence in zip(out, sequences, strict=True):
        kept = sequence[:length]
        row[: len(kept)] = kept
    return out


def split_sizes(train: int, valid: int, test: int) -> dict[str, int]:
    """The sizes of a set to generate, by split."""
    sizes = {"train": train, "valid": valid, "test": test}
    if min(sizes.values()) < 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(f"every split needs at least one sample (got {got})")
    return sizes
