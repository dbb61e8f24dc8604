"""Bidirectional modes: forward and backward kernels.

    W_{e|X} = f(X)ᵀ W_e,   e_i = W_{e|X}ᵀ q_i / ‖q_i‖,   E = Σ_i e_i²      (reference: `reference.attention`; r alike)

Forward: q and k by one matrix product, `_landmark_weights_kernel`, then `_scores_kernel` writes scores and energies in
one pass over q and k; the normalised rows are never stored. Backward, with g_E the gradient of the energies:

    de ← de + 2 g_E ⊙ e,   dz = (W_{e|X} de − φ (e·de)) / ‖z‖,   dW_{e|X} = Σ_i z_i (de_i / ‖z_i‖)ᵀ
    dx = dz W_qk, plus dW_{e|X} W_e[j] at the row of landmark j;   dW_e[j] = Σ_b x_{row_j}ᵀ dW_{e|X}

Saved for backward: x, q and k. W_{e|X} is rebuilt from x: for short sequences it is as large as a quarter of x.

Layouts: qk (rows, 2·H·p); wx (B or 1, H, 2, p, S); scores (rows, H, 2, S) with S the stored rank. Column `rank` of the
e-scores, where S > rank, holds ones: the output projection uses it for the bias (`output.py`).
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
    cached,
    can_overwrite_saved,
    ceil_div,
    dot,
    forbid_double_backward,
    inverse_norms,
    is_shared_memory_small,
    jit_kernel,
    matmul_to,
    multiprocessors,
    power_of_two,
    precision,
    scale_weights,
    segment_sum,
    stored_rank,
)


@jit_kernel
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


@jit_kernel
def _scores_kernel(
    qk, wx_e, wx_r, scores, energy, chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr, SIDE_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and energies of one chunk, head and side (0: q → e, 1: k → r)."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    kind: tl.constexpr = scores.dtype.element_ty
    qk += (side * HEADS + head) * P
    wx = (wx_e if side == 0 else wx_r) + side * SIDE_STRIDE
    wx += tl.load(chunk_sequence + chunk) * wx_stride + head * HEAD_STRIDE
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


@jit_kernel
def _scores_backward_kernel(
    qk, wx_e, wx_r, grad_scores, grad_energy, grad_qk, grad_wx, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr, SIDE_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz and the chunk's partial sums of db and, if NS is 1, of dW; for larger ranks see the next kernel."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    kind: tl.constexpr = grad_scores.dtype.element_ty
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    wx = (wx_e if lane % 2 == 0 else wx_r) + sequence * wx_stride + lane // 2 * HEAD_STRIDE + lane % 2 * SIDE_STRIDE
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
        unit = z32 * inverse[:, None]
        if NS == 1 and z.dtype == kind:
            # z is a factor as it was loaded: φ is neither rounded nor stored.
            scale = inverse * factor
            e = dot(z, w_first, PRECISION) * scale[:, None]
            de = load_score_gradient(grad_scores, twice, e, row, live, tl.arange(0, BS), HEADS, S, RANK)
            du = (de * scale[:, None]).to(kind)
            along = tl.where(above, tl.sum(e * de, 1) * inverse, 0.0)
            dz = dot(du, tl.trans(w_first), PRECISION) - unit * along[:, None]
            sum_w += dot(tl.trans(z), du, PRECISION)
        else:
            phi = unit.to(kind)
            dz = tl.zeros((BT, BP), tl.float32)
            for block in tl.static_range(NS):
                s = block * BS + tl.arange(0, BS)
                if NS == 1:
                    w = w_first
                else:
                    w, factor = scale_weights(load_weights(wx, block, grad_scores, P, COLUMNS, BP, BS))
                    twice = load_energy_gradient(grad_energy, s, RANK)
                e = dot(phi, w, PRECISION) * factor
                de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
                dz += dot(de.to(kind), tl.trans(w), PRECISION) * (inverse * factor)[:, None]
                if NS == 1:
                    sum_w += dot(tl.trans(phi), (de * factor).to(kind), PRECISION)
            # Orthogonal to z beyond rounding: the gradient of a decay is a sum of small differences.
            dz -= unit * tl.where(above, tl.sum(unit * dz, 1), 0.0)[:, None]
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + row[:, None] * (2 * HEADS * P) + column[None], dz.to(z.dtype), mask=inside)
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if NS == 1:
        s = tl.arange(0, BS)
        tl.store(
            grad_wx + index * (P * S) + p[:, None] * S + s[None], (sum_w / factor).to(grad_wx.dtype.element_ty),
            mask=(p[:, None] < P) & (s[None] < S),
        )  # fmt: skip


@jit_kernel
def _weights_backward_kernel(
    qk, wx_e, wx_r, grad_scores, grad_energy, grad_wx, chunk_sequence, chunk_start, chunk_end, wx_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, HEAD_STRIDE: tl.constexpr, SIDE_STRIDE: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's partial sum of dW for one block of directions, where one block does not cover the rank."""
    chunk, lane, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), block * BS + tl.arange(0, BS)
    kind: tl.constexpr = grad_scores.dtype.element_ty
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    wx = (wx_e if lane % 2 == 0 else wx_r) + sequence * wx_stride + lane // 2 * HEAD_STRIDE + lane % 2 * SIDE_STRIDE
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
    """Add to the weights of each leading landmark those of the equal rows after it."""
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
def _add_landmark_gradients(
    program, grad_wx, rows, w_e, w_r, grad_x, n, per_program, min_length,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x[row_j] += dW_{e|X} W_e[j] + dW_{r|X} W_r[j]. The first of equal rows adds for all of them."""
    parts = tl.cdiv(n, per_program)
    begin, head = program % parts * per_program, program // parts % HEADS
    sequence = (program // (parts * HEADS)).to(tl.int64)
    p, j = tl.arange(0, BP), tl.arange(0, BN)
    kind = grad_x.dtype.element_ty
    rows += sequence * n
    grad_wx += (sequence * HEADS + head) * (2 * P * S)
    grad_x += head * P
    w_e += head * n * RANK
    w_r += head * n * RANK
    for first in range(begin, tl.minimum(begin + per_program, n), BN):
        mark = first + j
        row = tl.load(rows + mark, mask=mark < n, other=-1)
        leads = row >= 0
        if min_length < n:  # rows repeat
            before = tl.load(rows + mark - 1, mask=(mark < n) & (mark > 0), other=-1)
            leads = leads & (row != before)
        grad = tl.zeros((BN, BP), tl.float32)
        for block in range(NS):
            s = block * BS + tl.arange(0, BS)
            place, inside = mark[:, None] * RANK + s[None], leads[:, None] & (s[None] < RANK)
            own_e, own_r = tl.load(w_e + place, mask=inside, other=0.0), tl.load(w_r + place, mask=inside, other=0.0)
            if min_length < n:
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
def _sum_weight_gradients(
    program, x, rows, grad_wx, grad_w, n, batch, per_split,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW[j] = Σ_b x_{row_j}ᵀ dW_{·|X} as partial sums over groups of sequences."""
    marks = tl.cdiv(n, BN)
    mark, s = program % marks * BN + tl.arange(0, BN), program // marks % NS * BS + tl.arange(0, BS)
    lane, split = program // (marks * NS) % (2 * HEADS), (program // (marks * NS * 2 * HEADS)).to(tl.int64)
    p = tl.arange(0, BP)
    x += lane // 2 * P
    total = tl.zeros((BN, BS), tl.float32)
    fits = (p[:, None] < P) & (s[None] < S)
    for sequence in range(split * per_split, tl.minimum((split + 1) * per_split, batch)):
        row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
        xl = tl.load(x + row[:, None] * (HEADS * P) + p[None], mask=(row >= 0)[:, None] & (p[None] < P), other=0.0)
        source = (sequence * (2 * HEADS) + lane) * (P * S) + p[:, None] * S + s[None]
        total += dot(xl, tl.load(grad_wx + source, mask=fits, other=0.0).to(xl.dtype), PRECISION)
    target = grad_w + ((split * (2 * HEADS) + lane) * n + mark)[:, None] * S + s[None]
    tl.store(target, total, mask=(mark < n)[:, None] & (s[None] < S))


@jit_kernel
def _landmarks_backward_kernel(
    x, rows, w_e, w_r, grad_wx, grad_x, grad_w, n, batch, per_program, per_split, min_length, row_programs,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BP: tl.constexpr,
    BN_ROWS: tl.constexpr, BS_ROWS: tl.constexpr, NS_ROWS: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first programs add to the gradient of the landmark rows, the others sum those of W_e and W_r."""
    program = tl.program_id(0)
    if program < row_programs:
        _add_landmark_gradients(
            program, grad_wx, rows, w_e, w_r, grad_x, n, per_program, min_length,
            HEADS, P, RANK, S, BN_ROWS, BP, BS_ROWS, NS_ROWS, PRECISION,
        )  # fmt: skip
    else:
        _sum_weight_gradients(
            program - row_programs, x, rows, grad_wx, grad_w, n, batch, per_split,
            HEADS, P, S, BN, BP, BS, NS, PRECISION,
        )  # fmt: skip


@jit_kernel
def _finish_kernel(
    parts, w_e, w_r, grad_trace, grad_e, grad_r, bias_parts, grad_bias, rows, splits, chunks, columns,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add partial sums: of dW (splits, H, 2, rows, S), with the trace's dW_e += g W_r, dW_r += g W_e, and of db."""
    program, blocks, row_blocks = tl.program_id(0), tl.cdiv(RANK, BS), tl.cdiv(rows, BN)
    if program < HEADS * row_blocks * blocks:
        head = program // (row_blocks * blocks)
        row = program // blocks % row_blocks * BN + tl.arange(0, BN)
        s = program % blocks * BS + tl.arange(0, BS)
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
    else:
        column = (program - HEADS * row_blocks * blocks) * BC + tl.arange(0, BC)
        total = tl.zeros((64, BC), tl.float32)
        for first in range(0, chunks, 64):
            chunk = (first + tl.arange(0, 64)).to(tl.int64)
            exists = (chunk < chunks)[:, None] & (column < columns)[None]
            total += tl.load(bias_parts + chunk[:, None] * columns + column[None], mask=exists, other=0.0)
        tl.store(grad_bias + column, tl.sum(total, 0).to(grad_bias.dtype.element_ty), mask=column < columns)


def finish_gradients(
    dtypes: list[torch.dtype],
    grad_x: Tensor | None,
    grad_z: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias_parts: Tensor,
    weight_parts: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    grad_trace: Tensor,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor]]:
    """Return the gradients of x, weight, bias and qk in `dtypes`, and those of w_e and w_r.

    bias_parts: partial sums (chunks, 2d). weight_parts: partial sums (splits, H, 2, rows, S).
    """
    heads, rows, rank = w_e.shape
    grad_e, grad_r = torch.empty_like(w_e), torch.empty_like(w_r)
    has_bias = weight is not None and dtypes[2] is not None
    chunks, columns = bias_parts.shape
    grad_bias = torch.empty(columns, dtype=dtypes[2], device=w_e.device) if has_bias else None
    bn, bs, bc = 8, min(power_of_two(stored_rank(rank)), 64), 64  # small tiles: the launch has few programs
    programs = heads * ceil_div(rows, bn) * ceil_div(rank, bs) + (ceil_div(columns, bc) if has_bias else 0)
    _finish_kernel[(programs,)](
        weight_parts, w_e, w_r, grad_trace.contiguous(), grad_e, grad_r, bias_parts,
        bias_parts if grad_bias is None else grad_bias, rows, weight_parts.shape[0], chunks, columns,
        HEADS=heads, RANK=rank, S=stored_rank(rank), BN=bn, BS=bs, BC=bc,
    )  # fmt: skip
    grad_x = None if grad_x is None else grad_x.to(dtypes[0])
    if weight is None:
        return (grad_x, None, None, grad_z.to(dtypes[3])), (grad_e, grad_r)
    assert x is not None
    return (grad_x, matmul_to(grad_z.mT, x, dtypes[1]), grad_bias, None), (grad_e, grad_r)


@cached
def score_tiles(dtype: torch.dtype, head_dim: int, rank: int, is_small: bool) -> Tiles:
    """Tiles of the score kernels: operands stay in registers and shared memory, which may be small."""
    width, full = power_of_two(head_dim), power_of_two(stored_rank(rank))
    block = min(full, 64 if width >= 256 or dtype == torch.float32 else 128)
    block = min(block, 32) if is_small and width >= 256 and dtype == torch.float32 else block
    tokens = 128 if width * max(block, width) <= 64 * 64 else (64 if width <= 128 else 32)
    if dtype == torch.float32:
        tokens = min(tokens, 64 if width <= 64 else 32)
    blocks = ceil_div(stored_rank(rank), block)
    fills_memory = width * dtype.itemsize >= 512 or (is_small and (dtype == torch.float32 or blocks > 1))
    return Tiles(tokens, width, block, blocks, 4 if tokens * width <= 128 * 64 else 8, 1 if fills_memory else 3)


@cached
def landmark_tiles(head_dim: int, rank: int) -> Tiles:
    """Tiles of the landmark kernels; `tokens` counts landmarks. Few directions of a block are empty."""
    width, stored = power_of_two(head_dim), stored_rank(rank)
    fits = ceil_div(stored, 64) * 64 == ceil_div(stored, 32) * 32 and width <= 128
    block = min(power_of_two(stored), 64 if fits else 32)
    return Tiles(64 if width <= 64 else 32, width, block, ceil_div(stored, block), 4)


@cached
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
    if x.dtype != torch.float32 and tiles.width <= 64:  # few blocks of directions: each reads the rows again
        block = min(power_of_two(stored), 128)
        tiles = Tiles(32, tiles.width, block, ceil_div(stored, block), 4)
    wx = torch.empty((rows.shape[0], heads, 2, p, stored), dtype=dtype, device=x.device)
    trace = torch.empty((heads, tiles.rank_blocks), dtype=torch.float32, device=x.device)
    _landmark_weights_kernel[(rows.shape[0] * heads * tiles.rank_blocks,)](
        x, rows, w_e, w_r, wx, trace, n, HEADS=heads, P=p, RANK=rank, S=stored,
        BN=tiles.tokens, BP=tiles.width, BS=tiles.rank, NS=tiles.rank_blocks, PRECISION=precision(x.dtype),
    )  # fmt: skip
    return wx, trace[:, 0] if tiles.rank_blocks == 1 else trace.sum(1)


def landmarks_backward(
    x: Tensor, rows: Tensor, w_e: Tensor, w_r: Tensor, grad_wx: Tensor, grad_x: Tensor, min_length: int
) -> Tensor:
    """Add the landmarks' gradient to grad_x (rows, d) in place. Return partial sums of dW, (splits, H, 2, n, S).

    x and grad_x: the rows that contain the landmarks. min_length: sequences of at least n rows repeat none.
    """
    heads, n, rank = w_e.shape
    batch, p, stored = rows.shape[0], x.shape[1] // heads, stored_rank(rank)
    row_tiles, tiles = landmark_tiles(p, rank), large_landmark_tiles(x.dtype, p, rank, n)
    # One program per sequence and head handles all landmarks, unless that leaves multiprocessors idle.
    per_program = n if batch * heads >= 2 * multiprocessors(x.device) else row_tiles.tokens
    row_programs = batch * heads * ceil_div(n, per_program)
    blocks = 2 * heads * ceil_div(n, tiles.tokens) * tiles.rank_blocks
    # Enough programs to fill the GPU and none much longer than the others, but few partial sums to add.
    splits = min(batch, max(1, 2 * multiprocessors(x.device) // blocks, min(batch // 24, 16)))
    parts = torch.empty((splits, heads, 2, n, stored), dtype=torch.float32, device=x.device)
    _landmarks_backward_kernel[(row_programs + splits * blocks,)](
        x, rows, w_e, w_r, grad_wx, grad_x, parts, n, batch, per_program, ceil_div(batch, splits), min_length,
        row_programs, HEADS=heads, P=p, RANK=rank, S=stored, BP=row_tiles.width,
        BN_ROWS=row_tiles.tokens, BS_ROWS=row_tiles.rank, NS_ROWS=row_tiles.rank_blocks,
        BN=tiles.tokens, BS=tiles.rank, NS=tiles.rank_blocks, PRECISION=precision(x.dtype),
        num_warps=tiles.warps, num_stages=2 if w_e.dtype == torch.float32 else 3,  # shared memory limits occupancy
    )  # fmt: skip
    return parts


@cached
def score_constants(
    z_dtype: torch.dtype, heads: int, p: int, rank: int, data_dependent: bool, precision: str, device: torch.device
) -> tuple[dict[str, Any], Tiles]:
    """Return the constants and the tiles of the score kernels.

    The weights of both sides are one tensor (B, H, 2, p, S) if data-dependent, else W_e and W_r, (H, p, s) each.
    """
    stored, tiles = stored_rank(rank), score_tiles(z_dtype, p, rank, is_shared_memory_small(device))
    columns, sides = (stored, 2) if data_dependent else (rank, 1)
    return {
        "HEADS": heads, "P": p, "S": stored, "RANK": rank, "COLUMNS": columns, "HEAD_STRIDE": sides * p * columns,
        "SIDE_STRIDE": (sides - 1) * p * columns, "BP": tiles.width, "BS": tiles.rank, "PRECISION": precision,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }, tiles  # fmt: skip


def score_arguments(
    z: Tensor, wx: Tensor | tuple[Tensor, Tensor], dtype: torch.dtype, heads: int, rank: int
) -> tuple[tuple[Tensor, Tensor, int], dict[str, Any], Tiles]:
    """Return the weights of both sides with their stride over sequences, the constants and the tiles of the kernels."""
    is_shared = isinstance(wx, tuple)
    p = z.shape[1] // (2 * heads)
    constants, tiles = score_constants(z.dtype, heads, p, rank, not is_shared, precision(dtype), z.device)
    sides = (*wx, 0) if isinstance(wx, tuple) else (wx, wx, heads * constants["HEAD_STRIDE"])
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
    constants = {**constants, "BT": min(tiles.tokens, 64)}
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
    """Return q and k (rows, 2d) in `dtype`, unless they are float32 sums, and x and the weight in `dtype`."""
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


class BidirectionalScores(torch.autograd.Function):
    """Scores (rows, H, 2, S), energies (B, H, 2, S), traces (H,) and, if requested, wx of the bidirectional modes.

    Args:
        x: rows of all sequences, (rows, d); None if `qk` and `source` are passed.
        weight: weight of the projection, (2d, d); None if `qk` is passed.
        bias: bias of the projection, (2d,).
        qk: q and k, (rows, 2d), if they are computed elsewhere.
        source: rows that contain the landmarks; None for x.
        w_e: (H, n, s), or (H, p, s) if data-independent.
        w_r: like w_e.
        rows: the row of each landmark in the source, (B, n); None if data-independent.
        dtype: dtype of the scores.
        returns_weights: return wx, in float32.
        min_length: a lower bound of the sequences' lengths; shorter ones than n repeat landmark rows.
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
        min_length: int,
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
        ctx.settings = (torch.float32 if returns_weights else dtype, min_length, covers_rows, is_single_chunk)
        return scores, segment_sum(energy, tables[2], is_single_chunk), trace, wx if returns_weights else None

    @staticmethod
    def backward(
        ctx: Any, grad_scores: Tensor, grad_energy: Tensor, grad_trace: Tensor, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        x, weight, z, source, w_e, w_r, rows, *tables = ctx.saved_tensors
        dtype, min_length, covers_rows, is_single_chunk = ctx.settings
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
            grad_wx = landmarks_backward(origin, rows, w_e, w_r, grad_wx, target, min_length)
        of_projection, of_weights = finish_gradients(
            ctx.dtypes, grad_x, grad_z, x, weight, grad_bias, grad_wx, w_e, w_r, grad_trace
        )
        grad_source = None if grad_source is None else grad_source.to(ctx.dtypes[4])
        return *of_projection, grad_source, *of_weights, *(None,) * (6 + len(tables))
