"""Batches of token sequences: on the device where a set fits there, else one step ahead of use; padding cut off.

Padding costs as much as tokens and, where layers leave it out, changes nothing. Evaluations then take cases of like
length together, and a training may do so too: its batches are of a few kinds (`kinds_of`), each cut to one width, so
that each kind's steps have one shape and can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primal_attention.engine.batches import Batches, derive_seed

RESIDENT = 2**31  # bytes of a set up to which it is kept on the device
MULTIPLE = 64  # widths are multiples of it, which kernels like


def lengths_of(tokens: np.ndarray, at_once: int = 4096) -> Tensor:
    """Per case, the tokens up to the last that is no padding (0), at least 1."""
    found = [
        tokens.shape[1] - np.argmax(np.asarray(tokens[start : start + at_once])[:, ::-1] != 0, axis=1)
        for start in range(0, len(tokens), at_once)
    ]
    # A case without any token has its "last" one at the end: as good as any place.
    return torch.from_numpy(np.concatenate(found))


def room_of(arrays: Sequence[np.ndarray], at_once: int = 4096) -> int:
    """Places that hold the tokens of every case, wherever its padding (0) stands."""
    full = arrays[0].shape[1]
    parts = (tokens[start : start + at_once] for tokens in arrays for start in range(0, len(tokens), at_once))
    return _rounded(max(int(np.count_nonzero(part, axis=1).max()) for part in parts), full)


def kinds_of(lengths: Tensor, full: int, kinds: int, batch_size: int) -> list[int]:
    """Widths of batches, ascending up to `full`: the first is enough for half of the cases, the next for half of the
    rest, and so on. Fewer than `kinds` where one would not fill a batch."""
    widths: list[int] = []
    ordered, taken = lengths.sort().values, 0
    for _ in range(kinds - 1):
        upto = taken + (len(ordered) - taken) // 2
        width = _rounded(int(ordered[max(upto - 1, 0)]), full)
        upto = int((ordered <= width).sum())
        if upto - taken < batch_size or len(ordered) - upto < batch_size:
            break
        widths.append(width)
        taken = upto
    return [*widths, full]


def _rounded(length: int, full: int) -> int:
    return min(-(-length // MULTIPLE) * MULTIPLE, full)


class TokenBatches(Batches):
    """As `Batches`, where the first tensors are (cases, length) tokens and the last the labels.

    lengths: per case; None leaves all cases whole. widths: of the kinds of training batches; without any, they are
    drawn from all cases and left whole.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch_size: int,
        shuffle_seed: int | None = None,
        steps: int = 0,
        *,
        lengths: Tensor | None = None,
        widths: Sequence[int] = (),
    ) -> None:
        super().__init__(tensors, batch_size, shuffle_seed, steps)
        self.full = tensors[0].shape[1]
        self.lengths = lengths
        self.widths = list(widths)
        self.held: list[Tensor] | None = None
        if lengths is not None and self.widths:
            kind = torch.searchsorted(torch.tensor(self.widths), lengths)
            self.members = [(kind == k).nonzero().squeeze(1) for k in range(len(self.widths))]

    def to(self, device: torch.device) -> TokenBatches:
        self.device = torch.device(device)
        if sum(t.nbytes for t in self.tensors) <= RESIDENT:
            self.held = [t.to(self.device) for t in self.tensors]
        return self

    # Which cases come together

    def rows(self) -> Iterator[Tensor]:
        if self.lengths is None:
            yield from super().rows()
        elif self.shuffle_seed is None:
            yield from self._by_length()
        elif self.steps and self.widths:
            yield from self._by_kind()
        else:
            yield from super().rows()

    def _by_length(self) -> Iterator[Tensor]:
        """Longest first, as many tokens in a batch as `batch_size` whole cases have."""
        assert self.lengths is not None
        order = self.lengths.argsort(descending=True, stable=True)
        start = 0
        while start < len(order):
            size = self.batch_size * self.full // self.width(order[start : start + 1])
            yield order[start : start + size]
            start += size

    def _by_kind(self) -> Iterator[Tensor]:
        """Whole batches of one kind each, in random order, pass after pass."""
        size = self._size
        per_turn = sum(len(m) // size for m in self.members)
        turn, batches = -1, torch.empty(0)
        for position in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            if turn != position // per_turn:
                turn = position // per_turn
                batches = self._kinds_of_turn(turn)
            yield batches[position % per_turn]

    @property
    def _size(self) -> int:
        """Cases of a training batch: all there are, where they do not fill one."""
        return min(self.batch_size, self.cases)

    def _kinds_of_turn(self, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("order", self.shuffle_seed, turn))
        found = []
        for members in self.members:
            mixed = members[torch.randperm(len(members), generator=generator)]
            found.append(mixed[: len(mixed) // self._size * self._size].view(-1, self._size))
        batches = torch.cat(found)
        return batches[torch.randperm(len(batches), generator=generator)]

    def width(self, rows: Tensor) -> int:
        """What these cases are cut to."""
        if self.lengths is None or (self.shuffle_seed is not None and not self.widths):
            return self.full
        longest = int(self.lengths[rows].max())
        if self.shuffle_seed is None:
            return _rounded(longest, self.full)
        return next(width for width in self.widths if width >= longest)

    # Their tokens

    def __iter__(self) -> Iterator[Any]:
        if self.held is None and self.device.type != "cpu":
            yield from self._streamed()
            return
        tensors = self.held or self.tensors
        for sizes, rows in self.turns():
            index = rows if self.device.type == "cpu" else self._pinned(rows).to(self.device, non_blocking=True)
            yield self._trimmed([t[index] for t in tensors], sizes, rows)

    def _streamed(self) -> Iterator[Any]:
        """Only the rows of a batch are copied. A thread gathers the next ones during a step."""
        turns = self.turns()

        def fetch() -> tuple[list[Tensor], list[int], Tensor] | None:
            turn = next(turns, None)
            if turn is None:
                return None
            return [self._pinned(t[turn[1]]) for t in self.tensors], *turn

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch)
            while (fetched := waiting.result()) is not None:
                waiting = pool.submit(fetch)
                tensors, sizes, rows = fetched
                yield self._trimmed([t.to(self.device, non_blocking=True) for t in tensors], sizes, rows)

    def _pinned(self, t: Tensor) -> Tensor:
        """Only from pinned memory does a copy run beside the computation."""
        return t.pin_memory() if self.device.type == "cuda" else t

    def _trimmed(self, tensors: Sequence[Tensor], sizes: list[int], rows: Tensor) -> Any:
        found = self.cut(tensors, sizes)
        batches = found if isinstance(found, list) else [found]
        widths = [self.width(part) for part in rows.split(sizes)]
        cut = [
            (*(t if width == self.full else t[:, :width] for t in sequences), labels)
            for (*sequences, labels), width in zip(batches, widths, strict=True)
        ]
        return cut if isinstance(found, list) else cut[0]
