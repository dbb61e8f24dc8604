"""Add up what the chunks left: (chunks, width) partial sums → (B, width) or (width,), in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div
from .sequences import Sequences


@triton.jit
def _segment_sum(parts, sums, first_chunk, width, BW: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    total = tl.zeros((BW,), tl.float32)
    for chunk in range(tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)):
        total += tl.load(parts + chunk * width + column, mask=column < width, other=0.0)
    tl.store(sums + sequence * width + column, total, mask=column < width)


def segment_sum(parts: Tensor, seqs: Sequences) -> Tensor:
    """parts: (chunks, …) float32 → (B, …)."""
    if seqs.single:
        return parts
    sums = torch.empty((seqs.starts.shape[0], *parts.shape[1:]), dtype=torch.float32, device=parts.device)
    width = parts.shape[1:].numel()
    if sums.shape[0]:
        block = 256
        _segment_sum[(sums.shape[0], ceil_div(width, block))](parts, sums, seqs.first_chunk, width, BW=block)
    return sums


@triton.jit
def _column_sum(parts, total, count, width, BR: tl.constexpr, BW: tl.constexpr):
    column, r = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, BR)
    sums = tl.zeros((BR, BW), tl.float32)
    for first in range(0, count, BR):
        row = (first + r).to(tl.int64)
        sums += tl.load(
            parts + row[:, None] * width + column[None], mask=(row < count)[:, None] & (column < width)[None], other=0.0
        )
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=column < width)


def column_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """parts: (chunks, width) float32 → (width,) in `dtype`."""
    total = torch.empty(parts.shape[1], dtype=dtype, device=parts.device)
    _column_sum[(ceil_div(parts.shape[1], 32),)](parts, total, parts.shape[0], parts.shape[1], BR=64, BW=32)
    return total
