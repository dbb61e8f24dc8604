"""Batches of tensors in memory, in an order that depends on the seed and the epoch alone.

A resumed run needs no sampler state: epoch 7 has the order of epoch 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed from any values; similar inputs give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of the device as `torch.manual_seed` does, without its millisecond."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def send(t: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, which needs pinned memory."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


class Batches:
    """Rows of several tensors of equal length.

    In distributed training each rank takes its share of every batch, so that the union of the ranks' batches is the
    batch of a single process. With `group` above 1 the iteration yields lists of that many batches, gathered at once.

    Args:
        tensors: The first dimension counts the samples.
        batch_size: Samples per batch, over all ranks.
        shuffle_seed: None keeps the data's order.
        steps: Batches per epoch, all of full size; the next epoch continues in the pass over the data. 0 is one pass.
    """

    def __init__(
        self, tensors: Sequence[Tensor], batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        self.tensors = list(tensors)
        self.steps = steps
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.epoch = 0
        self.group = 1
        self.rank, self.world = 0, 1
        self.skip = 0

    @property
    def cases(self) -> int:
        return len(self.tensors[0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def part(self, number: int) -> float:
        """Return this rank's samples in a batch over the ranks' mean: the weight of its mean.

        A rank that got a repeated sample because there were too few has weight 0.
        """
        size = min(self.batch_size, self.cases if self.steps else self.cases - number * self.batch_size)
        return len(range(self.rank, size, self.world)) * self.world / size

    def to(self, device: torch.device) -> Batches:
        """Move the whole set to the device: sets are small, and a copy per step would cost more."""
        self.tensors = [t.to(device) for t in self.tensors]
        return self

    @property
    def batches_per_epoch(self) -> int:
        return self.steps or -(-self.cases // self.batch_size)

    @property
    def samples_per_epoch(self) -> int:
        return self.steps * min(self.batch_size, self.cases) if self.steps else self.cases

    def __len__(self) -> int:
        return -(-self.batches_per_epoch // self.group)

    def order(self, turn: int) -> Tensor:
        """Return the order of the samples in one pass over the data."""
        if self.shuffle_seed is None:
            return torch.arange(self.cases)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        return torch.randperm(self.cases, generator=generator)

    def rows(self) -> Iterator[Tensor]:
        """Yield the samples of each batch of the epoch."""
        if not self.steps:
            yield from self.order(self.epoch).split(self.batch_size)
            return
        # Full batches only: steps of one shape are compiled and recorded once.
        per_turn = max(1, self.cases // self.batch_size)
        turn, order = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                order = self.order(turn)
            start = position % per_turn * self.batch_size
            yield order[start : start + self.batch_size]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches as tuples of tensors, or lists of them if `group` is above 1."""
        for sizes, rows in self.turns():
            yield self.cut([t[rows] for t in self.tensors], sizes)

    def turns(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the sizes of a group's batches and all their rows. The first `skip` groups are left out once."""
        rows, self.skip = islice(self.rows(), self.skip * self.group, None), 0
        while together := [self._shared(r) for r in islice(rows, self.group)]:
            yield [len(r) for r in together], send(torch.cat(together), self.tensors[0].device)

    def _shared(self, rows: Tensor) -> Tensor:
        """Return this rank's rows. Every rank needs at least one to stay in step, so rows repeat if there are few."""
        if self.world == 1:
            return rows
        return rows[torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)]

    def cut(self, tensors: Sequence[Tensor], sizes: list[int]) -> Any:
        batches = list(zip(*(t.split(sizes) for t in tensors), strict=True))
        return batches if self.group > 1 else batches[0]
