"""Data-independent modes with sums over tokens: forward and backward kernels.

    causal        s_i = γ s_{i−1} + z_i        φ_i = s_i / ‖s_i‖,   e_i = W_eᵀ φ_i
    two-sided     s_i = Σ_j γ^|i−j| z_j        z is q or k; γ = 1 without decay  (reference: `reference.sum_features`)

Chunked scan in three launches: per-chunk sums, prefix sums over chunks, scores. The backward pass runs the same scan in
reverse. Single-chunk sequences skip the first two launches (`HAS_CARRY_IN`, `HAS_CARRY_OUT`). Within a block of rows
the sum is a product with the triangular matrix L_ij = γ^(i−j); the sum before the block enters as γ^(i+1) times its
carry, in float32. The gradient of log γ is Σ_i dz_i · (s_i − z_i).

BLOCK_T is 32: Triton 3.6 miscompiles larger mixed warp-group products, and the kernels are memory-bound.
The two-sided sum is a separate pass that writes s in float32; the kernels of `bidirectional` compute its scores.
Layouts as in `bidirectional`. A lane is (head, side).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bidirectional import (
    finish_gradients,
    input_gradient,
    load_energy_gradient,
    load_score_gradient,
    load_weights,
    project,
)
from .common import (
    CHUNK,
    Tiles,
    can_overwrite_saved,
    ceil_div,
    dot,
    float32_precision,
    forbid_double_backward,
    inverse_norms,
    jit_kernel,
    power_of_two,
    precision,
    segment_sum,
    stored_rank,
)


@triton.jit
def powers(log_decay, exponent, DECAY: tl.constexpr):
    """γ^exponent."""
    return tl.exp(log_decay * exponent.to(tl.float32)) if DECAY else exponent.to(tl.float32) * 0.0 + 1.0


@triton.jit
def lower_triangle(log_decay, BT: tl.constexpr, DECAY: tl.constexpr):
    """L, (BT, BT) float32."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None]
    return tl.where(i >= j, powers(log_decay, tl.maximum(i - j, 0), DECAY), 0.0)


@triton.jit
def triangular_sums(z, triangle, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """L z. Without decay L is exact in any dtype; powers of γ need more than 16 bits."""
    if DECAY:
        return dot(triangle, z.to(tl.float32), FINE)
    return dot(triangle.to(z.dtype), z, PRECISION)


@jit_kernel
def _chunk_sums_kernel(
    z, sums, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Σ_j γ^(m−1−j) z_j of a chunk of m rows; if REVERSE, Σ_j γ^j z_j."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = (side * HEADS + head) * P + p
    rate = tl.load(log_decay + head) if DECAY else 0.0
    parts = tl.zeros((BT, BP), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        inside = (row < end)[:, None] & (p[None] < P)
        rows = tl.load(z + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0).to(tl.float32)
        age = row - start if REVERSE else tl.maximum(end - 1 - row, 0)
        parts += rows * powers(rate, age, DECAY)[:, None] if DECAY else rows
    tl.store(sums + (chunk.to(tl.int64) * (2 * HEADS) + lane) * P + p, tl.sum(parts, 0), mask=p < P)


@jit_kernel
def _carries_kernel(
    sums, carries, initial, final, log_decay, first_chunk, lengths,
    HEADS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """The sums before each chunk (after it, if REVERSE): a scan over the chunks' sums, BC columns per program."""
    sequence, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.load(first_chunk + sequence)
    count = tl.load(first_chunk + sequence + 1) - first
    length = tl.load(lengths + sequence)
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    here, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None]
    state_place = (sequence * (2 * HEADS) + lane) * P + column
    carry = tl.load(initial + state_place, mask=column < P, other=0.0) if HAS_INITIAL else tl.zeros((BC,), tl.float32)
    for group in range(0, count, 64):
        if REVERSE:  # the same scan with the chunks numbered from the end
            k, j = count - 1 - group - here, count - 1 - group - other
            far = tl.minimum((count - group) * ROWS, length)
            near = tl.minimum(tl.maximum(count - group - 64, 0) * ROWS, length)
            gap = tl.minimum(j * ROWS, length) - tl.minimum((k + 1) * ROWS, length)
            age = far - tl.minimum((k + 1) * ROWS, length)
            tail = tl.minimum(j * ROWS, length) - near
        else:
            k, j = group + here, group + other
            far, near = tl.minimum((group + 64) * ROWS, length), tl.minimum(group * ROWS, length)
            gap = tl.minimum(k * ROWS, length) - tl.minimum((j + 1) * ROWS, length)
            age = tl.minimum(k * ROWS, length) - near
            tail = far - tl.minimum((j + 1) * ROWS, length)
        index = tl.reshape(j, (64,))
        inside = (index >= 0) & (index < count)
        part = tl.load(
            sums + ((first + index)[:, None] * (2 * HEADS) + lane) * P + column[None],
            mask=inside[:, None] & (column[None] < P), other=0.0,
        )  # fmt: skip
        mix = tl.where(other < here, powers(rate, tl.maximum(gap, 0), DECAY), 0.0)
        result = tl.dot(mix, part, input_precision="ieee") + powers(rate, age, DECAY) * carry[None]
        target = tl.reshape(k, (64,))
        tl.store(
            carries + ((first + target)[:, None] * (2 * HEADS) + lane) * P + column[None], result,
            mask=((target >= 0) & (target < count))[:, None] & (column[None] < P),
        )  # fmt: skip
        weight = tl.reshape(powers(rate, tl.maximum(tail, 0), DECAY), (64,))
        carry = carry * powers(rate, far - near, DECAY) + tl.sum(part * weight[:, None], 0)
    if HAS_FINAL:
        tl.store(final + state_place, carry, mask=column < P)


@triton.jit
def load_carry(carries, index, P: tl.constexpr, BP: tl.constexpr, HAS_CARRY: tl.constexpr):
    """The carry of a chunk and lane, zero without one. index: int64."""
    p = tl.arange(0, BP)
    return tl.load(carries + index * P + p, mask=p < P, other=0.0) if HAS_CARRY else tl.zeros((BP,), tl.float32)


@triton.jit
def last_row(sums, left, BT: tl.constexpr):
    """The carry of the next block. left: rows from the block's first to the chunk's end."""
    return tl.sum(tl.where(tl.arange(0, BT)[:, None] == tl.minimum(left, BT) - 1, sums, 0.0), 0)


@jit_kernel
def _causal_scores_kernel(
    qk, w_e, w_r, carries, final, scores, energy, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, HAS_CARRY_IN: tl.constexpr,
    WRITES_FINAL: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    triangle = lower_triangle(rate, BT, DECAY)
    decays = powers(rate, t + 1, DECAY)
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    qk += (side * HEADS + head) * P
    weights = (w_e if side == 0 else w_r) + head * (P * RANK)
    for block in tl.static_range(NS):
        s = block * BS + tl.arange(0, BS)
        w = load_weights(weights, block, qk, P, RANK, BP, BS)
        total = tl.zeros((BS,), tl.float32)
        carry = load_carry(carries, index, P, BP, HAS_CARRY_IN)
        for first in range(start, end, BT):
            row = first + t
            live = row < end
            z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
            sums = triangular_sums(z, triangle, DECAY, PRECISION, FINE) + decays[:, None] * carry[None]
            carry = last_row(sums, end - first, BT)
            inverse, _ = inverse_norms(sums)
            e = dot((sums * inverse[:, None]).to(z.dtype), w, PRECISION)
            total += tl.sum(tl.where(live[:, None], e * e, 0.0), 0)
            e = tl.where((s[None] == RANK) & (side == 0), 1.0, e)
            place = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
            tl.store(place, e.to(scores.dtype.element_ty), mask=live[:, None] & (s[None] < S))
        tl.store(energy + index * S + s, total, mask=s < S)
        if WRITES_FINAL and block == 0:
            tl.store(final + index * P + p, carry, mask=p < P)


@triton.jit
def _sums_gradient(
    z, w, weights, carry, grad_scores, grad_energy, twice, triangle, decays, row, live,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """The sums s of a block, φ, ds, and de of the last block of directions. w, twice: of the first block."""
    sums = triangular_sums(z, triangle, DECAY, PRECISION, FINE) + decays[:, None] * carry[None]
    inverse, above = inverse_norms(sums)
    unit = sums * inverse[:, None]
    phi = unit.to(z.dtype)
    s = tl.arange(0, BS)
    e = tl.where(live[:, None], dot(phi, w, PRECISION), 0.0)
    de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
    grad = dot(de.to(z.dtype), tl.trans(w), PRECISION)
    for block in tl.static_range(1, NS):
        w_block = load_weights(weights, block, grad_scores, P, RANK, BP, BS)
        e = tl.where(live[:, None], dot(phi, w_block, PRECISION), 0.0)
        more = load_energy_gradient(grad_energy, block * BS + s, RANK)
        de = load_score_gradient(grad_scores, more, e, row, live, block * BS + s, HEADS, S, RANK)
        grad += dot(de.to(z.dtype), tl.trans(w_block), PRECISION)
    # φ·grad equals e·de, but is computed from the rounded grad: ds must be orthogonal to s beyond rounding, because the
    # gradient of log γ is a sum of ds_i · s_{i−1}.
    along = tl.where(above, tl.sum(unit * grad, 1), 0.0)
    grad = (grad - unit * along[:, None]) * inverse[:, None]
    return sums, phi, tl.where(live[:, None], grad, 0.0), de


@jit_kernel
def _causal_backward_sums_kernel(
    qk, w_e, w_r, carries, grad_scores, grad_energy, grad_sums, block_carries, sums, grad_wx,
    log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, HAS_CARRY_IN: tl.constexpr,
    HAS_CARRY_OUT: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dW if NS is 1; if HAS_CARRY_OUT, Σ_i γ^i ds_i; without decay ds, with decay the carry before each block.

    With decay, ds is recomputed in the next kernel: in 16 bits it would be too coarse for the gradient of log γ.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = lower_triangle(rate, BT, DECAY)
    decays = powers(rate, t + 1, DECAY)
    weights = (w_e if lane % 2 == 0 else w_r) + lane // 2 * (P * RANK)
    grad_scores += lane * S
    grad_energy += (sequence * (2 * HEADS) + lane) * S
    w = load_weights(weights, 0, qk, P, RANK, BP, BS)
    twice = load_energy_gradient(grad_energy, tl.arange(0, BS), RANK)
    sum_w = tl.zeros((BS, BP), tl.float32)
    parts = tl.zeros((BT, BP), tl.float32)
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    carry = load_carry(carries, index, P, BP, HAS_CARRY_IN)
    carry_place = (chunk.to(tl.int64) * BLOCKS * (2 * HEADS) + lane) * P + p
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=live[:, None] & (p[None] < P), other=0.0)
        if DECAY:
            tl.store(block_carries + carry_place, carry, mask=p < P)
            carry_place += 2 * HEADS * P
        rows, phi, grad, de = _sums_gradient(
            z, w, weights, carry, grad_scores, grad_energy, twice, triangle, decays, row, live,
            HEADS, P, S, RANK, BT, BP, BS, NS, DECAY, PRECISION, FINE,
        )  # fmt: skip
        carry = last_row(rows, end - first, BT)
        if HAS_CARRY_OUT:
            parts += grad * powers(rate, row - start, DECAY)[:, None] if DECAY else grad
        if not DECAY:
            inside = live[:, None] & (p[None] < P)
            tl.store(grad_sums + row[:, None] * (2 * HEADS * P) + column[None], grad.to(z.dtype), mask=inside)
        if NS == 1:
            sum_w += dot(tl.trans(de.to(phi.dtype)), phi, PRECISION)
    if HAS_CARRY_OUT:
        tl.store(sums + index * P + p, tl.sum(parts, 0), mask=p < P)
    if NS == 1:
        fits = (p[None] < P) & (s[:, None] < S)
        tl.store(grad_wx + index * (P * S) + p[None] * S + s[:, None], sum_w, mask=fits)


@jit_kernel
def _causal_backward_rows_kernel(
    qk, w_e, w_r, block_carries, after, grad_scores, grad_energy, grad_qk, grad_bias, grad_decay,
    log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, HAS_CARRY_OUT: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """From the chunk's end: dz = Lᵀ ds + γ^(m−t)·(carry from later blocks), and the gradients of b and log γ."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = lower_triangle(rate, BT, DECAY)
    decays = powers(rate, t + 1, DECAY)
    weights = (w_e if lane % 2 == 0 else w_r) + lane // 2 * (P * RANK)
    grad_scores += lane * S
    grad_energy += (sequence * (2 * HEADS) + lane) * S
    w = load_weights(weights, 0, qk, P, RANK, BP, BS)
    twice = load_energy_gradient(grad_energy, tl.arange(0, BS), RANK)
    sum_b = tl.zeros((BP,), tl.float32)
    sum_decay = tl.zeros((BP,), tl.float32)
    later = load_carry(after, chunk.to(tl.int64) * (2 * HEADS) + lane, P, BP, HAS_CARRY_OUT)
    blocks = tl.cdiv(end - start, BT)
    for back in range(blocks):
        first = start + (blocks - 1 - back) * BT
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        place = row[:, None] * (2 * HEADS * P) + column[None]
        ahead = powers(rate, tl.maximum(tl.minimum(end - first, BT) - t, 0), DECAY)
        if DECAY:
            block = (chunk.to(tl.int64) * BLOCKS + blocks - 1 - back) * (2 * HEADS) + lane
            carry = tl.load(block_carries + block * P + p, mask=p < P, other=0.0)
            z = tl.load(qk + place, mask=inside, other=0.0)
            sums, _, grad, _ = _sums_gradient(
                z, w, weights, carry, grad_scores, grad_energy, twice, triangle, decays, row, live,
                HEADS, P, S, RANK, BT, BP, BS, NS, DECAY, PRECISION, FINE,
            )  # fmt: skip
            dz = dot(tl.trans(triangle), grad, FINE) + ahead[:, None] * later[None]
            dz = tl.where(inside, dz, 0.0)
            sum_decay += tl.sum(dz * (sums - z.to(tl.float32)), 0)
        else:
            grad = tl.load(grad_qk + place, mask=inside, other=0.0)
            dz = dot(tl.trans(triangle).to(grad.dtype), grad, PRECISION) + later[None]
            dz = tl.where(inside, dz, 0.0)
        later = tl.sum(tl.where(t[:, None] == 0, dz, 0.0), 0)
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + place, dz.to(grad_qk.dtype.element_ty), mask=inside)
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if DECAY:
        tl.store(grad_decay + chunk.to(tl.int64) * (2 * HEADS) + lane, tl.sum(sum_decay, 0))


@jit_kernel
def _causal_backward_weights_kernel(
    qk, w_e, w_r, carries, grad_scores, grad_energy, grad_wx, log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, HAS_CARRY_IN: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dW of one block of directions, where one block does not cover the rank."""
    chunk, lane, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), block * BS + tl.arange(0, BS)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = lower_triangle(rate, BT, DECAY)
    decays = powers(rate, t + 1, DECAY)
    w = load_weights((w_e if lane % 2 == 0 else w_r) + lane // 2 * (P * RANK), block, qk, P, RANK, BP, BS)
    grad_scores += lane * S
    twice = load_energy_gradient(grad_energy + (sequence * (2 * HEADS) + lane) * S, s, RANK)
    sum_w = tl.zeros((BS, BP), tl.float32)
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    carry = load_carry(carries, index, P, BP, HAS_CARRY_IN)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=live[:, None] & (p[None] < P), other=0.0)
        sums = triangular_sums(z, triangle, DECAY, PRECISION, FINE) + decays[:, None] * carry[None]
        carry = last_row(sums, end - first, BT)
        inverse, _ = inverse_norms(sums)
        phi = (sums * inverse[:, None]).to(z.dtype)
        e = tl.where(live[:, None], dot(phi, w, PRECISION), 0.0)
        de = load_score_gradient(grad_scores, twice, e, row, live, s, HEADS, S, RANK)
        sum_w += dot(tl.trans(de.to(phi.dtype)), phi, PRECISION)
    fits = (p[None] < P) & (s[:, None] < S)
    tl.store(grad_wx + index * (P * S) + p[None] * S + s[:, None], sum_w, mask=fits)


def causal_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """Tiles of the scan. Few warps: on an H200 two are faster than four by a third in the backward pass."""
    width, full = power_of_two(head_dim), power_of_two(stored_rank(rank))
    block = min(full, 64 if width <= 128 else 32)
    warps = 2 if width <= 64 and dtype != torch.float32 else 4
    blocks = ceil_div(stored_rank(rank), block)
    return Tiles(32 if width <= 128 else 16, width, block, blocks, warps, 3 if blocks == 1 and width <= 64 else 1)


def chunk_carries(
    z: Tensor,
    log_decay: Tensor | None,
    heads: int,
    tables: tuple[Tensor, ...],
    is_single_chunk: bool,
    *,
    sums: Tensor | None = None,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Return the sums before each chunk (after it, if `reverse`), (chunks, H, 2, p) float32.

    Empty where no chunk has a predecessor. sums: of the chunks, computed from z if None. initial, final: (B, H, 2, p),
    the sums before the first token, and the place of those after the last (not written for single chunks).
    """
    _, lengths, first_chunk, _, chunk_start, chunk_end = tables
    p, chunks = z.shape[1] // (2 * heads), chunk_start.shape[0]
    if is_single_chunk:
        return torch.empty((0, heads, 2, p), dtype=torch.float32, device=z.device) if initial is None else initial
    rate = z if log_decay is None else log_decay  # never read without decay
    constants = {"HEADS": heads, "P": p, "DECAY": log_decay is not None, "REVERSE": reverse}
    if sums is None:
        sums = torch.empty((chunks, heads, 2, p), dtype=torch.float32, device=z.device)
        _chunk_sums_kernel[(chunks, 2 * heads)](
            z, sums, rate, chunk_start, chunk_end, BT=32, BP=power_of_two(p), **constants
        )
    carries = torch.empty_like(sums)
    _carries_kernel[(lengths.shape[0], 2 * heads, ceil_div(p, 16))](
        sums, carries, sums if initial is None else initial, sums if final is None else final, rate, first_chunk,
        lengths, ROWS=CHUNK, BC=16, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None, **constants,
    )  # fmt: skip
    return carries


def _initial_gradient(grad_z: Tensor, row: Tensor, lengths: Tensor, heads: int, log_decay: Tensor | None) -> Tensor:
    """The sums before the first token enter through it alone, s_0 = γ s + z_0: their gradient is γ dz_0."""
    first = grad_z[row.clamp(0, len(grad_z) - 1)].float().view(len(row), 2, heads, -1).transpose(1, 2)
    first = first * (lengths > 0)[:, None, None, None]
    return first if log_decay is None else first * log_decay.exp()[:, None, None]


class CausalSumScores(torch.autograd.Function):
    """Scores (rows, H, 2, S), energies (B, H, 2, S), traces (H,) and final sums (B, H, 2, p) of the causal sums.

    Args:
        x: rows of all sequences, (rows, d).
        weight: weight of the projection, (2d, d); None if `qk` is passed.
        bias: bias of the projection, (2d,).
        qk: q and k, (rows, 2d), if they are computed elsewhere.
        w_e: (H, p, s).
        w_r: (H, p, s).
        log_decay: log γ, (H,); None for the running mean.
        initial: the sums before the first token, (B, H, 2, p) float32.
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
        dtype: torch.dtype,
        covers_rows: bool,
        is_single_chunk: bool,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, qk)]
        z, projected, weight = project(x if qk is None else None, weight, bias, qk, dtype)
        (heads, p, rank), trace = w_e.shape, (w_e.float() * w_r.float()).sum((1, 2))
        stored = stored_rank(rank)
        chunk_start, chunk_end = tables[4], tables[5]
        tiles, chunks = causal_tiles(z.dtype, p, rank), chunk_start.shape[0]
        new = torch.empty if covers_rows else torch.zeros
        scores = new((z.shape[0], heads, 2, stored), dtype=z.dtype, device=z.device)
        energy = torch.empty((chunks, heads, 2, stored), dtype=torch.float32, device=z.device)
        final = torch.empty((tables[0].shape[0], heads, 2, p), dtype=torch.float32, device=z.device)
        carries = chunk_carries(z, log_decay, heads, tables, is_single_chunk, initial=initial, final=final)
        _causal_scores_kernel[(chunks, 2 * heads)](
            z, w_e, w_r, carries, final, scores, energy, z if log_decay is None else log_decay, chunk_start, chunk_end,
            NS=tiles.rank_blocks, HAS_CARRY_IN=carries.shape[0] > 0, WRITES_FINAL=is_single_chunk,
            num_warps=max(1, tiles.warps // 2), **_constants(z, w_e, log_decay, tiles),
        )  # fmt: skip
        ctx.save_for_backward(projected, weight, z, w_e, w_r, log_decay, carries, *tables)
        ctx.settings = (covers_rows, is_single_chunk)
        ctx.mark_non_differentiable(final)
        return scores, segment_sum(energy, tables[2], is_single_chunk), trace, final

    @staticmethod
    def backward(
        ctx: Any, grad_scores: Tensor, grad_energy: Tensor, grad_trace: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        x, weight, z, w_e, w_r, log_decay, carries, *tables = ctx.saved_tensors
        covers_rows, is_single_chunk = ctx.settings
        (heads, p, rank), stored = w_e.shape, stored_rank(w_e.shape[2])
        tiles, chunks = causal_tiles(z.dtype, p, rank), tables[4].shape[0]
        grad_scores, grad_energy = grad_scores.contiguous(), grad_energy.contiguous()
        # Initial sums that have a gradient come from the q and k of other ranks, which are read later.
        if tiles.rank_blocks == 1 and covers_rows and not ctx.needs_input_grad[7] and can_overwrite_saved():
            grad_z = z
        else:
            grad_z = (torch.empty_like if covers_rows else torch.zeros_like)(z)
        new: dict[str, Any] = {"dtype": torch.float32, "device": z.device}
        grad_wx = torch.empty((chunks, heads, 2, p, stored), **new)
        grad_bias, grad_decay = torch.empty((chunks, 2 * heads * p), **new), torch.empty((chunks, heads, 2), **new)
        sums = torch.empty((chunks, heads, 2, p), **new)
        blocks = CHUNK // tiles.tokens
        block_carries = torch.empty((0 if log_decay is None else chunks * blocks, heads, 2, p), **new)
        constants = _constants(z, w_e, log_decay, tiles)
        places = (z if log_decay is None else log_decay, *tables[3:])
        has_carry_in = carries.shape[0] > 0
        _causal_backward_sums_kernel[(chunks, 2 * heads)](
            z, w_e, w_r, carries, grad_scores, grad_energy, grad_z, block_carries, sums, grad_wx, *places,
            BLOCKS=blocks, NS=tiles.rank_blocks, HAS_CARRY_IN=has_carry_in, HAS_CARRY_OUT=not is_single_chunk,
            num_warps=tiles.warps, **constants,
        )  # fmt: skip
        after = chunk_carries(z, log_decay, heads, tuple(tables), is_single_chunk, sums=sums, reverse=True)
        _causal_backward_rows_kernel[(chunks, 2 * heads)](
            z, w_e, w_r, block_carries, after, grad_scores, grad_energy, grad_z, grad_bias, grad_decay, *places,
            BLOCKS=blocks, NS=tiles.rank_blocks, HAS_CARRY_OUT=not is_single_chunk, num_warps=tiles.warps, **constants,
        )  # fmt: skip
        if tiles.rank_blocks > 1:
            _causal_backward_weights_kernel[(chunks, 2 * heads, tiles.rank_blocks)](
                z, w_e, w_r, carries, grad_scores, grad_energy, grad_wx, *places, HAS_CARRY_IN=has_carry_in,
                num_warps=tiles.warps, **constants,
            )  # fmt: skip
        grad_initial = None
        if ctx.needs_input_grad[7]:
            grad_initial = _initial_gradient(grad_z, tables[0], tables[1], heads, log_decay)
        grad_x = None if weight is None else input_gradient(grad_z, weight, grad_scores)
        of_projection, of_weights = finish_gradients(
            ctx.dtypes, grad_x, grad_z, x, weight, grad_bias, grad_wx, w_e, w_r, grad_trace
        )
        of_decay = None if log_decay is None else grad_decay.sum((0, 2))
        return *of_projection, *of_weights, of_decay, grad_initial, *(None,) * (3 + len(tables))


def _constants(z: Tensor, w_e: Tensor, log_decay: Tensor | None, tiles: Tiles) -> dict[str, Any]:
    heads, p, rank = w_e.shape
    return {
        "HEADS": heads, "P": p, "S": stored_rank(rank), "RANK": rank, "BT": tiles.tokens, "BP": tiles.width,
        "BS": tiles.rank, "DECAY": log_decay is not None, "PRECISION": precision(z.dtype),
        "FINE": float32_precision(z.dtype), "num_stages": tiles.stages,
    }  # fmt: skip


# Two-sided sums


@jit_kernel
def _two_sided_kernel(
    z, grad, out, partial, before, after, grad_before, grad_after, grad_decay, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_GRADIENT_CARRIES: tl.constexpr,
    BACKWARD: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Forward: out = K z with K_ij = γ^|i−j|. Backward: out = K ds, and Σ_i of the gradient of log γ.

    Two sweeps over the chunk. The first adds the earlier rows, the second, from the end, the later ones.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2)
    triangle = lower_triangle(rate, BT, True)
    decays = powers(rate, t + 1, True)
    index = chunk.to(tl.int64) * (2 * HEADS) + lane
    carry = load_carry(before, index, P, BP, HAS_BEFORE)
    grad_carry = load_carry(grad_before, index, P, BP, HAS_GRADIENT_CARRIES)
    for first in range(start, end, BT):
        row = first + t
        inside = (row < end)[:, None] & (p[None] < P)
        place = row[:, None] * (2 * HEADS * P) + column[None]
        rows = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        sums = dot(triangle, rows, FINE) + decays[:, None] * carry[None]
        carry = last_row(sums, end - first, BT)
        if BACKWARD:
            ds = tl.load(grad + place, mask=inside, other=0.0)
            tl.store(partial + place, sums - rows, mask=inside)
            sums = dot(triangle, ds, FINE) + decays[:, None] * grad_carry[None]
            grad_carry = last_row(sums, end - first, BT)
            rows = ds
        tl.store(out + place, sums - rows, mask=inside)
    tl.debug_barrier()  # the second sweep reads what other threads wrote
    later = load_carry(after, index, P, BP, HAS_AFTER)
    grad_later = load_carry(grad_after, index, P, BP, HAS_GRADIENT_CARRIES)
    sum_decay = tl.zeros((BP,), tl.float32)
    blocks = tl.cdiv(end - start, BT)
    for back in range(blocks):
        first = start + (blocks - 1 - back) * BT
        row = first + t
        inside = (row < end)[:, None] & (p[None] < P)
        place = row[:, None] * (2 * HEADS * P) + column[None]
        ahead = powers(rate, tl.maximum(tl.minimum(end - first, BT) - t, 0), True)
        rows = tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
        sums = tl.where(inside, dot(tl.trans(triangle), rows, FINE) + ahead[:, None] * later[None], 0.0)
        later = tl.sum(tl.where(t[:, None] == 0, sums, 0.0), 0)
        earlier = tl.load(out + place, mask=inside, other=0.0)
        if BACKWARD:
            ds = tl.load(grad + place, mask=inside, other=0.0)
            past = tl.load(partial + place, mask=inside, other=0.0)
            total = tl.where(inside, dot(tl.trans(triangle), ds, FINE) + ahead[:, None] * grad_later[None], 0.0)
            grad_later = tl.sum(tl.where(t[:, None] == 0, total, 0.0), 0)
            sum_decay += tl.sum(total * past + (earlier + ds) * (sums - rows), 0)
            sums = total
        tl.store(out + place, earlier + sums, mask=inside)
    if BACKWARD:
        tl.store(grad_decay + index, tl.sum(sum_decay, 0))


class TwoSidedSum(torch.autograd.Function):
    """s_i = Σ_j γ^|i−j| z_j in float32, (rows, 2·H·p).

    Args:
        z: q and k, (rows, 2·H·p).
        log_decay: log γ, (H,).
        past: the sums before the first token, (B, H, 2, p).
        future: the sums after the last token, from the end, (B, H, 2, p).
        heads: H.
        covers_rows: the sequences cover every row.
        is_single_chunk: every sequence has one chunk.
        tables: the tensors of `Sequences`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        log_decay: Tensor,
        past: Tensor | None,
        future: Tensor | None,
        heads: int,
        covers_rows: bool,
        is_single_chunk: bool,
        *tables: Tensor,
    ) -> Tensor:
        before = chunk_carries(z, log_decay, heads, tables, is_single_chunk, initial=past)
        after = chunk_carries(z, log_decay, heads, tables, is_single_chunk, initial=future, reverse=True)
        out = (torch.empty_like if covers_rows else torch.zeros_like)(z, dtype=torch.float32)
        _launch_two_sided(z, out, out, out, before, after, before, after, out, log_decay, heads, tables, False)
        ctx.save_for_backward(z, log_decay, before, after, *tables)
        ctx.settings = (heads, covers_rows, is_single_chunk)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        z, log_decay, before, after, *tables = ctx.saved_tensors
        heads, covers_rows, is_single_chunk = ctx.settings
        grad, where = grad.contiguous(), tuple(tables)
        grad_before = chunk_carries(grad, log_decay, heads, where, is_single_chunk)
        grad_after = chunk_carries(grad, log_decay, heads, where, is_single_chunk, reverse=True)
        out, partial = (torch.empty_like if covers_rows else torch.zeros_like)(grad), torch.empty_like(grad)
        grad_decay = torch.empty((where[4].shape[0], heads, 2), dtype=torch.float32, device=z.device)
        _launch_two_sided(
            z, grad, out, partial, before, after, grad_before, grad_after, grad_decay, log_decay, heads, where, True
        )
        starts, lengths = where[:2]
        edges = [
            _initial_gradient(out, row, lengths, heads, log_decay) if needs_grad else None
            for row, needs_grad in ((starts, ctx.needs_input_grad[2]), (starts + lengths - 1, ctx.needs_input_grad[3]))
        ]
        return out.to(z.dtype), grad_decay.sum((0, 2)), *edges, *(None,) * (3 + len(tables))


def _launch_two_sided(
    z: Tensor,
    grad: Tensor,
    out: Tensor,
    partial: Tensor,
    before: Tensor,
    after: Tensor,
    grad_before: Tensor,
    grad_after: Tensor,
    grad_decay: Tensor,
    log_decay: Tensor,
    heads: int,
    tables: tuple[Tensor, ...],
    is_backward: bool,
) -> None:
    p = z.shape[1] // (2 * heads)
    tiles = causal_tiles(z.dtype, p, 16)
    _two_sided_kernel[(tables[4].shape[0], 2 * heads)](
        z, grad, out, partial, before, after, grad_before, grad_after, grad_decay, log_decay, tables[4], tables[5],
        HEADS=heads, P=p, BT=tiles.tokens, BP=tiles.width, HAS_BEFORE=before.shape[0] > 0, HAS_AFTER=after.shape[0] > 0,
        HAS_GRADIENT_CARRIES=is_backward and grad_before.shape[0] > 0, BACKWARD=is_backward,
        FINE=float32_precision(z.dtype), num_warps=4, num_stages=1,
    )  # fmt: skip
