"""Batches of tensors in memory, in an order that depends on the seed and the epoch alone.

A resumed run needs no sampler state: epoch 7 has the order of epoch 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed from any values; similar inputs give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(eq=False)
class Batches:
    """Rows of several tensors of equal length.

    In distributed training each rank takes its share of every batch, so that the union of the ranks' batches is the
    batch of a single process. Subclasses override `order` and `rows` (which samples), `gather` and `finish` (their
    tensors).

    Args:
        tensors: The first dimension counts the samples.
        batch_size: Samples per batch, over all ranks.
        shuffle_seed: None keeps the data's order.
        steps: Batches per epoch, all of full size; the next epoch continues in the pass over the data. 0 is one pass.
    """

    tensors: list[Tensor]
    batch_size: int
    shuffle_seed: int | None = None
    steps: int = 0

    # Set by the loop.
    rank, world, epoch = 0, 1, 0
    skip = 0  # batches to leave out at the start of the next iteration
    group = 1  # batches that are gathered at once

    @property
    def samples(self) -> int:
        return len(self.tensors[0])

    @property
    def samples_per_epoch(self) -> int:
        return self.steps * min(self.batch_size, self.samples) if self.steps else self.samples

    def __len__(self) -> int:
        return self.steps or -(-self.samples // self.batch_size)

    def part(self, number: int) -> float:
        """Return this rank's samples in a batch over the ranks' mean: the weight of its mean.

        A rank that got a repeated sample because there were too few has weight 0.
        """
        size = min(self.batch_size, self.samples if self.steps else self.samples - number * self.batch_size)
        return len(range(self.rank, size, self.world)) * self.world / size

    def to(self, device: torch.device) -> Batches:
        """Move the set to the device: sets are small, and a copy per step would cost more."""
        self.tensors = [t.to(device) for t in self.tensors]
        return self

    def order(self, turn: int) -> Tensor:
        """Return the order of the samples in one pass over the data."""
        if self.shuffle_seed is None:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        return torch.randperm(self.samples, generator=generator)

    def rows(self) -> Iterator[Tensor]:
        """Yield the samples of each batch of the epoch."""
        if not self.steps:
            yield from self.order(self.epoch).split(self.batch_size)
            return
        # Full batches only: steps of one shape are compiled and recorded once.
        per_turn = max(1, self.samples // self.batch_size)
        turn, order = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                order = self.order(turn)
            start = position % per_turn * self.batch_size
            yield order[start : start + self.batch_size]

    def remaining_rows(self) -> Iterator[Tensor]:
        """Yield this rank's samples of each batch, once without the first `skip` batches."""
        skip, self.skip = self.skip, 0
        for rows in islice(self.rows(), skip, None):
            # Every rank needs at least one sample to stay in step, so samples repeat if there are few.
            own = torch.arange(self.rank, max(len(rows), self.world), self.world) % len(rows)
            yield rows if self.world == 1 else rows[own]

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the tensors of some samples, whose numbers are on the device."""
        return [t[rows] for t in self.tensors]

    def finish(self, batch: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
        """Change a batch of the samples `rows` before it is used."""
        return batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches as tuples of tensors."""
        remaining = self.remaining_rows()
        while group := list(islice(remaining, self.group)):
            sizes = [len(rows) for rows in group]
            samples, device = torch.cat(group), self.tensors[0].device
            if device.type == "cuda":
                samples = samples.pin_memory()  # for a copy that does not wait for the device
            tensors = self.gather(samples.to(device, non_blocking=True))
            batches = zip(*(t.split(sizes) for t in tensors), strict=True)
            for rows, batch in zip(group, batches, strict=True):
                yield self.finish(batch, rows)
