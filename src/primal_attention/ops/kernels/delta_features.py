"""What a delta layer makes of its projections, in one pass: a short causal convolution, SiLU, and the cosine map.

    c_i = b + Σ_j w_j ⊙ z_{i−j},   a = c ⊙ sigmoid(c),   φ = a / ‖a‖ where a head is normalised, else a

Back, everything is formed again from z: dz_i = Σ_j w_j ⊙ dc_{i+j} and dw_j = Σ_i z_i ⊙ dc_{i+j}, so a block of rows
needs dc of the K − 1 rows behind it too. Sums over rows are partial sums, added in a fixed order.

z is (B, N, columns); before the first token there was nothing. The lanes of one kind, each `WIDTH` columns, begin at
column `FIRST`; their results are (B, N, lanes, WIDTH).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two

TINY = 1e-20  # only a vector of zeros notices
ROWS = 128  # of a program on the way back


@triton.jit
def _convolved(z, weight, bias, row, first, column, inside, COLUMNS: tl.constexpr, K: tl.constexpr):
    """c of rows counted from `first`, where z points, in some columns; float32, zero where columns are spare."""
    total = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None]
    for j in tl.static_range(K):
        at = (row - j)[:, None]
        there = (at >= -first) & inside[None]
        past = tl.load(z + at * COLUMNS + column[None], mask=there, other=0.0).to(tl.float32)
        total += past * tl.load(weight + j * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None]
    return total


@triton.jit
def _features(
    z, weight, bias, out, length,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(length, BT)
    first, lane = tl.program_id(0) % blocks * BT, tl.program_id(1)
    token = (tl.program_id(0) // blocks).to(tl.int64) * length + first
    t, w = tl.arange(0, BT), tl.arange(0, BW)
    row = tl.minimum(t, length - 1 - first)  # those beyond the last are formed and dropped
    column = FIRST + lane * WIDTH + w
    c = _convolved(z + token * COLUMNS, weight, bias, row, first, column, w < WIDTH, COLUMNS, K)
    a = c * tl.sigmoid(c)
    if NORM:
        a *= tl.rsqrt(tl.sum(a * a, 1) + WIDTH * EPS)[:, None]
    place = out + (token * LANES + lane) * WIDTH + t[:, None] * (LANES * WIDTH) + w[None]
    tl.store(place, a.to(out.dtype.element_ty), mask=(first + t < length)[:, None] & (w[None] < WIDTH))


@triton.jit
def _features_backward(
    z, weight, bias, grad_out, grad_z, parts, length,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, RUN: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Rows of z and what they did through each tap of the convolution: dc of the row it reached from here."""
    runs = tl.cdiv(length, RUN)
    begin, lane = tl.program_id(0) % runs * RUN, tl.program_id(1)
    start = (tl.program_id(0) // runs).to(tl.int64) * length
    t, w, index = tl.arange(0, BT), tl.arange(0, BW), tl.arange(0, BK)[:, None]
    column, inside = FIRST + lane * WIDTH + w, w < WIDTH
    sums = tl.zeros((BK, BW), tl.float32)  # of each tap, then of the bias
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        token = start + first
        place, mine = t[:, None] * COLUMNS + column[None], (first + t < length)[:, None] & inside[None]
        value = tl.load(z + token * COLUMNS + place, mask=mine, other=0.0).to(tl.float32)
        total = tl.zeros((BT, BW), tl.float32)
        for j in tl.static_range(K):
            row = tl.minimum(t + j, length - 1 - first)
            c = _convolved(z + token * COLUMNS, weight, bias, row, first, column, inside, COLUMNS, K)
            reached = (first + t + j < length)[:, None] & inside[None]
            from_there = grad_out + (token * LANES + lane) * WIDTH + row[:, None] * (LANES * WIDTH) + w[None]
            grad = tl.load(from_there, mask=reached, other=0.0).to(tl.float32)
            gate = tl.sigmoid(c)
            if NORM:
                a = c * gate
                inverse = tl.rsqrt(tl.sum(a * a, 1) + WIDTH * EPS)[:, None]
                a *= inverse
                grad = (grad - a * tl.sum(a * grad, 1)[:, None]) * inverse
            grad *= gate * (1.0 + c * (1.0 - gate))  # zero where nothing was reached, since it was
            total += grad * tl.load(weight + j * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None]
            sums += tl.where(index == j, tl.sum(grad * value, 0)[None], 0.0)
            if j == 0:
                sums += tl.where(index == K, tl.sum(grad, 0)[None], 0.0)
        tl.store(grad_z + token * COLUMNS + place, total.to(grad_z.dtype.element_ty), mask=mine)
    part = tl.program_id(0).to(tl.int64) * ((K + 1) * COLUMNS) + index * COLUMNS + column[None]
    tl.store(parts + part, sums, mask=(index <= K) & inside[None])


def _kinds(sides: int, heads: int, p: int, rank: int, columns: int, kernel: int) -> list[dict[str, Any]]:
    """The two kinds of lanes: q and k, brought to length one, and h as it is."""
    common = {"COLUMNS": columns, "LANES": sides * heads, "K": kernel, "EPS": TINY, "num_warps": 4}
    kinds = []
    for first, width, norm in ((0, p, True), (sides * heads * p, rank, False)):
        block = power_of_two(width)
        kinds.append({**common, "FIRST": first, "WIDTH": width, "BW": block, "BT": 1024 // block, "NORM": norm})
    return kinds


def features_forward(z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """φ (B, N, 2, H, p) and h (B, N, 2, H, s) of z (B, N, 2H(p + s)), weight (K, ·) and bias."""
    batch, length, columns = z.shape
    p = columns // (2 * heads) - rank
    phi, h = (z.new_empty(batch, length, 2, heads, width) for width in (p, rank))
    if batch * length:
        for out, kind in zip((phi, h), _kinds(2, heads, p, rank, columns, weight.shape[0]), strict=True):
            _features[(batch * ceil_div(length, kind["BT"]), 2 * heads)](z, weight, bias, out, length, **kind)
    return phi, h


def features_backward(
    z: Tensor, weight: Tensor, bias: Tensor, grad_phi: Tensor, grad_h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, weight and bias."""
    batch, length, columns = z.shape
    heads, p = grad_phi.shape[3:]
    kernel, grad_z, runs = weight.shape[0], torch.empty_like(z), ceil_div(length, ROWS)
    parts = torch.empty((batch * runs, kernel + 1, columns), dtype=torch.float32, device=z.device)
    if parts.shape[0]:
        kinds = _kinds(2, heads, p, grad_h.shape[-1], columns, kernel)
        for grad, kind in zip((grad_phi, grad_h), kinds, strict=True):
            _features_backward[(batch * runs, 2 * heads)](
                z, weight, bias, grad, grad_z, parts, length, **kind, BK=power_of_two(kernel + 1, 2), RUN=ROWS
            )
    return grad_z, parts[:, :kernel].sum(0).to(weight.dtype), parts[:, kernel].sum(0).to(bias.dtype)
