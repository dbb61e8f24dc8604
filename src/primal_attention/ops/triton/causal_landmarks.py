"""Causal data-dependent mode: forward and backward kernels.

    W_i = γ W_{i−1} + x_i W_e[j]ᵀ if i is the grid position g_j of landmark j, else γ W_{i−1}
    e_i = W_iᵀ φ(q_i)                                       (reference: `reference.causal_landmark_scores`; r alike)

A program loops over the blocks of a chunk with W in registers. Within a block, the landmarks of the block enter by a
masked product; earlier landmarks are in W. Sequences of several chunks get W before each chunk from the chunks' own
contributions by the scan of `causal_sum`. Backward, with T_j the gradient of x_{g_j} W_e[j]ᵀ:

    dφ_i = W_i de_i,   G_i = γ G_{i+1} + φ_i de_iᵀ,   T_j = G_{g_j},   dx_{g_j} += T_j W_e[j],   dW_e[j] = T_jᵀ x_{g_j}

The first kernel runs forward with W and writes dz, the second runs backward with G and writes the gradients of the
landmarks. V = ∂W/∂log γ gives the gradient of the decay. Layouts as in `bidirectional`; a lane is (head, side).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..landmarks import landmark_indices
from .bidirectional import (
    finish_gradients,
    input_gradient,
    load_energy_gradient,
    load_score_gradient,
    project,
)
from .causal_sum import _carries_kernel, powers
from .common import (
    CHUNK,
    cached,
    ceil_div,
    dot,
    forbid_double_backward,
    inverse_norms,
    jit_kernel,
    power_of_two,
    precision,
    segment_sum,
    stored_rank,
)

MAX_STATE = 64 * 128  # numbers of W in the registers of a program: head width times rank, each a power of two


@triton.jit
def _load_block(
    x, rows, grid, w, first, end_mark, head,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """A block of landmarks: rows (BN, BP), weights (BN, BS) in the dtype of x, positions, and which exist."""
    mark, p, s = first + tl.arange(0, BN), tl.arange(0, BP), tl.arange(0, BS)
    row = tl.load(rows + mark, mask=mark < end_mark, other=-1)
    exists = row >= 0
    position = tl.load(grid + mark, mask=mark < end_mark, other=0)
    xl = tl.load(x + row[:, None] * (HEADS * P) + head * P + p[None], mask=exists[:, None] & (p[None] < P), other=0.0)
    wl = tl.load(w + mark[:, None] * RANK + s[None], mask=exists[:, None] & (s[None] < RANK), other=0.0)
    return xl, wl.to(xl.dtype), position, exists


@triton.jit
def _similarity_weights(first_position, position, exists, rate, BT: tl.constexpr, DECAY: tl.constexpr):
    """γ^(i−g_j) for landmarks at or before the rows of a block, zero for others, and the age i − g_j. (BT, BN)"""
    age = first_position + tl.arange(0, BT)[:, None] - position[None]
    return tl.where((age >= 0) & exists[None], powers(rate, tl.maximum(age, 0), DECAY), 0.0), tl.maximum(age, 0)


@triton.jit
def _load_state(
    states, index, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, EXISTS: tl.constexpr
):  # fmt: skip
    """W or G of a chunk and lane, (BP, BS) float32."""
    p, s = tl.arange(0, BP), tl.arange(0, BS)
    state = tl.zeros((BP, BS), tl.float32)
    if EXISTS:
        place = index * (P * S) + p[:, None] * S + s[None]
        state = tl.load(states + place, mask=(p[:, None] < P) & (s[None] < S), other=0.0)
    return state


@triton.jit
def _store_state(states, index, state, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    p, s = tl.arange(0, BP), tl.arange(0, BS)
    tl.store(states + index * (P * S) + p[:, None] * S + s[None], state, mask=(p[:, None] < P) & (s[None] < S))


@jit_kernel
def _chunk_weights_kernel(
    x, rows, grid, marks_before, w_e, w_r, sums, offsets, log_decay, starts, chunk_sequence, chunk_start, chunk_end,
    n, max_length,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_j γ^(m−1−g_j) x_{g_j} W[j]ᵀ over the landmarks of a chunk of m rows."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head = lane // 2
    sequence = tl.load(chunk_sequence + chunk)
    shift = (tl.load(offsets + sequence) if HAS_OFFSET else 0) - tl.load(starts + sequence)
    begin, end = tl.load(chunk_start + chunk) + shift, tl.load(chunk_end + chunk) + shift
    rate = tl.load(log_decay + head) if DECAY else 0.0
    w = (w_e if lane % 2 == 0 else w_r) + head * n * RANK
    state = tl.zeros((BP, BS), tl.float32)
    end_mark = tl.load(marks_before + tl.minimum(end, max_length))
    for first in range(tl.load(marks_before + tl.minimum(begin, max_length)), end_mark, BN):
        xl, wl, position, _ = _load_block(
            x, rows + sequence * n, grid, w, first, end_mark, head, HEADS, P, RANK, BN, BP, BS
        )
        to_end = powers(rate, tl.maximum(end - 1 - position, 0), DECAY)
        state += dot(tl.trans((xl * to_end[:, None]).to(xl.dtype)), wl, PRECISION)
    _store_state(sums, chunk.to(tl.int64) * (2 * HEADS) + lane, state, P, S, BP, BS)


@jit_kernel
def _scores_kernel(
    qk, x, rows, grid, marks_before, w_e, w_r, states, scores, energy, offsets, log_decay,
    starts, chunk_sequence, chunk_start, chunk_end, n, max_length,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_OFFSET: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and energies of one chunk and lane."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    shift = (tl.load(offsets + sequence) if HAS_OFFSET else 0) - tl.load(starts + sequence)
    rows += sequence * n
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    kind: tl.constexpr = qk.dtype.element_ty
    w = (w_e if side == 0 else w_r) + head * n * RANK
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    state = _load_state(states, index, P, S, BP, BS, HAS_STATE)
    qk += (side * HEADS + head) * P
    total = tl.zeros((BS,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
        z = z.to(tl.float32)
        inverse, _above = inverse_norms(z)
        phi = (z * inverse[:, None]).to(kind)
        begin, count = first + shift, tl.minimum(end - first, BT)
        e = dot(phi, state.to(kind), PRECISION) * powers(rate, t + 1, DECAY)[:, None]
        state *= powers(rate, count, DECAY)
        end_mark = tl.load(marks_before + tl.minimum(begin + count, max_length))
        for mark in range(tl.load(marks_before + tl.minimum(begin, max_length)), end_mark, BN):
            xl, wl, position, exists = _load_block(x, rows, grid, w, mark, end_mark, head, HEADS, P, RANK, BN, BP, BS)
            weight, _age = _similarity_weights(begin, position, exists, rate, BT, DECAY)
            e += dot((dot(phi, tl.trans(xl), PRECISION) * weight).to(kind), wl, PRECISION)
            to_end = powers(rate, tl.maximum(begin + count - 1 - position, 0), DECAY)
            state += dot(tl.trans((xl * to_end[:, None]).to(kind)), wl, PRECISION)
        total += tl.sum(tl.where(live[:, None], e * e, 0.0), 0)
        e = tl.where((s[None] == RANK) & (side == 0), 1.0, e)
        place = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
        tl.store(place, e.to(kind), mask=live[:, None] & (s[None] < S))
    tl.store(energy + index * S + s, total, mask=s < S)


@jit_kernel
def _rows_backward_kernel(
    qk, x, rows, grid, marks_before, w_e, w_r, states, scores, grad_scores, grad_energy,
    grad_qk, grad_bias, grad_decay, grad_states, derivatives, offsets, log_decay,
    starts, chunk_sequence, chunk_start, chunk_end, n, max_length,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_CARRY_OUT: tl.constexpr, HAS_OFFSET: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, the partial sums of db and of the gradient of log γ; if HAS_CARRY_OUT, the chunk's share of G, and V."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    shift = (tl.load(offsets + sequence) if HAS_OFFSET else 0) - tl.load(starts + sequence)
    rows += sequence * n
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    kind: tl.constexpr = qk.dtype.element_ty
    w = (w_e if side == 0 else w_r) + head * n * RANK
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    state = _load_state(states, index, P, S, BP, BS, HAS_STATE)
    derivative = tl.zeros((BP, BS), tl.float32)
    share = tl.zeros((BP, BS), tl.float32)
    column = (side * HEADS + head) * P + p
    scores += lane * S
    grad_scores += lane * S
    twice = load_energy_gradient(grad_energy + (sequence * (2 * HEADS) + lane) * S, s, RANK)
    sum_b = tl.zeros((BP,), tl.float32)
    sum_decay = tl.zeros((BT,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        place = row[:, None] * (2 * HEADS * P) + column[None]
        z = tl.load(qk + place, mask=inside, other=0.0).to(tl.float32)
        inverse, above = inverse_norms(z)
        unit = z * inverse[:, None]
        phi = unit.to(kind)
        begin, count = first + shift, tl.minimum(end - first, BT)
        e = tl.load(
            scores + row[:, None] * (2 * HEADS * S) + s[None], mask=live[:, None] & (s[None] < RANK), other=0.0
        ).to(tl.float32)  # fmt: skip
        de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
        narrow = de.to(kind)
        decays = powers(rate, t + 1, DECAY)
        dphi = dot(narrow, tl.trans(state.to(kind)), PRECISION) * decays[:, None]
        if DECAY:
            aged = dot(phi, derivative.to(kind), PRECISION)
            aged += dot(phi, state.to(kind), PRECISION) * (t + 1).to(tl.float32)[:, None]
            sum_decay += tl.sum(aged * de, 1) * decays
            factor = powers(rate, count, DECAY)
            derivative = (derivative + state * count.to(tl.float32)) * factor
            state *= factor
        if HAS_CARRY_OUT:
            weighted = (de * powers(rate, row - start + 1, DECAY)[:, None]).to(kind)
            share += dot(tl.trans(phi), weighted, PRECISION)
        end_mark = tl.load(marks_before + tl.minimum(begin + count, max_length))
        for mark in range(tl.load(marks_before + tl.minimum(begin, max_length)), end_mark, BN):
            xl, wl, position, exists = _load_block(x, rows, grid, w, mark, end_mark, head, HEADS, P, RANK, BN, BP, BS)
            weight, age = _similarity_weights(begin, position, exists, rate, BT, DECAY)
            da = dot(narrow, tl.trans(wl), PRECISION) * weight
            dphi += dot(da.to(kind), xl, PRECISION)
            to_end = powers(rate, tl.maximum(begin + count - 1 - position, 0), DECAY)
            added = dot(tl.trans((xl * to_end[:, None]).to(kind)), wl, PRECISION)
            state += added
            if DECAY:
                sum_decay += tl.sum(dot(phi, tl.trans(xl), PRECISION) * da * age.to(tl.float32), 1)
                to_end *= tl.maximum(begin + count - 1 - position, 0).to(tl.float32)
                derivative += dot(tl.trans((xl * to_end[:, None]).to(kind)), wl, PRECISION)
        along = tl.where(above, tl.sum(unit * dphi, 1), 0.0)
        dz = tl.where(inside, (dphi - unit * along[:, None]) * inverse[:, None], 0.0)
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + place, dz.to(kind), mask=inside)
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if DECAY:
        tl.store(grad_decay + index, tl.sum(sum_decay, 0))
    if HAS_CARRY_OUT:
        _store_state(grad_states, index, share, P, S, BP, BS)
        if DECAY:
            _store_state(derivatives, index, derivative, P, S, BP, BS)


@jit_kernel
def _landmarks_backward_kernel(
    qk, x, rows, grid, marks_before, w_e, w_r, scores, grad_scores, grad_energy, carries, grad_initial,
    grad_rows, grad_w, offsets, log_decay, starts, first_chunk, chunk_sequence, chunk_start, chunk_end, n, max_length,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    HAS_CARRY_OUT: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_INITIAL: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the chunk's end, the gradients of the chunk's landmark rows and weights."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    shift = (tl.load(offsets + sequence) if HAS_OFFSET else 0) - tl.load(starts + sequence)
    rows += sequence * n
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    kind: tl.constexpr = qk.dtype.element_ty
    w = (w_e if side == 0 else w_r) + head * n * RANK
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    grad_state = _load_state(carries, index, P, S, BP, BS, HAS_CARRY_OUT)
    qk += (side * HEADS + head) * P
    scores += lane * S
    grad_scores += lane * S
    twice = load_energy_gradient(grad_energy + (sequence * (2 * HEADS) + lane) * S, s, RANK)
    blocks = tl.cdiv(end - start, BT)
    for back in range(blocks):
        first = start + (blocks - 1 - back) * BT
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
        z = z.to(tl.float32)
        inverse, _above = inverse_norms(z)
        phi = (z * inverse[:, None]).to(kind)
        begin, count = first + shift, tl.minimum(end - first, BT)
        e = tl.load(
            scores + row[:, None] * (2 * HEADS * S) + s[None], mask=live[:, None] & (s[None] < RANK), other=0.0
        ).to(tl.float32)  # fmt: skip
        de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
        narrow = de.to(kind)
        end_mark = tl.load(marks_before + tl.minimum(begin + count, max_length))
        for mark in range(tl.load(marks_before + tl.minimum(begin, max_length)), end_mark, BN):
            xl, wl, position, exists = _load_block(x, rows, grid, w, mark, end_mark, head, HEADS, P, RANK, BN, BP, BS)
            weight, _age = _similarity_weights(begin, position, exists, rate, BT, DECAY)
            a = (dot(phi, tl.trans(xl), PRECISION) * weight).to(kind)
            da = (dot(narrow, tl.trans(wl), PRECISION) * weight).to(kind)
            to_end = powers(rate, tl.maximum(begin + count - 1 - position, 0), DECAY)[:, None]
            dx = dot(tl.trans(da), phi, PRECISION) + dot(wl, tl.trans(grad_state.to(kind)), PRECISION) * to_end
            dw = dot(tl.trans(a), narrow, PRECISION) + dot(xl, grad_state.to(kind), PRECISION) * to_end
            j = mark + tl.arange(0, BN)
            out = ((sequence * (2 * HEADS) + lane) * n + j)[:, None]
            is_mark = (j < end_mark)[:, None]
            tl.store(grad_rows + out * P + p[None], dx, mask=is_mark & (p[None] < P))
            tl.store(grad_w + out * S + s[None], tl.where(exists[:, None], dw, 0.0), mask=is_mark & (s[None] < S))
        weighted = (de * powers(rate, t + 1, DECAY)[:, None]).to(kind)
        grad_state = grad_state * powers(rate, count, DECAY) + dot(tl.trans(phi), weighted, PRECISION)
    if HAS_INITIAL:  # noqa: SIM102 (a constant, unlike the next condition)
        if chunk == tl.load(first_chunk + sequence):
            _store_state(grad_initial, sequence * (2 * HEADS) + lane, grad_state, P, S, BP, BS)


@jit_kernel
def _add_rows_kernel(
    grad_rows, rows, grad_x, n, HEADS: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """grad_x[row_j] += Σ over the sides. The first of equal rows adds for all of them."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    mark, p = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BP)
    rows += sequence * n
    grad_rows += (sequence * HEADS + head) * (2 * n * P)
    row = tl.load(rows + mark, mask=mark < n, other=-1)
    before = tl.load(rows + mark - 1, mask=(mark < n) & (mark > 0), other=-1)
    leads = (row >= 0) & (row != before)
    grad = tl.zeros((BN, BP), tl.float32)
    step = 0
    follows = leads.to(tl.int32)
    while tl.max(follows, 0) > 0:
        inside = (follows > 0)[:, None] & (p[None] < P)
        place = (mark + step)[:, None] * P + p[None]
        grad += tl.load(grad_rows + place, mask=inside, other=0.0)
        grad += tl.load(grad_rows + place + n * P, mask=inside, other=0.0)
        step += 1
        ahead = mark + step
        is_same = tl.load(rows + ahead, mask=(follows > 0) & (ahead < n), other=-2) == row
        follows = (is_same & (follows > 0)).to(tl.int32)
    target = grad_x + row[:, None] * (HEADS * P) + head * P + p[None]
    inside = leads[:, None] & (p[None] < P)
    grad += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, grad.to(grad_x.dtype.element_ty), mask=inside)


@cached
def landmark_grid(max_length: int, landmarks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the grid positions (n,), and the number of them before each position, (max_length + 1,)."""
    grid = landmark_indices(max_length, landmarks, device)
    return grid, torch.searchsorted(grid, torch.arange(max_length + 1, device=device))


def fits_registers(head_dim: int, rank: int) -> bool:
    """Return True if a program can hold W."""
    return power_of_two(head_dim) * power_of_two(stored_rank(rank)) <= MAX_STATE


def _constants(z: Tensor, w_e: Tensor, log_decay: Tensor | None, offset: Tensor | None) -> dict[str, Any]:
    heads, _, rank = w_e.shape
    p, stored = z.shape[1] // (2 * heads), stored_rank(rank)
    width, directions = power_of_two(p), power_of_two(stored)
    return {
        "HEADS": heads, "P": p, "S": stored, "RANK": rank, "BT": 32, "BN": 16, "BP": width, "BS": directions,
        "HAS_OFFSET": offset is not None, "DECAY": log_decay is not None, "PRECISION": precision(z.dtype),
        "num_stages": 1,
    }  # fmt: skip


def _warps(z: Tensor, constants: dict[str, Any], least: int) -> int:
    """Return the number of warps: few where W fits in the registers of few, for the products are small.

    With the least number instead of four, the kernels take 0.75 ms instead of 1.27 ms (width 512, N 1024, bf16, H200).
    """
    numbers = constants["BP"] * constants["BS"]
    return least if z.dtype != torch.float32 and numbers <= 64 * 32 else 4 if numbers <= 64 * 64 else 8


def _scan(
    sums: Tensor, log_decay: Tensor | None, tables: tuple[Tensor, ...], initial: Tensor | None, reverse: bool
) -> Tensor:
    """The scan of `causal_sum` over states (chunks, H, 2, p, S) instead of sums."""
    heads, numbers = sums.shape[1], sums.shape[3] * sums.shape[4]
    carries = torch.zeros_like(sums)  # chunks beyond the last sequence stay zero
    _carries_kernel[(tables[0].shape[0], 2 * heads, ceil_div(numbers, 64))](
        sums, carries, sums if initial is None else initial, sums, sums if log_decay is None else log_decay,
        tables[2], tables[1], HEADS=heads, P=numbers, ROWS=CHUNK, BC=64, DECAY=log_decay is not None, REVERSE=reverse,
        HAS_INITIAL=initial is not None, HAS_FINAL=False,
    )  # fmt: skip
    return carries


class CausalLandmarkScores(torch.autograd.Function):
    """Scores (rows, H, 2, S), energies (B, H, 2, S) and traces (H,) of the causal data-dependent mode.

    Args:
        x: rows of all sequences, (rows, d).
        weight: weight of the projection, (2d, d); None if `qk` is passed.
        bias: bias of the projection, (2d,).
        qk: q and k, (rows, 2d), if they are computed elsewhere.
        w_e: (H, n, s).
        w_r: (H, n, s).
        log_decay: log γ, (H,); None without decay.
        initial: W before the first token, (B, H, 2, p, S) float32.
        rows: the row of each landmark, (B, n); −1 for landmarks outside x.
        grid: positions of the landmarks, (n,).
        marks_before: the number of landmarks before each position, (max_length + 1,).
        offset: the position of each sequence's first row, (B,); None for zero.
        dtype: dtype of the products and scores.
        covers_rows: the sequences cover every row.
        is_single_chunk: every sequence has one chunk.
        tables: the tensors of `Sequences`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        qk: Tensor | None,
        w_e: Tensor,
        w_r: Tensor,
        log_decay: Tensor | None,
        initial: Tensor | None,
        rows: Tensor,
        grid: Tensor,
        marks_before: Tensor,
        offset: Tensor | None,
        dtype: torch.dtype,
        covers_rows: bool,
        is_single_chunk: bool,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, qk)]
        z, x, weight = project(x, weight, bias, qk, dtype)  # type: ignore[assignment]
        heads, n = w_e.shape[:2]
        chunks, constants = tables[4].shape[0], _constants(z, w_e, log_decay, offset)
        p, stored = constants["P"], constants["S"]
        rate, offsets = z if log_decay is None else log_decay, rows if offset is None else offset
        places = (tables[0], *tables[3:], n, marks_before.shape[0] - 1)
        new: dict[str, Any] = {"dtype": torch.float32, "device": z.device}
        if is_single_chunk:
            states = torch.empty((0, heads, 2, p, stored), **new) if initial is None else initial
        else:
            sums = torch.empty((chunks, heads, 2, p, stored), **new)
            _chunk_weights_kernel[(chunks, 2 * heads)](
                x, rows, grid, marks_before, w_e, w_r, sums, offsets, rate, *places,
                num_warps=_warps(z, constants, 4), **constants,
            )  # fmt: skip
            states = _scan(sums, log_decay, tables, initial, False)
        scores = (torch.empty if covers_rows else torch.zeros)(
            (z.shape[0], heads, 2, stored), dtype=z.dtype, device=z.device
        )
        energy = torch.empty((chunks, heads, 2, stored), **new)
        _scores_kernel[(chunks, 2 * heads)](
            z, x, rows, grid, marks_before, w_e, w_r, states, scores, energy, offsets, rate, *places,
            HAS_STATE=states.shape[0] > 0, num_warps=_warps(z, constants, 1), **constants,
        )  # fmt: skip
        ctx.save_for_backward(
            x, weight, z, w_e, w_r, log_decay, states, scores, rows, grid, marks_before, offset, *tables
        )
        ctx.settings = (covers_rows, is_single_chunk)
        trace = (w_e.float() * w_r.float()).sum((1, 2))
        return scores, segment_sum(energy, tables[2], is_single_chunk), trace

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor, grad_energy: Tensor, grad_trace: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        x, weight, z, w_e, w_r, log_decay, states, scores, rows, grid, marks_before, offset, *tables = ctx.saved_tensors
        covers_rows, is_single_chunk = ctx.settings
        heads, n = w_e.shape[:2]
        chunks, constants = tables[4].shape[0], _constants(z, w_e, log_decay, offset)
        p, stored, batch = constants["P"], constants["S"], rows.shape[0]
        rate, offsets = z if log_decay is None else log_decay, rows if offset is None else offset
        places = (*tables[3:], n, marks_before.shape[0] - 1)
        grad_scores, grad_energy = grad_scores.contiguous(), grad_energy.contiguous()
        new: dict[str, Any] = {"dtype": torch.float32, "device": z.device}
        grad_z = (torch.empty_like if covers_rows else torch.zeros_like)(z)
        grad_bias, grad_decay = torch.empty((chunks, 2 * heads * p), **new), torch.empty((chunks, heads, 2), **new)
        shape = (0 if is_single_chunk else chunks, heads, 2, p, stored)
        shares, derivatives = torch.empty(shape, **new), torch.empty(shape, **new)
        common = (z, x, rows, grid, marks_before, w_e, w_r)
        _rows_backward_kernel[(chunks, 2 * heads)](
            *common, states, scores, grad_scores, grad_energy, grad_z, grad_bias, grad_decay, shares, derivatives,
            offsets, rate, tables[0], *places, HAS_STATE=states.shape[0] > 0, HAS_CARRY_OUT=not is_single_chunk,
            num_warps=_warps(z, constants, 2), **constants,
        )  # fmt: skip
        carries = shares
        total_decay = grad_decay.sum((0, 2))
        if not is_single_chunk:
            carries = _scan(shares, log_decay, tuple(tables), None, True)
            if log_decay is not None:
                total_decay = total_decay + (carries * derivatives).sum((0, 2, 3, 4))
        has_initial = ctx.needs_input_grad[7]
        grad_initial = torch.empty((batch if has_initial else 0, heads, 2, p, stored), **new)
        grad_rows = torch.empty((batch, heads, 2, n, p), **new)  # only rows that exist are read
        grad_w = torch.zeros((batch, heads, 2, n, stored), **new)
        _landmarks_backward_kernel[(chunks, 2 * heads)](
            *common, scores, grad_scores, grad_energy, carries, grad_initial, grad_rows, grad_w, offsets, rate,
            tables[0], tables[2], *places, HAS_CARRY_OUT=not is_single_chunk, HAS_INITIAL=has_initial,
            num_warps=_warps(z, constants, 1), **constants,
        )  # fmt: skip
        grad_x = torch.zeros_like(x) if weight is None else input_gradient(grad_z, weight, grad_scores)
        _add_rows_kernel[(batch, ceil_div(n, 32), heads)](
            grad_rows, rows, grad_x, n, HEADS=heads, P=p, BN=32, BP=power_of_two(p)
        )
        of_projection, of_weights = finish_gradients(
            ctx.dtypes, grad_x, grad_z, x, weight, grad_bias, grad_w, w_e, w_r, grad_trace
        )
        of_decay = None if log_decay is None else total_decay
        of_initial = grad_initial if has_initial else None
        return *of_projection, *of_weights, of_decay, of_initial, *(None,) * (7 + len(tables))
