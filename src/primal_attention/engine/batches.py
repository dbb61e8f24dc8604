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

    With `shuffle_seed` None the order is the data's own. In distributed training each rank takes its share of every
    batch, so that the union of the ranks' batches is the batch of a single process.
    """

    def __init__(self, tensors: Sequence[Tensor], batch_size: int, shuffle_seed: int | None = None) -> None:
        self.tensors = list(tensors)
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
        return -(-self.cases // self.batch_size)

    def order(self) -> Tensor:
        if self.shuffle_seed is None:
            return torch.arange(self.cases)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, self.epoch))
        return torch.randperm(self.cases, generator=generator)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = self.order()
        for start in range(0, self.cases, self.batch_size):
            rows = order[start : start + self.batch_size]
            if self.world > 1:
                # Every rank needs at least one row in every step, or the ranks fall out of step: rows repeat if scarce.
                rows = rows[torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)]
            rows = rows.to(self.tensors[0].device)
            yield tuple(t[rows] for t in self.tensors)
