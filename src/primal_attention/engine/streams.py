"""Batches of sets that stay where they are, on disk or in memory, and come to the device one step ahead of use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from primal_attention.engine.batches import Batches


class StreamedBatches(Batches):
    """As `Batches`, but only the rows of a batch are copied. A thread gathers the next ones during a step."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> StreamedBatches:
        self.device = torch.device(device)
        return self

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        source = super().__iter__()
        if self.device.type == "cpu":
            yield from source
            return

        def fetch() -> tuple[Tensor, ...] | None:
            batch = next(source, None)
            # Only from pinned memory does a copy run beside the computation.
            return None if batch is None else tuple(t.pin_memory() if self.device.type == "cuda" else t for t in batch)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch)
            while (batch := waiting.result()) is not None:
                waiting = pool.submit(fetch)
                yield tuple(t.to(self.device, non_blocking=True) for t in batch)
