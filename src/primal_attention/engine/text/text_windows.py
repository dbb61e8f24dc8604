"""A stream of tokens cut into windows of one length: shuffled and cut anew in every pass, or one after the other.

A batch is (windows (B, context + 1),): the first `context` tokens are read, the last `context` are predicted. Measured
splits are covered so that every token but the first, which stands for no text, is predicted exactly once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from primal_attention.data.errors import DataError
from primal_attention.data.text import TextSplit
from primal_attention.engine.batches import Batches, derive_seed

NOTHING = -1  # behind the last token of a split


class Windows:
    """Rows of `context` + 1 tokens of a stream, taken by their first token."""

    def __init__(self, stream: Tensor, context: int, count: int) -> None:
        self.stream, self.context, self.count = stream, context, count

    @property
    def device(self) -> torch.device:
        return self.stream.device

    def to(self, device: torch.device) -> Windows:
        return Windows(self.stream.to(device), self.context, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, starts: Tensor) -> Tensor:
        rows = self.stream[starts[:, None] + torch.arange(self.context + 1, device=self.device)].long()
        return rows & 0xFFFF if self.stream.dtype == torch.int16 else rows


class TrainingWindows(Batches):
    """Windows in random order; every pass starts cutting at another token."""

    def __init__(self, split: TextSplit, context: int, batch_size: int, seed: int, steps: int = 0) -> None:
        tokens = split.tokens
        count = (len(tokens) - 1) // context - 1
        if count < 1:
            raise DataError(
                f"train has {len(tokens)} tokens: windows of {context} need {2 * context + 1} (--data.context)"
            )
        # torch can do little with unsigned numbers of 16 bits: they travel as signed ones; `Windows` turns them back.
        stream = torch.from_numpy(tokens.view(np.int16) if tokens.dtype == np.uint16 else tokens)
        super().__init__([Windows(stream, context, count)], batch_size, seed, steps)  # type: ignore[list-item]
        self.context = context

    def order(self, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("windows", self.shuffle_seed, turn))
        first = torch.randint(self.context, (1,), generator=generator)
        return first + self.context * torch.randperm(self.cases, generator=generator)


class MeasuredWindows(Batches):
    """A whole split in order. `tokens` are predicted, and they stand for `bytes` of text.

    The last batch is filled up with windows that hold nothing, so that all batches have one shape.
    """

    def __init__(self, split: TextSplit, context: int, batch_size: int) -> None:
        self.tokens, self.bytes = len(split.tokens) - 1, split.bytes
        count = -(-self.tokens // context)
        count += -count % batch_size
        stream = torch.full((count * context + 1,), NOTHING, dtype=torch.int32)
        stream[: len(split.tokens)] = torch.from_numpy(split.tokens.astype(np.int32))
        super().__init__([Windows(stream, context, count)], batch_size)  # type: ignore[list-item]
        self.context = context

    def order(self, turn: int) -> Tensor:
        return torch.arange(self.cases) * self.context
