"""Batches of tensors held in memory, in an order that depends on the seed and the epoch alone.

A run that goes on after a kill needs no sampler state: epoch 7 has the order of epoch 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any values: neighbouring inputs give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def set_seed(seed: int, device: torch.device) -> None:
    """Start the random numbers of the CPU and of the device anew, as `torch.manual_seed` does.

    That also notes the seed, with a stack trace, for every kind of device that is not there: a millisecond per epoch.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def send(t: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. Out of ordinary memory the host would wait until the device has done all that it has."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


class Batches:
    """Rows of several tensors, taken together.

    With `shuffle_seed` None the order is the data's own. With `steps` an epoch is that many whole batches, and the next
    one goes on where it ended, pass after pass over the data. In distributed training each rank takes its share of
    every batch, so that the union of the ranks' batches is the batch of a single process.

    With `group` above 1 the iteration gives lists of that many batches, gathered at once: where a step takes less time
    than the loop around it, several steps go into one turn of the loop.
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

    @property
    def sampler(self) -> Batches:
        """Lightning calls `set_epoch` on a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def part(self, number: int) -> float:
        """This rank's cases in batch `number` of an epoch, over the mean of the ranks': what its mean has to weigh.

        A rank that got a repeated case because they were scarce weighs nothing.
        """
        size = min(self.batch_size, self.cases if self.steps else self.cases - number * self.batch_size)
        return len(range(self.rank, size, self.world)) * self.world / size

    def to(self, device: torch.device) -> Batches:
        """Keep the whole set on the device: the sets here are small, and a copy per step would cost more."""
        self.tensors = [t.to(device) for t in self.tensors]
        return self

    @property
    def batches_per_epoch(self) -> int:
        return self.steps or -(-self.cases // self.batch_size)

    def __len__(self) -> int:
        return -(-self.batches_per_epoch // self.group)

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

    def __iter__(self) -> Iterator[Any]:
        """Batches as tuples of tensors, or lists of them where `group` asks for it."""
        for sizes, rows in self.turns():
            yield self.cut([t[rows] for t in self.tensors], sizes)

    def turns(self) -> Iterator[tuple[list[int], Tensor]]:
        """The sizes of the batches that come together, and all their rows.

        `skip` turns are left out once: those that an interrupted epoch has behind it.
        """
        rows, self.skip = islice(self.rows(), self.skip * self.group, None), 0
        while together := [self._shared(r) for r in islice(rows, self.group)]:
            yield [len(r) for r in together], send(torch.cat(together), self.tensors[0].device)

    def _shared(self, rows: Tensor) -> Tensor:
        """This rank's rows. Every rank needs at least one, or the ranks fall out of step: rows repeat if scarce."""
        if self.world == 1:
            return rows
        return rows[torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)]

    def cut(self, tensors: Sequence[Tensor], sizes: list[int]) -> Any:
        batches = list(zip(*(t.split(sizes) for t in tensors), strict=True))
        return batches if self.group > 1 else batches[0]
