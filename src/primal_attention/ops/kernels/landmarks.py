"""The data-dependent projection weights W_{·|X} = f(X)ᵀ W from the landmarks' rows, and the way back.

    forward     W_{e|X} = Σ_j x_{row_j} W_e[j]ᵀ            one program per (sequence, head)
    to x        dx_{row_j} += dW_{e|X} W_e[j] + (same of r) one program per (sequence, head)
    to W        dW_e[j] = Σ_b x_{row_j}ᵀ dW_{e|X}           partial sums over the sequences, added in a fixed order

Rows come as a table (B, n) of row numbers, sorted within a sequence, −1 for none. A short sequence repeats rows; the
way back to x lets the first of equal rows add for all of them, so no two programs write one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import (
    ceil_div,
    landmark_sum_tiles,
    landmark_tiles,
    landmark_weight_tiles,
    power_of_two,
    precision,
    stored_rank,
)
from .products import dot

FULL = 288  # programs that fill a large GPU


@triton.jit
def _landmark_weights(
    x, rows, w_e, w_r, wx, trace, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        e, r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
        sum_e += dot(xl, e.to(xl.dtype), PRECISION)
        sum_r += dot(xl, r.to(xl.dtype), PRECISION)
    out = wx + (sequence * HEADS + head) * (2 * P * S) + p[:, None] * S + s[None]
    fits = (p[:, None] < P) & (s[None] < S)
    tl.store(out, sum_e.to(wx.dtype.element_ty), mask=fits)
    tl.store(out + P * S, sum_r.to(wx.dtype.element_ty), mask=fits)
    # The first sequence's programs leave Tr(W_eᵀ W_r) behind.
    if sequence == 0:
        total = tl.zeros((BN, BS), tl.float32)
        for first in range(0, n, BN):
            mark = first + j
            place, inside = mark[:, None] * RANK + s[None], (mark < n)[:, None] & (s[None] < RANK)
            e, r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
            total += e.to(tl.float32) * r.to(tl.float32)
        tl.store(trace + head * NS + block, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _with_followers(own_e, own_r, w_e, w_r, rows, row, mark, leads, n, s, RANK: tl.constexpr):
    """To the weights of landmarks that lead, those of the equal rows behind them."""
    sum_e, sum_r = own_e.to(tl.float32), own_r.to(tl.float32)
    step = 0
    follows = leads.to(tl.int32)
    while tl.max(follows, 0) > 0:
        step += 1
        ahead = mark + step
        same = tl.load(rows + ahead, mask=(follows > 0) & (ahead < n), other=-2) == row
        follows = (same & (follows > 0)).to(tl.int32)
        place, inside = ahead[:, None] * RANK + s[None], (follows > 0)[:, None] & (s[None] < RANK)
        sum_e += tl.load(w_e + place, mask=inside, other=0.0).to(tl.float32)
        sum_r += tl.load(w_r + place, mask=inside, other=0.0).to(tl.float32)
    return sum_e.to(own_e.dtype), sum_r.to(own_r.dtype)


@triton.jit
def _to_rows(
    grad_wx, rows, w_e, w_r, grad_x, n, per_program,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, DISTINCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, sequence = program % HEADS, (program // HEADS).to(tl.int64)
    p, j = tl.arange(0, BP), tl.arange(0, BN)
    kind = grad_x.dtype.element_ty
    rows += sequence * n
    grad_wx += (sequence * HEADS + head) * (2 * P * S)
    grad_x += head * P
    w_e += head * n * RANK
    w_r += head * n * RANK
    begins = tl.program_id(1) * per_program
    for first in range(begins, tl.minimum(begins + per_program, n), BN):
        mark = first + j
        row = tl.load(rows + mark, mask=mark < n, other=-1)
        leads = row >= 0
        if not DISTINCT:
            before = tl.load(rows + mark - 1, mask=(mark < n) & (mark > 0), other=-1)
            leads = leads & (row != before)
        grad = tl.zeros((BN, BP), tl.float32)
        for block in range(NS):
            s = block * BS + tl.arange(0, BS)
            place, inside = mark[:, None] * RANK + s[None], leads[:, None] & (s[None] < RANK)
            own_e, own_r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
            if not DISTINCT:
                own_e, own_r = _with_followers(own_e, own_r, w_e, w_r, rows, row, mark, leads, n, s, RANK)
            source = grad_wx + p[None] * S + s[:, None]
            fits = (p[None] < P) & (s[:, None] < S)
            grad += dot(own_e.to(kind), tl.load(source, mask=fits, other=0.0).to(kind), PRECISION)
            grad += dot(own_r.to(kind), tl.load(source + P * S, mask=fits, other=0.0).to(kind), PRECISION)
        target = grad_x + row[:, None] * (HEADS * P) + p[None]
        inside = leads[:, None] & (p[None] < P)
        grad += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, grad.to(kind), mask=inside)


@triton.jit
def _to_weights(
    x, rows, grad_wx, grad_w, n, batch, per_split,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: rows and offsets may pass 2^31
    head, side = lane // 2, lane % 2
    marks = tl.cdiv(n, BN)
    mark = (tl.program_id(2) % marks) * BN + tl.arange(0, BN)
    s = (tl.program_id(2) // marks) * BS + tl.arange(0, BS)
    p = tl.arange(0, BP)
    total = tl.zeros((BN, BS), tl.float32)
    for sequence in range(split * per_split, tl.minimum((split + 1) * per_split, batch)):
        row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
        xl = tl.load(
            x + row[:, None] * (HEADS * P) + head * P + p[None], mask=(row >= 0)[:, None] & (p[None] < P), other=0.0
        )  # fmt: skip
        grad = tl.load(
            grad_wx + ((sequence * HEADS + head) * 2 + side) * (P * S) + p[:, None] * S + s[None],
            mask=(p[:, None] < P) & (s[None] < S), other=0.0,
        )  # fmt: skip
        total += dot(xl, grad.to(xl.dtype), PRECISION)
    out = ((split * HEADS + head) * 2 + side) * n
    tl.store(grad_w + (out + mark)[:, None] * S + s[None], total, mask=(mark < n)[:, None] & (s[None] < S))


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


@triton.jit
def _finish_weights(
    parts, w_e, w_r, grad_trace, grad_e, grad_r, n, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums (splits, H, 2, n, S), and what the trace asks for: dW_e += g W_r, dW_r += g W_e."""
    head = tl.program_id(0)
    mark, s = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(2) * BS + tl.arange(0, BS)
    inside = (mark < n)[:, None] & (s < RANK)[None]
    sum_e = tl.zeros((BN, BS), tl.float32)
    sum_r = tl.zeros((BN, BS), tl.float32)
    source = parts + (head.to(tl.int64) * 2 * n + mark)[:, None] * S + s[None]
    for _ in range(splits):
        sum_e += tl.load(source, mask=inside, other=0.0)
        sum_r += tl.load(source + n * S, mask=inside, other=0.0)
        source += HEADS * 2 * n * S
    place = (head * n + mark)[:, None] * RANK + s[None]
    if TRACE:
        g = tl.load(grad_trace + head)
        sum_e += g * tl.load(w_r + place, mask=inside, other=0.0).to(tl.float32)
        sum_r += g * tl.load(w_e + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_e + place, sum_e.to(grad_e.dtype.element_ty), mask=inside)
    tl.store(grad_r + place, sum_r.to(grad_r.dtype.element_ty), mask=inside)


def landmark_weights(x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """wx (B, H, 2, p, S) in `dtype`, columns beyond the rank zero, and Tr(W_eᵀ W_r) per head.

    x: (rows, H·p), w: (H, n, s).
    """
    heads, n, rank = w_e.shape
    p, stored = x.shape[1] // heads, stored_rank(rank)
    size = landmark_weight_tiles(x.dtype, p, rank)
    wx = torch.empty((rows.shape[0], heads, 2, p, stored), dtype=dtype, device=x.device)
    trace = torch.empty((heads, size.rank_blocks), dtype=torch.float32, device=x.device)
    if not rows.shape[0]:
        return wx, (w_e.float() * w_r.float()).sum((1, 2))
    _landmark_weights[(rows.shape[0] * heads * size.rank_blocks,)](
        x, rows, w_e, w_r, wx, trace, n, HEADS=heads, P=p, RANK=rank, S=stored, BN=size.tokens, BP=size.width,
        BS=size.rank, NS=size.rank_blocks, PRECISION=precision(x.dtype),
    )  # fmt: skip
    return wx, trace[:, 0] if size.rank_blocks == 1 else trace.sum(1)


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


def finish_weights(parts: Tensor, w_e: Tensor, w_r: Tensor, grad_trace: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of w_e and w_r (H, n, s) from partial sums (splits, H, 2, n, S) and the traces' gradient."""
    heads, n, rank = w_e.shape
    grad_e, grad_r = torch.empty_like(w_e), torch.empty_like(w_r)
    bn, bs = 8, min(power_of_two(stored_rank(rank)), 64)  # small: there are few programs, and each waits for its loads
    _finish_weights[(heads, ceil_div(n, bn), ceil_div(rank, bs))](
        parts, w_e, w_r, parts if grad_trace is None else grad_trace, grad_e, grad_r, n, parts.shape[0],
        HEADS=heads, RANK=rank, S=stored_rank(rank), BN=bn, BS=bs, TRACE=grad_trace is not None,
    )  # fmt: skip
    return grad_e, grad_r


def landmark_weights_backward(
    x: Tensor,
    rows: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    grad_wx: Tensor,
    grad_trace: Tensor | None,
    grad_x: Tensor,
    distinct: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adds to grad_x in place; returns the gradients of w_e and w_r. grad_wx: (B, H, 2, p, S).

    distinct: no sequence is so short that it repeats rows.
    """
    heads, n, rank = w_e.shape
    batch, p, stored = rows.shape[0], x.shape[1] // heads, stored_rank(rank)
    size, sums = landmark_tiles(p, rank), landmark_sum_tiles(x.dtype, p, rank, n)
    tiles = ceil_div(n, sums.tokens) * sums.rank_blocks
    # Enough programs, few enough partial sums to add cheaply.
    splits = min(batch, max(1, FULL // (2 * heads * tiles)))
    parts = torch.empty((splits, heads, 2, n, stored), dtype=torch.float32, device=x.device)
    if batch:
        common = {"HEADS": heads, "P": p, "S": stored, "BP": size.width, "PRECISION": precision(x.dtype)}
        # A program per sequence and head walks over all landmarks, unless there are too few of those to fill a GPU.
        marks = n if batch * heads >= FULL else size.tokens
        _to_rows[(batch * heads, ceil_div(n, marks))](
            grad_wx, rows, w_e, w_r, grad_x, n, marks, **common,
            RANK=rank, BN=size.tokens, BS=size.rank, NS=size.rank_blocks, DISTINCT=distinct,
        )  # fmt: skip
        _to_weights[(splits, 2 * heads, tiles)](
            x, rows, grad_wx, parts, n, batch, ceil_div(batch, splits), **common,
            BN=sums.tokens, BS=sums.rank, num_warps=sums.warps,
        )  # fmt: skip
    return finish_weights(parts, w_e, w_r, grad_trace)
