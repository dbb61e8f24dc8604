"""Sums over rows in a fixed order: of what the chunks left, per sequence or in all, and of matrices of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two
from .sequences import Sequences

TALL = 32  # rows of a block in a sum over many


@triton.jit
def _segment_sum(parts, sums, first_chunk, width, BW: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    total = tl.zeros((BW,), tl.float32)
    for chunk in range(tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)):
        total += tl.load(parts + chunk * width + column, mask=column < width, other=0.0)
    tl.store(sums + sequence * width + column, total.to(sums.dtype.element_ty), mask=column < width)


def segment_sum(parts: Tensor, seqs: Sequences, dtype: torch.dtype = torch.float32) -> Tensor:
    """parts: (chunks, …) float32 → (B, …) in `dtype`; parts in `dtype` already where no sequence has a second chunk."""
    if seqs.single:
        return parts
    sums = torch.empty((seqs.starts.shape[0], *parts.shape[1:]), dtype=dtype, device=parts.device)
    width = parts.shape[1:].numel()
    if sums.shape[0]:
        block = 256
        _segment_sum[(sums.shape[0], ceil_div(width, block))](parts, sums, seqs.first_chunk, width, BW=block)
    return sums


@triton.jit
def _columns(parts, total, count, width, block, BR: tl.constexpr, BW: tl.constexpr):
    column, r = block * BW + tl.arange(0, BW), tl.arange(0, BR)
    sums = tl.zeros((BR, BW), tl.float32)
    for first in range(0, count, BR):
        row = (first + r).to(tl.int64)
        sums += tl.load(
            parts + row[:, None] * width + column[None], mask=(row < count)[:, None] & (column < width)[None], other=0.0
        )
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=column < width)


@triton.jit
def _column_sum(parts, total, count, width, BR: tl.constexpr, BW: tl.constexpr):
    _columns(parts, total, count, width, tl.program_id(0), BR, BW)


def column_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """parts: (chunks, width) float32 → (width,) in `dtype`."""
    total = torch.empty(parts.shape[1], dtype=dtype, device=parts.device)
    _column_sum[(ceil_div(parts.shape[1], 32),)](parts, total, parts.shape[0], parts.shape[1], BR=64, BW=32)
    return total


@triton.jit
def _two_column_sums(
    first, of_first, first_count, first_width, second, of_second, second_count, second_width,
    BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(first_width, BW)
    if tl.program_id(0) < blocks:
        _columns(first, of_first, first_count, first_width, tl.program_id(0), BR, BW)
    else:
        _columns(second, of_second, second_count, second_width, tl.program_id(0) - blocks, BR, BW)


def two_column_sums(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`column_sum` of two matrices in one launch."""
    sums = tuple(torch.empty(t.shape[1], dtype=dtype, device=t.device) for t in (first, second))
    _two_column_sums[(sum(ceil_div(t.shape[1], 32) for t in (first, second)),)](
        first, sums[0], *first.shape, second, sums[1], *second.shape, BR=64, BW=32
    )  # fmt: skip
    return sums[0], sums[1]


@triton.jit
def _tall_sum(matrix, parts, count, width, per_split, BR: tl.constexpr, BW: tl.constexpr):
    split, r = tl.program_id(0).to(tl.int64), tl.arange(0, BR)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    begins = split * per_split
    ends = tl.minimum(begins + per_split, count)
    sums = tl.zeros((BR, BW), tl.float32)
    for first in range(begins, ends, BR):
        row = first + r
        inside = (row < ends)[:, None] & (column < width)[None]
        sums += tl.load(matrix + row[:, None] * width + column[None], mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + split * width + column, tl.sum(sums, 0), mask=column < width)


def tall_sum(matrix: Tensor) -> Tensor:
    """matrix: (rows, width) of many rows → (width,) float32, at the speed of reading it once."""
    rows, width = matrix.shape
    columns = ceil_div(width, 128)
    per_split = ceil_div(ceil_div(rows, ceil_div(1024, columns)), TALL) * TALL  # whole blocks: each waits for its loads
    splits = max(1, ceil_div(rows, max(per_split, 1)))
    parts = torch.empty((splits, width), dtype=torch.float32, device=matrix.device)
    _tall_sum[(splits, columns)](matrix, parts, rows, width, per_split, BR=TALL, BW=128)
    return column_sum(parts, torch.float32)


@triton.jit
def _sum_through(
    total, weight, rounded, sums, rows,
    HEADS: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    i, r = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, BR)
    found = tl.zeros((BR, BW), tl.float32)
    for first in range(0, rows, BR):
        row = first + r
        value = tl.load(total + row, mask=row < rows, other=0.0)
        if tl.program_id(0) == 0:
            tl.store(rounded + row, value.to(rounded.dtype.element_ty), mask=row < rows)
        for head in tl.static_range(HEADS):
            place = weight + row[:, None] * (HEADS * P) + head * P + i[None]
            w = tl.load(place, mask=(row < rows)[:, None] & (i < P)[None], other=0.0)
            found += w.to(tl.float32) * value[:, None]
    tl.store(sums + i, tl.sum(found, 0).to(sums.dtype.element_ty), mask=i < P)


def sum_through(total: Tensor, weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of a sum over rows (d,) float32: itself in the weight's dtype, and Σ_heads of weightᵀ total, (width,)."""
    rows, columns = weight.shape
    rounded, sums = weight.new_empty(rows), weight.new_empty(width)
    _sum_through[(ceil_div(width, 8),)](
        total, weight, rounded, sums, rows, HEADS=columns // width, P=width,
        BR=min(power_of_two(rows), 512), BW=8, num_warps=8,
    )  # fmt: skip
    return rounded, sums
