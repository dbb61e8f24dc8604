"""Batches of context windows cut from trajectories: K steps from a random row on, as Decision Transformer trains.

A row is drawn from all rows alike, which draws episodes in proportion to their length. Near an episode's end the window
is shorter than K. Its steps stand in front and padding behind them, where causal attention cannot see it; Decision
Transformer's padding on the left gives the same actions, since a step's place is told by its time stamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from primal_attention.data.d4rl import Trajectories
from primal_attention.engine.batches import Batches


class ContextBatches(Batches):
    """Batches (states (B, K, S), actions (B, K, A), returns to go (B, K), time stamps (B, K), padding (B, K))."""

    def __init__(
        self, data: Trajectories, context: int, batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        self.context = context
        lengths = torch.from_numpy(data.lengths)
        columns = [data.observations, data.actions, data.returns_to_go, data.timesteps]
        last = torch.from_numpy(data.ends - 1).repeat_interleave(lengths)  # each row's last row of its episode
        super().__init__([*(torch.from_numpy(c) for c in columns), last], batch_size, shuffle_seed, steps)

    def windows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The windows that begin at these rows, (B,) → (B, K, …)."""
        *columns, last = self.tensors
        index = rows.unsqueeze(-1) + torch.arange(self.context, device=rows.device)
        padding = index > last[rows].unsqueeze(-1)
        index = index.masked_fill(padding, 0)

        def cut(column: Tensor) -> Tensor:
            found = column[index]
            return found.masked_fill(padding.reshape(*padding.shape, *[1] * (column.ndim - 1)), 0)

        return (*(cut(column) for column in columns), padding)

    def __iter__(self) -> Iterator[Any]:
        for sizes, rows in self.turns():
            yield self.cut(self.windows(rows), sizes)
