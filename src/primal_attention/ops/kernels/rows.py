"""Padding, wherever it stands: the valid tokens of each sequence move to the front of its rows, and back.

    _compact     mask → where each valid token goes, which token comes to each row, the lengths, the chunks' ends
    _move_rows   out[t] = x[index[t]], or zero where the index is −1

A move is a permutation of the valid rows, so the way back is the move with the other index: each row is read and
written once, and what stands in the padding, NaN included, is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two
from .sequences import CHUNK

TOKENS = 1024  # of a mask, looked at together


@triton.jit
def _compact(
    valid, source, place, lengths, chunk_end, width, chunks,
    BT: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * width
    t, c = tl.arange(0, BT), tl.arange(0, BC)
    count = tl.zeros((), tl.int32)
    for start in range(0, width, BT):
        token = start + t
        there = tl.load(valid + first + token, mask=token < width, other=0).to(tl.int32)
        goes = count + tl.cumsum(there, 0) - there
        tl.store(place + first + token, tl.where(there > 0, goes, -1), mask=token < width)
        tl.store(source + first + goes, token, mask=there > 0)
        count += tl.sum(there, 0)
    for start in range(0, width, BT):
        token = start + t
        tl.store(source + first + token, -1, mask=(token < width) & (token >= count))
    tl.store(lengths + sequence, count.to(tl.int64))
    for start in range(0, chunks, BC):
        chunk = start + c
        begins = chunk * ROWS
        ends = tl.maximum(tl.minimum(begins + ROWS, count), begins)
        tl.store(chunk_end + sequence * chunks + chunk, first + ends.to(tl.int64), mask=chunk < chunks)


@triton.jit
def _move_rows(x, index, out, width, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    token, column = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(2) * BD + tl.arange(0, BD)
    first = sequence * width
    origin = tl.load(index + first + token, mask=token < width, other=-1)
    fits = (token < width)[:, None] & (column < D)[None]
    row = tl.load(
        x + (first + origin)[:, None] * D + column[None], mask=fits & (origin >= 0)[:, None], other=0.0
    )  # fmt: skip
    tl.store(out + (first + token)[:, None] * D + column[None], row, mask=fits)


def compact(valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a mask (B, N): `source` and `place` (B, N) int32, the lengths (B,) and the chunks' ends (B · chunks,).

    source[b, t]: the token that comes to row t, −1 behind the last. place[b, i]: the row of token i, −1 for padding.
    """
    batch, width = valid.shape
    source, place = (torch.empty((batch, width), dtype=torch.int32, device=valid.device) for _ in range(2))
    chunks = ceil_div(width, CHUNK)
    lengths = torch.empty(batch, dtype=torch.int64, device=valid.device)
    ends = torch.empty(batch * chunks, dtype=torch.int64, device=valid.device)
    if batch:
        _compact[(batch,)](
            valid.contiguous().view(torch.uint8), source, place, lengths, ends, width, chunks,
            BT=min(TOKENS, power_of_two(width)), BC=power_of_two(min(chunks, 256)), ROWS=CHUNK,
        )  # fmt: skip
    return source, place, lengths, ends


def move_rows(x: Tensor, index: Tensor) -> Tensor:
    """x: (B, N, d), index: (B, N) int32."""
    batch, width, d = x.shape
    x, out = x.contiguous(), torch.empty((batch, width, d), dtype=x.dtype, device=x.device)
    columns = min(power_of_two(d), 256)
    rows = max(1, 4096 // columns)
    if x.numel():
        _move_rows[(batch, ceil_div(width, rows), ceil_div(d, columns))](
            x, index, out, width, D=d, BT=rows, BD=columns
        )  # fmt: skip
    return out
