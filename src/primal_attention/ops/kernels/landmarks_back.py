"""The way back of `landmarks.py`, from dW_{·|X} to x and to W.

    to x        dx_{row_j} += dW_{e|X} W_e[j] + (same of r) one program per (sequence, head)
    to W        dW_e[j] = Σ_b x_{row_j}ᵀ dW_{e|X}           partial sums over the sequences, added in a fixed order

Where rows repeat, the first of equal rows adds for all of them, so no two programs write one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import (
    FULL,
    ceil_div,
    landmark_sum_tiles,
    landmark_tiles,
    power_of_two,
    precision,
    stored_rank,
)
from .landmarks import second_side
from .products import dot


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
    of_e, of_r, rows, w_e, w_r, grad_x, n, per_program,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, APART: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, DISTINCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, sequence = program % HEADS, (program // HEADS).to(tl.int64)
    p, j = tl.arange(0, BP), tl.arange(0, BN)
    kind = grad_x.dtype.element_ty
    rows += sequence * n
    of_e += (sequence * HEADS + head) * APART
    of_r += (sequence * HEADS + head) * APART
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
            source = p[None] * S + s[:, None]
            fits = (p[None] < P) & (s[:, None] < S)
            grad += dot(own_e.to(kind), tl.load(of_e + source, mask=fits, other=0.0).to(kind), PRECISION)
            grad += dot(own_r.to(kind), tl.load(of_r + source, mask=fits, other=0.0).to(kind), PRECISION)
        target = grad_x + row[:, None] * (HEADS * P) + p[None]
        inside = leads[:, None] & (p[None] < P)
        grad += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, grad.to(kind), mask=inside)


@triton.jit
def _to_weights(
    x, rows, of_e, of_r, grad_w, n, batch, per_split,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, APART: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, SIDES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SIDES: 2 where a program's registers hold the sums of both sides, which then read x once."""
    split, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: rows and offsets may pass 2^31
    head, side = lane // (3 - SIDES), lane % (3 - SIDES)
    marks = tl.cdiv(n, BN)
    mark = (tl.program_id(2) % marks) * BN + tl.arange(0, BN)
    s = (tl.program_id(2) // marks) * BS + tl.arange(0, BS)
    p = tl.arange(0, BP)
    x += head * P
    of_first = tl.where(side == 0, of_e, of_r)
    first = tl.zeros((BN, BS), tl.float32)
    second = first
    fits = (p[:, None] < P) & (s[None] < S)
    for sequence in range(split * per_split, tl.minimum((split + 1) * per_split, batch)):
        row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
        xl = tl.load(x + row[:, None] * (HEADS * P) + p[None], mask=(row >= 0)[:, None] & (p[None] < P), other=0.0)
        source = (sequence * HEADS + head) * APART + p[:, None] * S + s[None]
        first += dot(xl, tl.load(of_first + source, mask=fits, other=0.0).to(xl.dtype), PRECISION)
        if SIDES == 2:
            second += dot(xl, tl.load(of_r + source, mask=fits, other=0.0).to(xl.dtype), PRECISION)
    target = grad_w + (((split * HEADS + head) * 2 + side) * n + mark)[:, None] * S + s[None]
    inside = (mark < n)[:, None] & (s[None] < S)
    tl.store(target, first, mask=inside)
    if SIDES == 2:
        tl.store(target + n * S, second, mask=inside)


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


def _sizes(x: Tensor, wx: Tensor) -> dict[str, object]:
    _, heads, sides, p, stored = wx.shape
    kind = precision(x.dtype)
    return {"HEADS": heads, "P": p, "S": stored, "APART": sides * p * stored, "BP": power_of_two(p), "PRECISION": kind}


def add_to_rows(
    rows: Tensor, w_e: Tensor, w_r: Tensor, grad_wx: Tensor, grad_x: Tensor, distinct: bool, other: Tensor | None = None
) -> None:
    """What the landmarks give the gradient of x, onto grad_x.

    grad_wx: (B, H, 2, p, S); or that of e, (B, H, 1, p, S), and in `other` that of r. distinct: no sequence is so short
    that it repeats rows.
    """
    heads, n, rank = w_e.shape
    batch, size = rows.shape[0], landmark_tiles(grad_x.shape[1] // heads, rank)
    # A program per sequence and head walks over all landmarks, unless there are too few of those to fill a GPU.
    marks = n if batch * heads >= FULL else size.tokens
    if batch:
        _to_rows[(batch * heads, ceil_div(n, marks))](
            grad_wx, second_side(grad_wx, other), rows, w_e, w_r, grad_x, n, marks, **_sizes(grad_x, grad_wx),
            RANK=rank, BN=size.tokens, BS=size.rank, NS=size.rank_blocks, DISTINCT=distinct,
        )  # fmt: skip


def to_weights(
    x: Tensor,
    rows: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    grad_wx: Tensor,
    grad_trace: Tensor | None,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of w_e and w_r. grad_wx, other: as in `add_to_rows`."""
    heads, n, rank = w_e.shape
    batch, size = rows.shape[0], landmark_sum_tiles(x.dtype, x.shape[1] // heads, rank, n)
    tiles, lanes = ceil_div(n, size.tokens) * size.rank_blocks, heads * (3 - size.sides)
    # Enough programs, few enough partial sums to add cheaply.
    splits = min(batch, max(1, size.programs // (lanes * tiles)))
    parts = torch.empty((splits, heads, 2, n, stored_rank(rank)), dtype=torch.float32, device=x.device)
    if batch:
        _to_weights[(splits, lanes, tiles)](
            x, rows, grad_wx, second_side(grad_wx, other), parts, n, batch, ceil_div(batch, splits),
            **_sizes(x, grad_wx), BN=size.tokens, BS=size.rank, SIDES=size.sides,
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
    return finish_weights(parts, w_e, w_r, grad_trace)
