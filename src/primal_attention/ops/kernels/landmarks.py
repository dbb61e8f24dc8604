"""The data-dependent projection weights W_{·|X} = f(X)ᵀ W from the landmarks' rows; the way back: `landmarks_back.py`.

    W_{e|X} = Σ_j x_{row_j} W_e[j]ᵀ            one program per (sequence, head)

Rows come as a table (B, n) of row numbers, sorted within a sequence, −1 for none. A short sequence repeats rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import landmark_tiles, landmark_weight_tiles, precision, stored_rank
from .products import dot


@triton.jit
def _landmark_weights(
    x, rows, w_e, w_r, wx_e, wx_r, trace, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, APART: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """APART: numbers from a head's side to the next head's. BOTH: of r too, and the trace; or of e alone."""
    # Neighbours share a sequence's rows, then a head's weights: both come from the cache.
    program = tl.program_id(0)
    block, head, sequence = program % NS, program // NS % HEADS, (program // (NS * HEADS)).to(tl.int64)
    s = block * BS + tl.arange(0, BS)
    p, j = tl.arange(0, BP), tl.arange(0, BN)
    x += head * P
    w_e += head * n * RANK
    w_r += head * n * RANK
    sum_e = tl.zeros((BP, BS), tl.float32)
    sum_r = tl.zeros((BP, BS), tl.float32)
    for first in range(0, n, BN):
        mark = first + j
        row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
        found = row >= 0
        xl = tl.load(x + row[None] * (HEADS * P) + p[:, None], mask=found[None] & (p[:, None] < P), other=0.0)
        place, inside = mark[:, None] * RANK + s[None], (mark < n)[:, None] & (s[None] < RANK)
        sum_e += dot(xl, tl.load(w_e + place, mask=inside, other=0.0).to(xl.dtype), PRECISION)
        if BOTH:
            sum_r += dot(xl, tl.load(w_r + place, mask=inside, other=0.0).to(xl.dtype), PRECISION)
    out = (sequence * HEADS + head) * APART + p[:, None] * S + s[None]
    fits = (p[:, None] < P) & (s[None] < S)
    tl.store(wx_e + out, sum_e.to(wx_e.dtype.element_ty), mask=fits)
    if BOTH:
        tl.store(wx_r + out, sum_r.to(wx_r.dtype.element_ty), mask=fits)
    # The first sequence's programs leave Tr(W_eᵀ W_r) behind.
    if BOTH and sequence == 0:
        total = tl.zeros((BN, BS), tl.float32)
        for first in range(0, n, BN):
            mark = first + j
            place, inside = mark[:, None] * RANK + s[None], (mark < n)[:, None] & (s[None] < RANK)
            e, r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
            total += e.to(tl.float32) * r.to(tl.float32)
        tl.store(trace + head * NS + block, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _pack(
    w_e, w_r, wx, trace, HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """W_e and W_r themselves in the layout of wx, for the modes that do not depend on the data."""
    head = tl.program_id(0)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    p = tl.arange(0, BP)
    place, inside = (head * P + p)[:, None] * RANK + s[None], (p[:, None] < P) & (s[None] < RANK)
    e, r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
    out, fits = wx + head * (2 * P * S) + p[:, None] * S + s[None], (p[:, None] < P) & (s[None] < S)
    tl.store(out, e.to(wx.dtype.element_ty), mask=fits)
    tl.store(out + P * S, r.to(wx.dtype.element_ty), mask=fits)
    product = tl.sum(tl.sum(e.to(tl.float32) * r.to(tl.float32), 1), 0)
    tl.store(trace + head * tl.num_programs(1) + tl.program_id(1), product)


def landmark_weights(x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """wx (B, H, 2, p, S) in `dtype`, columns beyond the rank zero, and Tr(W_eᵀ W_r) per head.

    x: (rows, H·p), w: (H, n, s).
    """
    wx = _room(x, rows, w_e, dtype, 2)
    return wx, _fill(x, rows, w_e, w_r, wx, wx[:, :, 1:])


def landmark_sides(
    x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `landmark_weights`, each side in memory of its own, (B, H, 1, p, S): one can be kept without the other."""
    wx, other = _room(x, rows, w_e, dtype, 1), _room(x, rows, w_e, dtype, 1)
    return wx, other, _fill(x, rows, w_e, w_r, wx, other)


def landmark_side(x: Tensor, rows: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """One of the two alone."""
    wx = _room(x, rows, w, dtype, 1)
    _fill(x, rows, w, w, wx, None)
    return wx


def second_side(wx: Tensor, other: Tensor | None) -> Tensor:
    """That of r: the second half of wx, unless it stands alone."""
    return wx[:, :, 1:] if other is None else other


def _room(x: Tensor, rows: Tensor, w: Tensor, dtype: torch.dtype, sides: int) -> Tensor:
    heads, _, rank = w.shape
    shape = (rows.shape[0], heads, sides, x.shape[1] // heads, stored_rank(rank))
    return torch.empty(shape, dtype=dtype, device=x.device)


def _fill(x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, wx_e: Tensor, wx_r: Tensor | None) -> Tensor:
    """Write both sides, and return the traces; or, without room for r, that of e alone."""
    heads, n, rank = w_e.shape
    p, stored = wx_e.shape[3:]
    size = landmark_weight_tiles(x.dtype, p, rank)
    if not rows.shape[0]:
        return (w_e.float() * w_r.float()).sum((1, 2))
    trace = torch.empty((heads, size.rank_blocks), dtype=torch.float32, device=x.device)
    _landmark_weights[(rows.shape[0] * heads * size.rank_blocks,)](
        x, rows, w_e, w_r, wx_e, wx_e if wx_r is None else wx_r, trace, n, HEADS=heads, P=p, RANK=rank, S=stored,
        APART=wx_e.shape[2] * p * stored, BN=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
        BOTH=wx_r is not None, PRECISION=precision(x.dtype),
    )  # fmt: skip
    return trace[:, 0] if size.rank_blocks == 1 else trace.sum(1)


def packed_weights(w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    """wx (1, H, 2, p, S) of W_e, W_r (H, p, s) themselves, and their traces."""
    heads, p, rank = w_e.shape
    stored, size = stored_rank(rank), landmark_tiles(p, rank)
    wx = torch.empty((1, heads, 2, p, stored), dtype=torch.float32, device=w_e.device)
    trace = torch.empty((heads, size.rank_blocks), dtype=torch.float32, device=w_e.device)
    _pack[(heads, size.rank_blocks)](
        w_e, w_r, wx, trace, HEADS=heads, P=p, RANK=rank, S=stored, BP=size.width, BS=size.rank
    )  # fmt: skip
    return wx, trace[:, 0] if size.rank_blocks == 1 else trace.sum(1)
