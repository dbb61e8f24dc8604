"""Batches of tensors held in memory, in an order that depends on the seed and the epoch alone.

A run that goes on after a kill needs no sampler state: epoch 7 has the order of epoch 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any values: neighbouring inputs give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Batches:
    """Rows of several tensors, taken together.

    With `shuffle_seed` None the order is the data's own. With `steps` an epoch is that many whole batches, and the next
    one goes on where it ended, pass after pass over the data. In distributed training each rank takes its share of
    every batch, so that the union of the ranks' batches is the batch of a single process.
    """

    def __init__(
        self, tensors: Sequence[Tensor], batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        self.tensors = list(tensors)
        self.steps = steps
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.epoch = 0
        self.rank, self.world = 0, 1

    @property
    def cases(self) -> int:
        return len(self.tensors[0])

    @property
    def sampler(self) -> Batches:
        """Lightning calls `set_epoch` on a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def to(self, device: torch.device) -> Batches:
        """Keep the whole set on the device: the sets here are small, and a copy per step would cost more."""
        self.tensors = [t.to(device) for t in self.tensors]
        return self

    def __len__(self) -> int:
        return self.steps or -(-self.cases // self.batch_size)

    def order(self, turn: int) -> Tensor:
        """The order of the cases in one pass over the data."""
        if self.shuffle_seed is None:
            return torch.arange(self.cases)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        return torch.randperm(self.cases, generator=generator)

    def rows(self) -> Iterator[Tensor]:
        """The cases of each batch of the epoch."""
        if not self.steps:
            yield from self.order(self.epoch).split(self.batch_size)
            return
        # Whole batches only: steps of one shape can be compiled once and recorded.
        per_turn = max(1, self.cases // self.batch_size)
        turn, order = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                order = self.order(turn)
            start = position % per_turn * self.batch_size
            yield order[start : start + self.batch_size]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in self.rows():
            if self.world > 1:
                # Every rank needs at least one row in every step, or the ranks fall out of step: rows repeat if scarce.
                rows = rows[torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)]
            rows = rows.to(self.tensors[0].device)
            yield tuple(t[rows] for t in self.tensors)
