"""Bidirectional modes: forward and backward kernels.

    W_{e|X} = f(X)ᵀ W_e,   e_i = W_{e|X}ᵀ q_i / ‖q_i‖,   E = Σ_i e_i²      (reference: `reference.attention`; r alike)

Forward: q and k by one matrix product, `_landmark_weights_kernel`, then `_scores_kernel` writes scores and energies in
one pass over q and k; the normalised rows are never stored. Backward, with g_E the gradient of the energies:

    de ← de + 2 g_E ⊙ e,   dz = (W_{e|X} de − φ (e·de)) / ‖z‖,   dW_{e|X} = Σ_i z_i (de_i / ‖z_i‖)ᵀ
    dx = dz W_qk, plus dW_{e|X} W_e[j] at the row of landmark j;   dW_e[j] = Σ_b x_{row_j}ᵀ dW_{e|X}

Saved for backward: x, q and k. W_{e|X} is rebuilt from x: for short sequences it is as large as a quarter of x.

Layouts: qk (rows, 2·H·p); wx (B or 1, H, 2, p, S); scores (rows, H, 2, S) with S the stored rank. Column `rank` of the
e-scores, where S > rank, holds ones: the output projection uses it for the bias (`layer.output_projection`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .common import (
    Tiles,
    can_overwrite_saved,
    ceil_div,
    dot,
    forbid_double_backward,
    inverse_norms,
    matmul_to,
    multiprocessors,
    power_of_two,
    precision,
    scale_weights,
    segment_sum,
    stored_rank,
)


@triton.jit
def _landmark_weights_kernel(
    x, rows, w_e, w_r, wx, trace, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W_{e|X}, W_{r|X} of one sequence, head and block of directions; Tr(W_eᵀ W_r) from the first sequence."""
    # Neighbouring programs share the rows of a sequence, then the weights of a head: both are cached.
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
        xl = tl.load(x + row[None] * (HEADS * P) + p[:, None], mask=(row >= 0)[None] & (p[:, None] < P), other=0.0)
        place, inside = mark[:, None] * RANK + s[None], (mark < n)[:, None] & (s[None] < RANK)
        sum_e += dot(xl, tl.load(w_e + place, mask=inside, other=0.0).to(xl.dtype), PRECISION)
        sum_r += dot(xl, tl.load(w_r + place, mask=inside, other=0.0).to(xl.dtype), PRECISION)
    out = (sequence * HEADS + head) * (2 * P * S) + p[:, None] * S + s[None]
    fits = (p[:, None] < P) & (s[None] < S)
    tl.store(wx + out, sum_e.to(wx.dtype.element_ty), mask=fits)
    tl.store(wx + out + P * S, sum_r.to(wx.dtype.element_ty), mask=fits)
    if sequence == 0:
        total = tl.zeros((BN, BS), tl.float32)
        for first in range(0, n, BN):
            mark = first + j
            place, inside = mark[:, None] * RANK + s[None], (mark < n)[:, None] & (s[None] < RANK)
            e, r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
            total += e.to(tl.float32) * r.to(tl.float32)
        tl.store(trace + head * NS + block, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def load_weights(w, block, like, P: tl.constexpr, COLUMNS: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """A block of columns of a (P, COLUMNS) matrix, (BP, BS), in the dtype of `like`."""
    p, s = tl.arange(0, BP), block * BS + tl.arange(0, BS)
    inside = (p[:, None] < P) & (s[None] < COLUMNS)
    return tl.load(w + p[:, None] * COLUMNS + s[None], mask=inside, other=0.0).to(like.dtype.element_ty)


@triton.jit
def _scores_kernel(
    qk, wx_e, wx_r, scores, energy, chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and energies of one chunk, head and side (0: q → e, 1: k → r)."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    kind: tl.constexpr = scores.dtype.element_ty
    qk += (side * HEADS + head) * P
    wx = (wx_e if side == 0 else wx_r) + tl.load(chunk_sequence + chunk) * wx_stride + head * HEAD_STRIDE
    for block in tl.static_range(NS):
        s = block * BS + tl.arange(0, BS)
        w, factor = scale_weights(load_weights(wx, block, scores, P, COLUMNS, BP, BS))
        total = tl.zeros((BS,), tl.float32)
        for first in range(start, end, BT):
            row = first + t
            live = row < end
            z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
            inverse, _ = inverse_norms(z.to(tl.float32))
            if z.dtype == kind:
                e = dot(z, w, PRECISION) * (inverse * factor)[:, None]
            else:  # float32 sums: normalise before rounding
                e = dot((z * inverse[:, None]).to(kind), w, PRECISION) * factor
            total += tl.sum(e * e, 0)
            e = tl.where((s[None] == RANK) & (side == 0), 1.0, e)
            place = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
            tl.store(place, e.to(kind), mask=live[:, None] & (s[None] < S))
        tl.store(energy + (chunk.to(tl.int64) * (2 * HEADS) + lane) * S + s, total, mask=s < S)


@triton.jit
def load_energy_gradient(grad_energy, s, RANK: tl.constexpr):
    """2 g_E of a block of directions."""
    return 2.0 * tl.load(grad_energy + s, mask=s < RANK, other=0.0)


@triton.jit
def load_score_gradient(
    grad_scores, twice, e, row, live, s, HEADS: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """de = gradient of the scores + 2 g_E ⊙ e. Columns beyond the rank have no direction and no gradient."""
    de = tl.load(
        grad_scores + row[:, None] * (2 * HEADS * S) + s[None], mask=live[:, None] & (s[None] < RANK), other=0.0
    ).to(tl.float32)  # fmt: skip
    return de + twice[None] * e


@triton.jit
def _scores_backward_kernel(
    qk, wx_e, wx_r, grad_scores, grad_energy, grad_qk, grad_wx, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz and the chunk's partial sums of db and, if NS is 1, of dW; for larger ranks see the next kernel."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    kind: tl.constexpr = grad_scores.dtype.element_ty
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    wx = (wx_e if lane % 2 == 0 else wx_r) + sequence * wx_stride + lane // 2 * HEAD_STRIDE
    grad_scores += lane * S
    grad_energy += (sequence * (2 * HEADS) + lane) * S
    if NS == 1:  # outside of the loop: its loads would not be pipelined
        w_first, factor = scale_weights(load_weights(wx, 0, grad_scores, P, COLUMNS, BP, BS))
        twice = load_energy_gradient(grad_energy, tl.arange(0, BS), RANK)
    sum_w = tl.zeros((BP, BS), tl.float32)
    sum_b = tl.zeros((BP,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0)
        z32 = z.to(tl.float32)
        inverse, above = inverse_norms(z32)
        phi = (z32 * inverse[:, None]).to(kind)
        dz = tl.zeros((BT, BP), tl.float32)
        along = tl.zeros((BT,), tl.float32)
        for block in tl.static_range(NS):
            if NS == 1:
                w = w_first
            else:
                w, factor = scale_weights(load_weights(wx, block, grad_scores, P, COLUMNS, BP, BS))
                twice = load_energy_gradient(grad_energy, block * BS + tl.arange(0, BS), RANK)
            if z.dtype == kind:
                e = dot(z, w, PRECISION) * (inverse * factor)[:, None]
            else:
                e = dot(phi, w, PRECISION) * factor
            de = load_score_gradient(grad_scores, twice, e, row, live, block * BS + tl.arange(0, BS), HEADS, S, RANK)
            along += tl.sum(e * de, 1)
            if z.dtype == kind:
                du = (de * inverse[:, None]).to(kind)
                dz += dot(du, tl.trans(w), PRECISION) * factor
                if NS == 1:
                    sum_w += dot(tl.trans(z), du, PRECISION)
            else:
                dz += dot(de.to(kind), tl.trans(w), PRECISION) * (inverse * factor)[:, None]
                if NS == 1:
                    sum_w += dot(tl.trans(phi), de.to(kind), PRECISION)
        if z.dtype == kind:
            dz -= z32 * inverse[:, None] * tl.where(above, along * inverse, 0.0)[:, None]
        else:
            # Orthogonal to z beyond rounding: the gradient of a decay is a sum of small differences.
            unit = z32 * inverse[:, None]
            dz -= unit * tl.where(above, tl.sum(unit * dz, 1), 0.0)[:, None]
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + row[:, None] * (2 * HEADS * P) + column[None], dz.to(z.dtype), mask=inside)
    own = chunk.to(tl.int64) * (2 * HEADS) + lane
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if NS == 1:
        s = tl.arange(0, BS)
        tl.store(
            grad_wx + own * (P * S) + p[:, None] * S + s[None], sum_w.to(grad_wx.dtype.element_ty),
            mask=(p[:, None] < P) & (s[None] < S),
        )  # fmt: skip


@triton.jit
def _weights_backward_kernel(
    qk, wx_e, wx_r, grad_scores, grad_energy, grad_wx, chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's partial sum of dW for one block of directions, where one block does not cover the rank."""
    chunk, lane, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), block * BS + tl.arange(0, BS)
    kind: tl.constexpr = grad_scores.dtype.element_ty
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    wx = (wx_e if lane % 2 == 0 else wx_r) + sequence * wx_stride + lane // 2 * HEAD_STRIDE
    w, factor = scale_weights(load_weights(wx, block, grad_scores, P, COLUMNS, BP, BS))
    grad_scores += lane * S
    grad_energy += (sequence * (2 * HEADS) + lane) * S
    twice = load_energy_gradient(grad_energy, s, RANK)
    sum_w = tl.zeros((BP, BS), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0).to(tl.float32)
        inverse, _ = inverse_norms(z)
        phi = (z * inverse[:, None]).to(kind)
        e = dot(phi, w, PRECISION) * factor
        de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
        sum_w += dot(tl.trans(phi), de.to(kind), PRECISION)
    tl.store(
        grad_wx + (chunk.to(tl.int64) * (2 * HEADS) + lane) * (P * S) + p[:, None] * S + s[None],
        sum_w.to(grad_wx.dtype.element_ty), mask=(p[:, None] < P) & (s[None] < S),
    )  # fmt: skip


@triton.jit
def _add_equal_rows(own_e, own_r, w_e, w_r, rows, row, mark, leads, n, s, RANK: tl.constexpr):
    """Add to the weights of each leading landmark those of the equal rows behind it."""
    sum_e, sum_r = own_e.to(tl.float32), own_r.to(tl.float32)
    step = 0
    follows = leads.to(tl.int32)
    while tl.max(follows, 0) > 0:
        step += 1
        ahead = mark + step
        is_same = tl.load(rows + ahead, mask=(follows > 0) & (ahead < n), other=-2) == row
        follows = (is_same & (follows > 0)).to(tl.int32)
        place, inside = ahead[:, None] * RANK + s[None], (follows > 0)[:, None] & (s[None] < RANK)
        sum_e += tl.load(w_e + place, mask=inside, other=0.0).to(tl.float32)
        sum_r += tl.load(w_r + place, mask=inside, other=0.0).to(tl.float32)
    return sum_e.to(own_e.dtype), sum_r.to(own_r.dtype)


@triton.jit
def _landmark_rows_backward_kernel(
    grad_wx, rows, w_e, w_r, grad_x, n, per_program,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, DISTINCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x[row_j] += dW_{e|X} W_e[j] + dW_{r|X} W_r[j]. The first of equal rows adds for all of them."""
    program = tl.program_id(0)
    head, sequence = program % HEADS, (program // HEADS).to(tl.int64)
    p, j = tl.arange(0, BP), tl.arange(0, BN)
    kind = grad_x.dtype.element_ty
    rows += sequence * n
    grad_wx += (sequence * HEADS + head) * (2 * P * S)
    grad_x += head * P
    w_e += head * n * RANK
    w_r += head * n * RANK
    begin = tl.program_id(1) * per_program
    for first in range(begin, tl.minimum(begin + per_program, n), BN):
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
                own_e, own_r = _add_equal_rows(own_e, own_r, w_e, w_r, rows, row, mark, leads, n, s, RANK)
            source = grad_wx + p[None] * S + s[:, None]
            fits = (p[None] < P) & (s[:, None] < S)
            grad += dot(own_e.to(kind), tl.load(source, mask=fits, other=0.0).to(kind), PRECISION)
            grad += dot(own_r.to(kind), tl.load(source + P * S, mask=fits, other=0.0).to(kind), PRECISION)
        target = grad_x + row[:, None] * (HEADS * P) + p[None]
        inside = leads[:, None] & (p[None] < P)
        grad += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, grad.to(kind), mask=inside)


@triton.jit
def _landmark_weights_backward_kernel(
    x, rows, grad_wx, grad_w, n, batch, per_split,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW[j] = Σ_b x_{row_j}ᵀ dW_{·|X} as partial sums over groups of sequences."""
    split, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: offsets may pass 2^31
    head, side = lane // 2, lane % 2
    marks = tl.cdiv(n, BN)
    mark = (tl.program_id(2) % marks) * BN + tl.arange(0, BN)
    s = (tl.program_id(2) // marks) * BS + tl.arange(0, BS)
    p = tl.arange(0, BP)
    x += head * P
    total = tl.zeros((BN, BS), tl.float32)
    fits = (p[:, None] < P) & (s[None] < S)
    for sequence in range(split * per_split, tl.minimum((split + 1) * per_split, batch)):
        row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
        xl = tl.load(x + row[:, None] * (HEADS * P) + p[None], mask=(row >= 0)[:, None] & (p[None] < P), other=0.0)
        source = (sequence * (2 * HEADS) + lane) * (P * S) + p[:, None] * S + s[None]
        total += dot(xl, tl.load(grad_wx + source, mask=fits, other=0.0).to(xl.dtype), PRECISION)
    target = grad_w + (((split * HEADS + head) * 2 + side) * n + mark)[:, None] * S + s[None]
    tl.store(target, total, mask=(mark < n)[:, None] & (s[None] < S))


@triton.jit
def _finish_weights_kernel(
    parts, w_e, w_r, grad_trace, grad_e, grad_r, rows, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums (splits, H, 2, rows, S) and the gradient of the trace: dW_e += g W_r, dW_r += g W_e."""
    head = tl.program_id(0)
    row, s = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(2) * BS + tl.arange(0, BS)
    inside = (row < rows)[:, None] & (s < RANK)[None]
    sum_e = tl.zeros((BN, BS), tl.float32)
    sum_r = tl.zeros((BN, BS), tl.float32)
    source = parts + (head.to(tl.int64) * 2 * rows + row)[:, None] * S + s[None]
    for _ in range(splits):
        sum_e += tl.load(source, mask=inside, other=0.0)
        sum_r += tl.load(source + rows * S, mask=inside, other=0.0)
        source += HEADS * 2 * rows * S
    place = (head * rows + row)[:, None] * RANK + s[None]
    g = tl.load(grad_trace + head)
    sum_e += g * tl.load(w_r + place, mask=inside, other=0.0).to(tl.float32)
    sum_r += g * tl.load(w_e + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_e + place, sum_e.to(grad_e.dtype.element_ty), mask=inside)
    tl.store(grad_r + place, sum_r.to(grad_r.dtype.element_ty), mask=inside)


def finish_weights(parts: Tensor, w_e: Tensor, w_r: Tensor, grad_trace: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of w_e and w_r (H, rows, s) from partial sums (splits, H, 2, rows, S) and the trace's."""
    heads, rows, rank = w_e.shape
    grad_e, grad_r = torch.empty_like(w_e), torch.empty_like(w_r)
    bn, bs = 8, min(power_of_two(stored_rank(rank)), 64)  # small tiles: the launch has few programs
    _finish_weights_kernel[(heads, ceil_div(rows, bn), ceil_div(rank, bs))](
        parts, w_e, w_r, grad_trace, grad_e, grad_r, rows, parts.shape[0],
        HEADS=heads, RANK=rank, S=stored_rank(rank), BN=bn, BS=bs,
    )  # fmt: skip
    return grad_e, grad_r


def score_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """Tiles of the score kernels: operands stay in registers and shared memory."""
    width, full = power_of_two(head_dim), power_of_two(stored_rank(rank))
    block = min(full, 64 if width >= 256 or dtype == torch.float32 else 128)
    tokens = 128 if width * max(block, width) <= 64 * 64 else (64 if width <= 128 else 32)
    if dtype == torch.float32:
        tokens = min(tokens, 64 if width <= 64 else 32)
    return Tiles(tokens, width, block, ceil_div(stored_rank(rank), block), 4 if tokens * width <= 128 * 64 else 8)


def landmark_tiles(head_dim: int, rank: int) -> Tiles:
    """Tiles of the landmark kernels; `tokens` counts landmarks. Few directions of a block are empty."""
    width, stored = power_of_two(head_dim), stored_rank(rank)
    fits = ceil_div(stored, 64) * 64 == ceil_div(stored, 32) * 32 and width <= 128
    block = min(power_of_two(stored), 64 if fits else 32)
    return Tiles(64 if width <= 64 else 32, width, block, ceil_div(stored, block), 4)


def large_landmark_tiles(dtype: torch.dtype, head_dim: int, rank: int, landmarks: int) -> Tiles:
    """As `landmark_tiles`, with more directions and landmarks per block where 16-bit operands fit."""
    tiles = landmark_tiles(head_dim, rank)
    if dtype == torch.float32 or tiles.width > 64:
        return tiles
    block = min(power_of_two(stored_rank(rank)), 128)
    blocks = ceil_div(stored_rank(rank), block)
    return Tiles(128 if landmarks > 64 and block <= 64 else 64, tiles.width, block, blocks, 4)


def landmark_weights(x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return wx (B, H, 2, p, S) in `dtype` and Tr(W_eᵀ W_r) (H,). x: (rows, H·p), rows: (B, n), −1 for none."""
    heads, n, rank = w_e.shape
    p, stored = x.shape[1] // heads, stored_rank(rank)
    tiles = landmark_tiles(p, rank)
    if x.dtype != torch.float32 and tiles.width <= 64 and stored > tiles.rank:  # one block: rows are read once
        block = min(power_of_two(stored), 128)
        tiles = Tiles(32, tiles.width, block, ceil_div(stored, block), 4)
    wx = torch.empty((rows.shape[0], heads, 2, p, stored), dtype=dtype, device=x.device)
    trace = torch.empty((heads, tiles.rank_blocks), dtype=torch.float32, device=x.device)
    _landmark_weights_kernel[(rows.shape[0] * heads * tiles.rank_blocks,)](
        x, rows, w_e, w_r, wx, trace, n, HEADS=heads, P=p, RANK=rank, S=stored,
        BN=tiles.tokens, BP=tiles.width, BS=tiles.rank, NS=tiles.rank_blocks, PRECISION=precision(x.dtype),
    )  # fmt: skip
    return wx, trace[:, 0] if tiles.rank_blocks == 1 else trace.sum(1)


def add_landmark_gradients(
    rows: Tensor, w_e: Tensor, w_r: Tensor, grad_wx: Tensor, grad_x: Tensor, is_distinct: bool
) -> None:
    """Add the landmarks' gradient to grad_x (rows, d) in place. is_distinct: no sequence repeats a row."""
    heads, n, rank = w_e.shape
    batch, p = rows.shape[0], grad_x.shape[1] // heads
    tiles = landmark_tiles(p, rank)
    # One program per sequence and head handles all landmarks, unless that leaves multiprocessors idle.
    per_program = n if batch * heads >= 2 * multiprocessors(grad_x.device) else tiles.tokens
    _landmark_rows_backward_kernel[(batch * heads, ceil_div(n, per_program))](
        grad_wx, rows, w_e, w_r, grad_x, n, per_program, HEADS=heads, P=p, RANK=rank, S=stored_rank(rank),
        BN=tiles.tokens, BP=tiles.width, BS=tiles.rank, NS=tiles.rank_blocks, DISTINCT=is_distinct,
        PRECISION=precision(grad_x.dtype),
    )  # fmt: skip


def landmark_weight_gradients(x: Tensor, rows: Tensor, w_e: Tensor, grad_wx: Tensor) -> Tensor:
    """Return partial sums of the gradients of W_e and W_r from that of wx, (splits, H, 2, n, S) float32."""
    heads, n, rank = w_e.shape
    batch, p = rows.shape[0], x.shape[1] // heads
    tiles = large_landmark_tiles(x.dtype, p, rank, n)
    blocks = ceil_div(n, tiles.tokens) * tiles.rank_blocks
    # Enough programs to fill the GPU, few enough partial sums to add them cheaply.
    splits = min(batch, max(1, 2 * multiprocessors(x.device) // (2 * heads * blocks)))
    parts = torch.empty((splits, heads, 2, n, stored_rank(rank)), dtype=torch.float32, device=x.device)
    _landmark_weights_backward_kernel[(splits, 2 * heads, blocks)](
        x, rows, grad_wx, parts, n, batch, ceil_div(batch, splits), HEADS=heads, P=p, S=stored_rank(rank),
        BN=tiles.tokens, BP=tiles.width, BS=tiles.rank, PRECISION=precision(x.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return parts


def score_arguments(
    z: Tensor, wx: Tensor | tuple[Tensor, Tensor], dtype: torch.dtype, heads: int, rank: int
) -> tuple[tuple[Tensor, Tensor, int], dict[str, Any], Tiles]:
    """Return the weights of both sides with their stride over sequences, the constants and the tiles of the kernels.

    wx: (B, H, 2, p, S) if data-dependent, else W_e and W_r, (H, p, s) each.
    """
    p, stored = z.shape[1] // (2 * heads), stored_rank(rank)
    tiles = score_tiles(z.dtype, p, rank)
    if isinstance(wx, tuple):
        sides, columns, head_stride = (*wx, 0), rank, p * rank
    else:
        sides, columns, head_stride = (wx, wx[:, :, 1:], heads * 2 * p * stored), stored, 2 * p * stored
    constants = {
        "HEADS": heads, "P": p, "S": stored, "RANK": rank, "COLUMNS": columns, "HEAD_STRIDE": head_stride,
        "BP": tiles.width, "BS": tiles.rank, "PRECISION": precision(dtype), "num_warps": tiles.warps,
    }  # fmt: skip
    return sides, constants, tiles


def score_forward(
    z: Tensor,
    wx: Tensor | tuple[Tensor, Tensor],
    tables: tuple[Tensor, ...],
    dtype: torch.dtype,
    heads: int,
    rank: int,
    covers_rows: bool,
) -> tuple[Tensor, Tensor]:
    """Return the scores (rows, H, 2, S) in `dtype` and the chunks' energies (chunks, H, 2, S).

    z: q and k, or their sums in float32, (rows, 2·H·p). covers_rows: the sequences cover every row.
    """
    (wx_e, wx_r, wx_stride), constants, tiles = score_arguments(z, wx, dtype, heads, rank)
    shape, chunks = (heads, 2, constants["S"]), tables[4].shape[0]
    scores = (torch.empty if covers_rows else torch.zeros)((z.shape[0], *shape), dtype=dtype, device=z.device)
    energy = torch.empty((chunks, *shape), dtype=torch.float32, device=z.device)
    _scores_kernel[(chunks, 2 * heads)](
        z, wx_e, wx_r, scores, energy, *tables[3:], wx_stride, BT=tiles.tokens, NS=tiles.rank_blocks, **constants
    )
    return scores, energy


def score_backward(
    z: Tensor,
    wx: Tensor | tuple[Tensor, Tensor],
    grad_scores: Tensor,
    grad_energy: Tensor,
    tables: tuple[Tensor, ...],
    wx_grad_dtype: torch.dtype,
    rank: int,
    covers_rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of z and the chunks' partial sums of those of wx and of the projection's bias."""
    heads, chunks = grad_scores.shape[1], tables[4].shape[0]
    (wx_e, wx_r, wx_stride), constants, tiles = score_arguments(z, wx, grad_scores.dtype, heads, rank)
    p, is_one_block = constants["P"], tiles.rank_blocks == 1
    # Larger ranks read z twice.
    if is_one_block and covers_rows and can_overwrite_saved():
        grad_z = z
    else:
        grad_z = (torch.empty_like if covers_rows else torch.zeros_like)(z)
    grad_wx = torch.empty((chunks, heads, 2, p, constants["S"]), dtype=wx_grad_dtype, device=z.device)
    grad_bias = torch.empty((chunks, 2 * heads * p), dtype=torch.float32, device=z.device)
    constants["BT"] = min(tiles.tokens, 64)
    _scores_backward_kernel[(chunks, 2 * heads)](
        z, wx_e, wx_r, grad_scores, grad_energy, grad_z, grad_wx, grad_bias, *tables[3:], wx_stride,
        NS=tiles.rank_blocks, **constants,
    )  # fmt: skip
    if not is_one_block:
        _weights_backward_kernel[(chunks, 2 * heads, tiles.rank_blocks)](
            z, wx_e, wx_r, grad_scores, grad_energy, grad_wx, *tables[3:], wx_stride, **constants
        )
    return grad_z, grad_wx, grad_bias


def project(
    x: Tensor | None, weight: Tensor | None, bias: Tensor | None, qk: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return q and k (rows, 2d) in `dtype`, unless they are given in float32 sums, and x and the weight in `dtype`."""
    x = None if x is None else x.to(dtype)
    if qk is not None:
        return qk, x, None
    assert x is not None
    assert weight is not None
    weight = weight.to(dtype)
    return F.linear(x, weight, None if bias is None else bias.to(dtype)), x, weight


def input_gradient(grad_z: Tensor, weight: Tensor, spent: Tensor) -> Tensor:
    """Return grad_z @ weight, in the memory of `spent` (a gradient that is read already) if it has the size."""
    shape = (grad_z.shape[0], weight.shape[1])
    if can_overwrite_saved() and spent.is_contiguous() and spent.numel() == shape[0] * shape[1]:
        return torch.mm(grad_z, weight, out=spent.view(shape))
    return grad_z @ weight


def projection_gradients(
    dtypes: list[torch.dtype],
    grad_x: Tensor | None,
    grad_z: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    grad_bias: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and qk in `dtypes`. grad_bias: partial sums (chunks, 2d)."""
    grad_x = None if grad_x is None else grad_x.to(dtypes[0])
    if weight is None:
        return grad_x, None, None, grad_z.to(dtypes[3])
    assert x is not None
    of_bias = None if dtypes[2] is None else grad_bias.sum(0).to(dtypes[2])
    return grad_x, matmul_to(grad_z.mT, x, dtypes[1]), of_bias, None


class BidirectionalScores(torch.autograd.Function):
    """Scores (rows, H, 2, S), energies (B, H, 2, S), traces (H,) and, if requested, wx of the bidirectional modes.

    Args:
        x: rows of all sequences, (rows, d); None if `qk` and `source` are given.
        weight: of the projection, (2d, d); None if `qk` is given.
        bias: of the projection, (2d,).
        qk: q and k, (rows, 2d), if they are computed elsewhere.
        source: rows that contain the landmarks; None for x.
        w_e: (H, n, s), or (H, p, s) if data-independent.
        w_r: like w_e.
        rows: the row of each landmark in the source, (B, n); None if data-independent.
        dtype: of the scores.
        returns_weights: return wx, in float32.
        is_distinct: no sequence repeats a landmark row.
        covers_rows: the sequences cover every row.
        is_single_chunk: every sequence has one chunk.
        tables: the tensors of `Sequences`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        qk: Tensor | None,
        source: Tensor | None,
        w_e: Tensor,
        w_r: Tensor,
        rows: Tensor | None,
        dtype: torch.dtype,
        returns_weights: bool,
        is_distinct: bool,
        covers_rows: bool,
        is_single_chunk: bool,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, qk, source)]
        z, x, weight = project(x, weight, bias, qk, dtype)
        wx: Any
        if rows is None:
            wx, trace = (w_e, w_r), (w_e.float() * w_r.float()).sum((1, 2))
        else:
            source = None if source is None else source.to(dtype)
            origin = x if source is None else source
            wx, trace = landmark_weights(origin, rows, w_e, w_r, torch.float32 if returns_weights else dtype)  # type: ignore[arg-type]
        scores, energy = score_forward(z, wx, tables, dtype, w_e.shape[0], w_e.shape[2], covers_rows)
        ctx.save_for_backward(x, weight, z, source, w_e, w_r, rows, *tables)
        ctx.settings = (torch.float32 if returns_weights else dtype, is_distinct, covers_rows, is_single_chunk)
        return scores, segment_sum(energy, tables[2], is_single_chunk), trace, wx if returns_weights else None

    @staticmethod
    def backward(
        ctx: Any, grad_scores: Tensor, grad_energy: Tensor, grad_trace: Tensor, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        x, weight, z, source, w_e, w_r, rows, *tables = ctx.saved_tensors
        dtype, is_distinct, covers_rows, is_single_chunk = ctx.settings
        rank, origin = w_e.shape[2], x if source is None else source
        wx = (w_e, w_r) if rows is None else landmark_weights(origin, rows, w_e, w_r, dtype)[0]
        is_own = rows is not None and is_single_chunk  # a chunk's sum is the gradient of its sequence's weights
        grad_z, grad_wx, grad_bias = score_backward(
            z, wx, grad_scores.contiguous(), grad_energy.contiguous(), tuple(tables),
            dtype if is_own else torch.float32, rank, covers_rows,
        )  # fmt: skip
        grad_x = None if weight is None else input_gradient(grad_z, weight, grad_scores)
        grad_source = None
        if rows is not None:
            grad_wx = segment_sum(grad_wx, tables[2], is_single_chunk, dtype)
            if grad_weights is not None:
                grad_wx = grad_wx + grad_weights
            if source is not None:
                grad_source = torch.zeros_like(source)
            elif grad_x is None:
                grad_x = torch.zeros_like(x)
            target: Any = grad_x if grad_source is None else grad_source
            add_landmark_gradients(rows, w_e, w_r, grad_wx, target, is_distinct)
            grad_wx = landmark_weight_gradients(origin, rows, w_e, grad_wx)
        grad_e, grad_r = finish_weights(grad_wx, w_e, w_r, grad_trace.contiguous())
        of_projection = projection_gradients(ctx.dtypes, grad_x, grad_z, x, weight, grad_bias)
        grad_source = None if grad_source is None else grad_source.to(ctx.dtypes[4])
        return *of_projection, grad_source, grad_e, grad_r, *(None,) * (6 + len(tables))
