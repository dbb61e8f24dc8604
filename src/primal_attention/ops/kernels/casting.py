"""Several small tensors in another type, in one launch with a program for each piece of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div

PIECE = 1024  # numbers of a program


@triton.jit
def _cast(sources, targets, counts, PIECE: tl.constexpr):
    place = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    for i in tl.static_range(len(sources)):
        if tl.program_id(1) == i:
            inside = place < counts[i]
            value = tl.load(sources[i] + place, mask=inside, other=0.0)
            tl.store(targets[i] + place, value.to(targets[i].dtype.element_ty), mask=inside)


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors, all contiguous and of one type, in `dtype`."""
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    counts = [t.numel() for t in tensors]
    if any(counts):
        _cast[(ceil_div(max(counts), PIECE), len(made))](tuple(tensors), tuple(made), tuple(counts), PIECE=PIECE)
    return made
