"""Tokens in blocks that stay in the cache from one product to the next."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 3 * 2**20  # numbers in z and the scores of a block: enough for fast products, few enough to stay in the cache


class Block(NamedTuple):
    """Tokens n0…n1 of the sequences b0…b1, and where they stand among the rows of all tokens."""

    b0: int
    b1: int
    n0: int
    n1: int
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.b1 - self.b0, self.n1 - self.n0

    @property
    def sequences(self) -> slice:
        return slice(self.b0, self.b1)

    def of(self, per_token: Tensor) -> Tensor:
        """This block's part of a (B, N, …) tensor."""
        return per_token[self.b0 : self.b1, self.n0 : self.n1]

    def of_scores(self, per_score: Tensor) -> Tensor:
        """This block's part of a (B, 2, H, s, N) tensor."""
        return per_score[self.b0 : self.b1, ..., self.n0 : self.n1]

    def rows_of(self, per_token: Tensor, gap: Tensor | None = None) -> Tensor:
        """Its rows of a (B, N, d) tensor. Whatever stands in the padding, NaN included, ends here."""
        rows = per_token.view(-1, per_token.shape[2])[self.rows]
        return rows if gap is None else rows.masked_fill(gap, 0.0)

    def gap(self, valid: Tensor | None) -> Tensor | None:
        """True at its padding, (rows, 1)."""
        return None if valid is None else ~self.of(valid).reshape(-1, 1)

    def by_sequence(self, scores: Tensor) -> Tensor:
        """A view of its scores as (b, 2, H, s, n), where they may stand as those of one sequence."""
        b, n = self.shape
        if scores.shape[0] == b:
            return scores
        return scores[0].unflatten(-1, (b, n)).permute(3, 0, 1, 2, 4)


def blocks(batch: int, length: int, width: int) -> Iterator[Block]:
    """Even pieces of one long sequence, or several short sequences at once: adjacent rows either way.

    width: the numbers that a token has in z and the scores.
    """
    most = max(BLOCK // width, 64)
    pieces = -(-length // most)
    step = -(-length // pieces)
    group = most // length if pieces == 1 else 1
    for b0 in range(0, batch, group):
        b1 = min(b0 + group, batch)
        for n0 in range(0, length, step):
            n1 = min(n0 + step, length)
            yield Block(b0, b1, n0, n1, slice(b0 * length + n0, (b1 - 1) * length + n1))


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Have the C library keep what a step frees for the next one.

    glibc hands the top of its heap back to the system and gets it anew, page fault by page fault, until the process has
    once freed a piece of up to 32 MiB; from then on it keeps twice that. Training of any size does so sooner or later;
    a small layer alone does not, and spends a tenth of its time on it. The piece is never touched, so it takes no
    memory; other C libraries do not mind.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
