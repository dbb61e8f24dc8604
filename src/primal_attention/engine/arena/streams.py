"""Batches of sets that stay where they are, on disk or in memory, and come to the device one step ahead of use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from primal_attention.engine.batches import Batches


class StreamedBatches(Batches):
    """As `Batches`, but only the rows of a batch are copied. A thread gathers the next ones during a step."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> StreamedBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            yield from super().__iter__()
            return
        turns = self.turns()

        def fetch() -> tuple[list[Tensor], list[int]] | None:
            turn = next(turns, None)
            if turn is None:
                return None
            gathered = [t[turn[1]] for t in self.tensors]
            # Only from pinned memory does a copy run beside the computation.
            return [t.pin_memory() for t in gathered] if self.device.type == "cuda" else gathered, turn[0]

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch)
            while (fetched := waiting.result()) is not None:
                waiting = pool.submit(fetch)
                tensors, sizes = fetched
                yield self.cut([t.to(self.device, non_blocking=True) for t in tensors], sizes)
