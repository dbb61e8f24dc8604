"""The delta rule: forward and backward kernels of a layer between its linear maps.

`DeltaFeatures`  c_i = b + Σ_j w_j ⊙ z_{i−j},   a = c σ(c),   φ = a / ‖a‖ for q and k,   h = a
`DeltaRule`      the rule on both sides                                                (reference: `ops/delta_rule.py`)
`GatedScores`    o = w ⊙ x / √(mean(x²) + ε) ⊙ g σ(g) or σ(g) with x = [e; r], and the energies Σ_i x_i²

The rule, per lane and chunk of C tokens, with G_i = Σ_{j≤i} log γ_j and D_ij = e^(G_i − G_j) for j ≤ i:

    T = (I + [β_i k_i·k_j D_ij]_{j<i})⁻¹
    U = T diag(β) (V − e^G K W),   Y = e^G Q W + (Q Kᵀ ∘ D) U,   W ← e^(G_C) W + Kᵀ e^(G_C − G) U

T does not depend on earlier chunks: one program per chunk. A scan over the chunks carries W in float32; its columns are
independent: a program processes a block of them. The backward pass saves the arguments and T. It repeats the scan
for U and the W before each chunk, and runs a reverse scan for Z and the gradient dW of the W after each chunk,

    dU = (Q Kᵀ ∘ D)ᵀ dY + e^(G_C − G) K dW,   Z = Tᵀ dU
    dW ← e^(G_C) dW + Qᵀ e^G dY − Kᵀ β e^G Z

Then one program per chunk computes, with P = dY Uᵀ ∘ D and A = −Z Uᵀ ∘ D below the diagonal,

    dQ = P K + e^G dY Wᵀ                 dV = β Z
    dK = Pᵀ Q + (βA + (βA)ᵀ) K + e^(G_C − G) U dWᵀ − β e^G Z Wᵀ
    dβ = Z·V + (A ∘ K Kᵀ) 1 − e^G K·(Z Wᵀ)

The gradient of log γ is a sum over G: each pair (i, j) enters with + and −, as the same float32 number, so that equal
terms cancel exactly.

C is 32 and W is stored transposed: Triton 3.6 miscompiles larger mixed warp-group products (see `causal_sum`).
Layouts: φ (B, N, 2, H, p), h (B, N, 2, H, s), log γ (B, N, H) and β (B, N, 2, H) float32, scores (B, N, H, 2, s),
W (B, 2, H, p, s) float32, T (lanes, chunks, C, C). A lane is (sequence, side, head); the keys of a side are the queries
of the other one. Sums over tokens are partial sums, added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    Tiles,
    ceil_div,
    dot,
    float32_precision,
    forbid_double_backward,
    inverse_norms,
    jit_kernel,
    power_of_two,
    precision,
)

CHUNK = 32  # tokens
ROWS = 128  # tokens of a program whose partial sums are added afterwards
BLOCK = 1024  # numbers of a block in the elementwise kernels


# Places in memory


@triton.jit
def chunk_places(lane, chunk, length, HEADS: tl.constexpr, C: tl.constexpr):
    """The rows of a chunk's first token: own side, other side, in the scores, in log γ; and which tokens exist."""
    side, head = lane // HEADS % 2, lane % HEADS
    token = (lane // (2 * HEADS)).to(tl.int64) * length + chunk * C
    first = token * (2 * HEADS)
    exists = chunk * C + tl.arange(0, C) < length
    own_row, other_row = first + side * HEADS + head, first + (1 - side) * HEADS + head
    return own_row, other_row, first + head * 2 + side, token * HEADS + head, exists


@triton.jit
def load_rows(base, row, exists, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BW: tl.constexpr):
    """C rows of WIDTH numbers, STRIDE rows apart: BW columns from `first` on, zeros outside."""
    column = first + tl.arange(0, BW)
    offset = tl.arange(0, C)[:, None] * (STRIDE * WIDTH) + column[None]
    return tl.load(base + row * WIDTH + offset, mask=exists[:, None] & (column[None] < WIDTH), other=0.0)


@triton.jit
def store_rows(
    base, row, exists, first, value, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    column = first + tl.arange(0, BW)
    offset = tl.arange(0, C)[:, None] * (STRIDE * WIDTH) + column[None]
    inside = exists[:, None] & (column[None] < WIDTH)
    tl.store(base + row * WIDTH + offset, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def transposed_places(lane, first, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """Offsets of BS columns of a lane's (p, s) matrix, as rows, in (lanes, p, s) and in (s, p), and which exist."""
    p, s = tl.arange(0, BP)[None], first + tl.arange(0, BS)[:, None]
    return lane.to(tl.int64) * (P * S) + p * S + s, s * P + p, (p < P) & (s < S)


@triton.jit
def load_decay(log_decay, row, exists, HEADS: tl.constexpr, C: tl.constexpr):
    """G of a chunk, and its last entry bit for bit: the errors of both cancel in G_C − G."""
    t = tl.arange(0, C)
    total = tl.cumsum(tl.load(log_decay + row + t * HEADS, mask=exists, other=0.0), 0)
    return total, tl.sum(tl.where(t == C - 1, total, 0.0), 0)


@triton.jit
def decay_between(total, C: tl.constexpr, HAS_DIAGONAL: tl.constexpr):
    """D, with or without its diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None]
    past = i >= j if HAS_DIAGONAL else i > j
    return tl.exp(tl.where(past, total[:, None] - total[None], float("-inf")))


# The rule, forward


@triton.jit
def unit_lower_inverse(a, SIZE: tl.constexpr, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """(I + a)⁻¹ for a strictly lower triangular, from blocks of two on: as stable as substitution."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level)), a, 0.0)
        inverse -= dot(inverse, dot(between, inverse, FINE), FINE)
    return inverse


@jit_kernel
def _triangular_inverse_kernel(
    phi, log_decay, beta, inverse, length, chunks,
    HEADS: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """T of each chunk."""
    lane, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    own_row, other_row, _score_row, decay_row, exists = chunk_places(lane, chunk, length, HEADS, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None]
    key = load_rows(phi, other_row, exists, 0, 2 * HEADS, P, C, BP)
    total, _last = load_decay(log_decay, decay_row, exists, HEADS, C)
    strength = tl.load(beta + own_row + tl.arange(0, C) * (2 * HEADS), mask=exists, other=0.0)
    overlap = dot(key, tl.trans(key), PRECISION) * decay_between(total, C, False) * strength[:, None]
    solve = unit_lower_inverse(overlap, C, LEVELS, FINE)
    place = inverse + tl.program_id(0).to(tl.int64) * (C * C) + i * C + j
    tl.store(place, solve.to(inverse.dtype.element_ty))


@jit_kernel
def _delta_scan_kernel(
    phi, h, log_decay, beta, inverse, initial, scores, final, states, updates, length, chunks,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WRITES_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores and the last W, or for the backward pass the W before each chunk and U."""
    lane, column = tl.program_id(0), tl.program_id(1) * BS
    t = tl.arange(0, C)
    place, transposed, inside = transposed_places(lane, column, P, S, BP, BS)
    w = tl.load(initial + place, mask=inside, other=0.0) if HAS_INITIAL else tl.zeros((BS, BP), tl.float32)
    for chunk in range(chunks):
        own_row, other_row, score_row, decay_row, exists = chunk_places(lane, chunk, length, HEADS, C)
        block = lane.to(tl.int64) * chunks + chunk
        key = load_rows(phi, other_row, exists, 0, 2 * HEADS, P, C, BP)
        value = load_rows(h, own_row, exists, column, 2 * HEADS, S, C, BS).to(tl.float32)
        solve = tl.load(inverse + block * (C * C) + t[:, None] * C + t[None])
        total, last = load_decay(log_decay, decay_row, exists, HEADS, C)
        strength = tl.load(beta + own_row + t * (2 * HEADS), mask=exists, other=0.0)
        from_start, narrow = tl.exp(total)[:, None], tl.trans(w.to(key.dtype))
        missing = strength[:, None] * (value - from_start * dot(key, narrow, PRECISION))
        u = dot(solve, missing.to(key.dtype), PRECISION)
        if WRITES_SCORES:
            query = load_rows(phi, own_row, exists, 0, 2 * HEADS, P, C, BP)
            near = dot(query, tl.trans(key), PRECISION) * decay_between(total, C, True)
            result = from_start * dot(query, narrow, PRECISION)
            result += dot(near.to(key.dtype), u.to(key.dtype), PRECISION)
            store_rows(scores, score_row, exists, column, result, 2 * HEADS, S, C, BS)
        else:
            tl.store(states + block * (P * S) + transposed, w.to(key.dtype), mask=inside)
            store_rows(updates, block * C, t >= 0, column, u, 1, S, C, BS)
        update = (tl.exp(last - total)[:, None] * u).to(key.dtype)
        w = tl.exp(last) * w + dot(tl.trans(update), key, PRECISION)
    if WRITES_SCORES:
        tl.store(final + place, w, mask=inside)


# The rule, backward


@jit_kernel
def _delta_backward_scan_kernel(
    phi, log_decay, beta, inverse, grad_scores, grad_final, grad_states, solved, grad_initial, length, chunks,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: the gradient of the W after each chunk, Z, and the gradient of the first W."""
    lane, column = tl.program_id(0), tl.program_id(1) * BS
    t = tl.arange(0, C)
    place, transposed, inside = transposed_places(lane, column, P, S, BP, BS)
    grad_w = tl.load(grad_final + place, mask=inside, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        own_row, other_row, score_row, decay_row, exists = chunk_places(lane, chunk, length, HEADS, C)
        block = lane.to(tl.int64) * chunks + chunk
        key = load_rows(phi, other_row, exists, 0, 2 * HEADS, P, C, BP)
        query = load_rows(phi, own_row, exists, 0, 2 * HEADS, P, C, BP)
        grad = load_rows(grad_scores, score_row, exists, column, 2 * HEADS, S, C, BS)
        solve = tl.load(inverse + block * (C * C) + t[None] * C + t[:, None])  # Tᵀ
        total, last = load_decay(log_decay, decay_row, exists, HEADS, C)
        strength = tl.load(beta + own_row + t * (2 * HEADS), mask=exists, other=0.0)
        from_start, narrow = tl.exp(total)[:, None], grad_w.to(key.dtype)
        tl.store(grad_states + block * (P * S) + transposed, narrow, mask=inside)
        ahead = tl.where(t[:, None] <= t[None], total[None] - total[:, None], float("-inf"))
        near = dot(key, tl.trans(query), PRECISION) * tl.exp(ahead)
        grad_u = tl.exp(last - total)[:, None] * dot(key, tl.trans(narrow), PRECISION)
        grad_u += dot(near.to(key.dtype), grad, PRECISION)
        z = dot(solve, grad_u.to(key.dtype), PRECISION)
        store_rows(solved, block * C, t >= 0, column, z, 1, S, C, BS)
        grad_w = tl.exp(last) * grad_w
        grad_w += dot(tl.trans((from_start * grad).to(key.dtype)), query, PRECISION)
        grad_w -= dot(tl.trans((from_start * strength[:, None] * z).to(key.dtype)), key, PRECISION)
    tl.store(grad_initial + place, grad_w, mask=inside)


@triton.jit
def row_products(a, a_row, b_row, exists, HEADS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
                 BQ: tl.constexpr, NP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The products of two sets of rows, (C, C), over blocks of the head width."""
    total = tl.zeros((C, C), tl.float32)
    for part in tl.static_range(NP):
        left = load_rows(a, a_row, exists, part * BQ, 2 * HEADS, P, C, BQ)
        right = load_rows(a, b_row, exists, part * BQ, 2 * HEADS, P, C, BQ)
        total += dot(left, tl.trans(right), PRECISION)
    return total


@jit_kernel
def _delta_gradients_kernel(
    phi, h, log_decay, beta, states, updates, grad_states, solved, grad_scores,
    grad_query, grad_key, grad_h, grad_decay, grad_beta, length, chunks,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BQ: tl.constexpr, NP: tl.constexpr,
    BS: tl.constexpr, NS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's φ, h, β, and of log γ per side."""
    lane, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    t = tl.arange(0, C)
    own_row, other_row, score_row, decay_row, exists = chunk_places(lane, chunk, length, HEADS, C)
    block = tl.program_id(0).to(tl.int64)
    total, last = load_decay(log_decay, decay_row, exists, HEADS, C)
    strength = tl.load(beta + own_row + t * (2 * HEADS), mask=exists, other=0.0)
    from_start, to_end = tl.exp(total)[:, None], tl.exp(last - total)[:, None]

    near = tl.zeros((C, C), tl.float32)
    for part in tl.static_range(NS):
        grad = load_rows(grad_scores, score_row, exists, part * BS, 2 * HEADS, S, C, BS)
        u = load_rows(updates, block * C, t >= 0, part * BS, 1, S, C, BS)
        near += dot(grad, tl.trans(u), PRECISION)
    near *= decay_between(total, C, True)
    each = near * row_products(phi, own_row, other_row, exists, HEADS, P, C, BQ, NP, PRECISION)
    grad_total = tl.sum(each, 1) - tl.sum(each, 0)
    near = near.to(phi.dtype.element_ty)

    overlap = tl.zeros((C, C), tl.float32)
    grad_strength = tl.zeros((C,), tl.float32)
    for part in tl.static_range(NS):
        z = load_rows(solved, block * C, t >= 0, part * BS, 1, S, C, BS)
        u = load_rows(updates, block * C, t >= 0, part * BS, 1, S, C, BS)
        overlap -= dot(z, tl.trans(u), PRECISION)
        value = load_rows(h, own_row, exists, part * BS, 2 * HEADS, S, C, BS)
        grad_strength += tl.sum(z.to(tl.float32) * value.to(tl.float32), 1)
        store_rows(grad_h, own_row, exists, part * BS, strength[:, None] * z, 2 * HEADS, S, C, BS)
    overlap *= decay_between(total, C, False)
    each = overlap * row_products(phi, other_row, other_row, exists, HEADS, P, C, BQ, NP, PRECISION)
    grad_strength += tl.sum(each, 1)
    each *= strength[:, None]
    grad_total += tl.sum(each, 1) - tl.sum(each, 0)
    overlap = (overlap * strength[:, None]).to(phi.dtype.element_ty)

    grad_last = 0.0  # the gradient of G_C
    for part in range(NP):
        query = load_rows(phi, own_row, exists, part * BQ, 2 * HEADS, P, C, BQ)
        key = load_rows(phi, other_row, exists, part * BQ, 2 * HEADS, P, C, BQ)
        p = part * BQ + tl.arange(0, BQ)[None]
        read = tl.zeros((C, BQ), tl.float32)
        stored = tl.zeros((C, BQ), tl.float32)
        ahead = tl.zeros((C, BQ), tl.float32)
        for piece in tl.static_range(NS):
            s = piece * BS + tl.arange(0, BS)[:, None]
            offset, inside = block * (P * S) + s * P + p, (p < P) & (s < S)
            w = tl.load(states + offset, mask=inside, other=0.0)
            grad_w = tl.load(grad_states + offset, mask=inside, other=0.0)
            grad = load_rows(grad_scores, score_row, exists, piece * BS, 2 * HEADS, S, C, BS)
            u = load_rows(updates, block * C, t >= 0, piece * BS, 1, S, C, BS)
            z = load_rows(solved, block * C, t >= 0, piece * BS, 1, S, C, BS)
            read += dot(grad, w, PRECISION)
            stored += dot(z, w, PRECISION)
            ahead += dot(u, grad_w, PRECISION)
            grad_last += tl.exp(last) * tl.sum(tl.sum(w.to(tl.float32) * grad_w.to(tl.float32), 1), 0)
        read, stored, ahead = read * from_start, stored * from_start, ahead * to_end
        along = tl.sum(stored * key, 1)
        later = tl.sum(ahead * key, 1)
        grad_strength -= along
        grad_total += tl.sum(read * query, 1) - strength * along - later
        grad_last += tl.sum(later, 0)
        store_rows(grad_query, own_row, exists, part * BQ, read + dot(near, key, PRECISION), 2 * HEADS, P, C, BQ)
        ahead += dot(tl.trans(near), query, PRECISION) - strength[:, None] * stored
        ahead += dot(overlap, key, PRECISION)
        ahead += dot(tl.trans(overlap), key, PRECISION)
        store_rows(grad_key, other_row, exists, part * BQ, ahead, 2 * HEADS, P, C, BQ)
    place = own_row + t * (2 * HEADS)
    tl.store(grad_beta + place, grad_strength, mask=exists)
    tl.store(grad_decay + place, tl.cumsum(grad_total, 0, reverse=True) + grad_last, mask=exists)


def delta_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """Tiles of the scans: `rank` columns of W per program. float32 products use registers instead of tensor cores.

    At most 54 KiB of shared memory, which every GPU of compute capability 8.0 or higher has.
    """
    width, is_float32 = power_of_two(head_dim), dtype == torch.float32
    block = min(power_of_two(rank), 16 if is_float32 else 32)
    return Tiles(CHUNK, width, block, ceil_div(rank, block), 8 if is_float32 else 4, 1 if is_float32 else 2)


class DeltaRule(torch.autograd.Function):
    """Scores (B, N, H, 2, s) and the last W, (B, 2, H, p, s) float32.

    Args:
        phi: φ(q) and φ(k), (B, N, 2, H, p).
        h: h_r and h_e, (B, N, 2, H, s).
        log_decay: log γ, (B, N, H) float32.
        beta: β, (B, N, 2, H) float32.
        initial: the W before the first token, (B, 2, H, p, s) float32.
    """

    @staticmethod
    def forward(
        ctx: Any, phi: Tensor, h: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, length, _, heads, p = phi.shape
        rank = h.shape[-1]
        chunks = ceil_div(length, CHUNK)
        inverse = torch.empty((batch * 2 * heads, chunks, CHUNK, CHUNK), dtype=phi.dtype, device=phi.device)
        _triangular_inverse_kernel[(batch * 2 * heads * chunks,)](
            phi, log_decay, beta, inverse, length, chunks, HEADS=heads, P=p, BP=power_of_two(p), C=CHUNK,
            LEVELS=CHUNK.bit_length() - 1, PRECISION=precision(phi.dtype),
            FINE=float32_precision(phi.dtype),  # T is a product of many factors: not in 16 bits
            num_warps=8 if phi.dtype == torch.float32 else 4,
        )  # fmt: skip
        scores = torch.empty((batch, length, heads, 2, rank), dtype=phi.dtype, device=phi.device)
        final = torch.empty((batch, 2, heads, p, rank), dtype=torch.float32, device=phi.device)
        _launch_scan(phi, h, log_decay, beta, inverse, initial, scores, final, scores, scores, True)
        ctx.save_for_backward(phi, h, log_decay, beta, initial, inverse)
        return scores, final

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        phi, h, log_decay, beta, initial, inverse = ctx.saved_tensors
        length, heads, p, rank = phi.shape[1], phi.shape[3], phi.shape[4], h.shape[-1]
        lanes, chunks = inverse.shape[:2]
        tiles = delta_tiles(phi.dtype, p, rank)
        grad_scores, grad_final = grad_scores.contiguous(), grad_final.contiguous()
        states = torch.empty((lanes, chunks, rank, p), dtype=phi.dtype, device=phi.device)  # Wᵀ before each chunk
        updates = torch.empty((lanes, chunks, CHUNK, rank), dtype=phi.dtype, device=phi.device)  # U
        _launch_scan(phi, h, log_decay, beta, inverse, initial, states, states, states, updates, False)
        grad_states, solved = torch.empty_like(states), torch.empty_like(updates)
        grad_initial = torch.empty_like(grad_final)
        _delta_backward_scan_kernel[(lanes, tiles.rank_blocks)](
            phi, log_decay, beta, inverse, grad_scores, grad_final, grad_states, solved, grad_initial, length, chunks,
            HEADS=heads, P=p, S=rank, BP=tiles.width, BS=tiles.rank, C=CHUNK, PRECISION=precision(phi.dtype),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        grad_query, grad_key, grad_h = torch.empty_like(phi), torch.empty_like(phi), torch.empty_like(h)
        grad_beta, grad_decay = torch.empty_like(beta), torch.empty_like(beta)
        part = min(tiles.width, 32 if phi.dtype == torch.float32 else 64)
        _delta_gradients_kernel[(lanes * chunks,)](
            phi, h, log_decay, beta, states, updates, grad_states, solved, grad_scores,
            grad_query, grad_key, grad_h, grad_decay, grad_beta, length, chunks,
            HEADS=heads, P=p, S=rank, BQ=part, NP=ceil_div(p, part), BS=tiles.rank, NS=tiles.rank_blocks, C=CHUNK,
            PRECISION=precision(phi.dtype), num_warps=tiles.warps, num_stages=1,
        )  # fmt: skip
        return grad_query + grad_key, grad_h, grad_decay.sum(2), grad_beta, None if initial is None else grad_initial


def _launch_scan(
    phi: Tensor,
    h: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    inverse: Tensor,
    initial: Tensor | None,
    scores: Tensor,
    final: Tensor,
    states: Tensor,
    updates: Tensor,
    writes_scores: bool,
) -> None:
    heads, p, rank = phi.shape[3], phi.shape[4], h.shape[-1]
    tiles = delta_tiles(phi.dtype, p, rank)
    _delta_scan_kernel[(inverse.shape[0], tiles.rank_blocks)](
        phi, h, log_decay, beta, inverse, final if initial is None else initial, scores, final, states, updates,
        phi.shape[1], inverse.shape[1], HEADS=heads, P=p, S=rank, BP=tiles.width, BS=tiles.rank, C=CHUNK,
        HAS_INITIAL=initial is not None, WRITES_SCORES=writes_scores, PRECISION=precision(phi.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


# Features: convolution, SiLU, cosine map


@triton.jit
def convolve(z, weight, bias, row, first, column, inside, COLUMNS: tl.constexpr, K: tl.constexpr):
    """c of rows counted from token `first`, at which z points; float32, zero in columns that do not exist."""
    total = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None]
    for j in tl.static_range(K):
        source = (row - j)[:, None]
        exists = (source >= -first) & inside[None]
        past = tl.load(z + source * COLUMNS + column[None], mask=exists, other=0.0).to(tl.float32)
        total += past * tl.load(weight + j * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None]
    return total


@jit_kernel
def _delta_features_kernel(
    z, weight, bias, out, length,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, IS_NORMALISED: tl.constexpr,
):  # fmt: skip
    """Lanes of WIDTH columns, the first at column FIRST of z (B, N, COLUMNS) → (B, N, LANES, WIDTH)."""
    blocks = tl.cdiv(length, BT)
    first, lane = tl.program_id(0) % blocks * BT, tl.program_id(1)
    token = (tl.program_id(0) // blocks).to(tl.int64) * length + first
    t, w = tl.arange(0, BT), tl.arange(0, BW)
    row = tl.minimum(t, length - 1 - first)  # rows after the last token are computed and dropped
    column = FIRST + lane * WIDTH + w
    c = convolve(z + token * COLUMNS, weight, bias, row, first, column, w < WIDTH, COLUMNS, K)
    a = c * tl.sigmoid(c)
    if IS_NORMALISED:
        inverse, _above = inverse_norms(a)
        a *= inverse[:, None]
    place = out + (token * LANES + lane) * WIDTH + t[:, None] * (LANES * WIDTH) + w[None]
    tl.store(place, a.to(out.dtype.element_ty), mask=(first + t < length)[:, None] & (w[None] < WIDTH))


@jit_kernel
def _delta_features_backward_kernel(
    z, weight, bias, grad_out, grad_z, parts, length,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, IS_NORMALISED: tl.constexpr, BK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """dz_i = Σ_j w_j ⊙ dc_{i+j}, dw_j = Σ_i z_i ⊙ dc_{i+j} and db = Σ_i dc_i, with dc recomputed from z."""
    runs = tl.cdiv(length, RUN)
    begin, lane = tl.program_id(0) % runs * RUN, tl.program_id(1)
    start = (tl.program_id(0) // runs).to(tl.int64) * length
    t, w, index = tl.arange(0, BT), tl.arange(0, BW), tl.arange(0, BK)[:, None]
    column, inside = FIRST + lane * WIDTH + w, w < WIDTH
    sums = tl.zeros((BK, BW), tl.float32)  # rows: the K rows of the weight, then the bias
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        token = start + first
        place, exists = t[:, None] * COLUMNS + column[None], (first + t < length)[:, None] & inside[None]
        value = tl.load(z + token * COLUMNS + place, mask=exists, other=0.0).to(tl.float32)
        total = tl.zeros((BT, BW), tl.float32)
        for j in tl.static_range(K):
            row = tl.minimum(t + j, length - 1 - first)
            c = convolve(z + token * COLUMNS, weight, bias, row, first, column, inside, COLUMNS, K)
            reached = (first + t + j < length)[:, None] & inside[None]
            source = grad_out + (token * LANES + lane) * WIDTH + row[:, None] * (LANES * WIDTH) + w[None]
            grad = tl.load(source, mask=reached, other=0.0).to(tl.float32)
            gate = tl.sigmoid(c)
            if IS_NORMALISED:
                a = c * gate
                inverse, above = inverse_norms(a)
                a *= inverse[:, None]
                along = tl.where(above, tl.sum(a * grad, 1), 0.0)
                grad = (grad - a * along[:, None]) * inverse[:, None]
            grad *= gate * (1.0 + c * (1.0 - gate))
            total += grad * tl.load(weight + j * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None]
            sums += tl.where(index == j, tl.sum(grad * value, 0)[None], 0.0)
            if j == 0:
                sums += tl.where(index == K, tl.sum(grad, 0)[None], 0.0)
        tl.store(grad_z + token * COLUMNS + place, total.to(grad_z.dtype.element_ty), mask=exists)
    part = tl.program_id(0).to(tl.int64) * ((K + 1) * COLUMNS) + index * COLUMNS + column[None]
    tl.store(parts + part, sums, mask=(index <= K) & inside[None])


class DeltaFeatures(torch.autograd.Function):
    """φ(q), φ(k) (B, N, 2, H, p) and h_r, h_e (B, N, 2, H, s) of their projections.

    Args:
        z: projections, columns [q; k; h_r; h_e], (B, N, 2H(p + s)).
        weight: weight of the convolution, (K, 2H(p + s)); row j weights the input j tokens ago.
        bias: bias of the convolution, (2H(p + s),).
        heads: H.
        rank: s.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
        batch, length, columns = z.shape
        p = columns // (2 * heads) - rank
        phi = torch.empty((batch, length, 2, heads, p), dtype=z.dtype, device=z.device)
        h = torch.empty((batch, length, 2, heads, rank), dtype=z.dtype, device=z.device)
        for out, constants in ((phi, _qk_constants(weight, heads, p)), (h, _h_constants(weight, heads, p, rank))):
            blocks = ceil_div(length, constants["BT"])
            _delta_features_kernel[(batch * blocks, 2 * heads)](z, weight, bias, out, length, num_warps=4, **constants)
        ctx.save_for_backward(z, weight, bias)
        ctx.settings = (heads, rank)
        return phi, h

    @staticmethod
    def backward(ctx: Any, grad_phi: Tensor, grad_h: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        z, weight, bias = ctx.saved_tensors
        heads, rank = ctx.settings
        (batch, length, columns), kernel = z.shape, weight.shape[0]
        p, runs = columns // (2 * heads) - rank, ceil_div(length, ROWS)
        grad_phi, grad_h = grad_phi.contiguous(), grad_h.contiguous()
        grad_z = torch.empty_like(z)
        parts = torch.empty((batch * runs, kernel + 1, columns), dtype=torch.float32, device=z.device)
        launches = ((grad_phi, _qk_constants(weight, heads, p)), (grad_h, _h_constants(weight, heads, p, rank)))
        for grad, constants in launches:
            _delta_features_backward_kernel[(batch * runs, 2 * heads)](
                z, weight, bias, grad, grad_z, parts, length, BK=power_of_two(kernel + 1, 2), RUN=ROWS, num_warps=4,
                **constants,
            )  # fmt: skip
        sums = parts.sum(0)
        return grad_z, sums[:kernel].to(weight.dtype), sums[kernel].to(bias.dtype), None, None


def _qk_constants(weight: Tensor, heads: int, p: int) -> dict[str, Any]:
    """The lanes of q and k: they come first and are normalised."""
    return _lane_constants(weight, heads, p, 0, True)


def _h_constants(weight: Tensor, heads: int, p: int, rank: int) -> dict[str, Any]:
    return _lane_constants(weight, heads, rank, 2 * heads * p, False)


def _lane_constants(weight: Tensor, heads: int, width: int, first: int, is_normalised: bool) -> dict[str, Any]:
    block = power_of_two(width)
    return {
        "COLUMNS": weight.shape[1], "FIRST": first, "LANES": 2 * heads, "WIDTH": width, "BW": block,
        "K": weight.shape[0], "BT": BLOCK // block, "IS_NORMALISED": is_normalised,
    }  # fmt: skip


# Gated scores


@triton.jit
def token_run(length, HEADS: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """The sequence and the first token of a program's run, and the place of its partial sums."""
    runs = tl.cdiv(length, RUN)
    batch, first = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs * RUN
    return batch, first, (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * WIDTH


@triton.jit
def head_block(batch, first, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """The places of a block of tokens of one head, and which exist."""
    t, w = tl.arange(0, BT), tl.arange(0, BW)
    place = ((batch * length + first) * HEADS + tl.program_id(1)) * WIDTH + t[:, None] * (HEADS * WIDTH) + w[None]
    return place, (first + t < length)[:, None] & (w[None] < WIDTH)


@jit_kernel
def _gated_scores_kernel(
    x, gate, weight, out, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, RUN: tl.constexpr,
    GATE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    batch, begin, part = token_run(length, HEADS, WIDTH, RUN)
    w = tl.arange(0, BW)
    scale = tl.load(weight + w, mask=w < WIDTH, other=0.0).to(tl.float32)[None]
    energy = tl.zeros((BT, BW), tl.float32)
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        place, inside = head_block(batch, first, length, HEADS, WIDTH, BT, BW)
        score = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        energy += score * score
        result = score * tl.rsqrt(tl.sum(score * score, 1) / WIDTH + EPS)[:, None] * scale
        if GATE != "none":
            g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
            result *= g * tl.sigmoid(g) if GATE == "silu" else tl.sigmoid(g)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    tl.store(parts + part + w, tl.sum(energy, 0), mask=w < WIDTH)


@jit_kernel
def _gated_scores_backward_kernel(
    x, gate, weight, grad_out, grad_energy, grad_x, grad_gate, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, RUN: tl.constexpr,
    GATE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    batch, begin, part = token_run(length, HEADS, WIDTH, RUN)
    w = tl.arange(0, BW)
    scale = tl.load(weight + w, mask=w < WIDTH, other=0.0).to(tl.float32)[None]
    row = (batch * HEADS + tl.program_id(1)) * WIDTH
    twice = 2.0 * tl.load(grad_energy + row + w, mask=w < WIDTH, other=0.0)[None]
    sums = tl.zeros((BT, BW), tl.float32)
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        place, inside = head_block(batch, first, length, HEADS, WIDTH, BT, BW)
        score = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(score * score, 1) / WIDTH + EPS)[:, None]
        unit = score * inverse
        if GATE != "none":
            g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
            opening = tl.sigmoid(g)
            slope = opening * (1.0 + g * (1.0 - opening)) if GATE == "silu" else opening * (1.0 - opening)
            tl.store(grad_gate + place, (grad * unit * scale * slope).to(grad_gate.dtype.element_ty), mask=inside)
            grad *= g * opening if GATE == "silu" else opening
        sums += grad * unit
        grad *= scale
        grad = (grad - unit * (tl.sum(grad * unit, 1) / WIDTH)[:, None]) * inverse + twice * score
        tl.store(grad_x + place, grad.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + part + w, tl.sum(sums, 0), mask=w < WIDTH)


class GatedScores(torch.autograd.Function):
    """Normalised and gated scores like x, and the energies Σ_i x_i², (B, H, 2s) float32.

    Args:
        x: scores, (B, N, H, 2s).
        gate: like x, before its nonlinearity.
        weight: weight of the norm, (2s,).
        eps: ε of the norm.
        kind: "silu" or "sigmoid".
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        batch, length, heads, width = x.shape
        out, runs = torch.empty_like(x), ceil_div(length, ROWS)
        parts = torch.empty((batch, runs, heads, width), dtype=torch.float32, device=x.device)
        _gated_scores_kernel[(batch * runs, heads)](
            x, x if gate is None else gate, weight, out, parts, length, num_warps=4,
            **_gate_constants(x, gate, eps, kind),
        )  # fmt: skip
        ctx.save_for_backward(x, gate, weight)
        ctx.settings = (eps, kind)
        return out, parts.sum(1)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        x, gate, weight = ctx.saved_tensors
        eps, kind = ctx.settings
        batch, length, heads, width = x.shape
        grad_out, grad_energy, runs = grad_out.contiguous(), grad_energy.contiguous(), ceil_div(length, ROWS)
        grad_x = torch.empty_like(x)
        grad_gate = grad_x if gate is None else torch.empty_like(gate)  # not written without a gate
        parts = torch.empty((batch * runs * heads, width), dtype=torch.float32, device=x.device)
        _gated_scores_backward_kernel[(batch * runs, heads)](
            x, x if gate is None else gate, weight, grad_out, grad_energy, grad_x, grad_gate, parts, length,
            num_warps=4, **_gate_constants(x, gate, eps, kind),
        )  # fmt: skip
        return grad_x, None if gate is None else grad_gate, parts.sum(0).to(weight.dtype), None, None


def _gate_constants(x: Tensor, gate: Tensor | None, eps: float, kind: str) -> dict[str, Any]:
    heads, width = x.shape[2:]
    block = power_of_two(width)
    return {
        "HEADS": heads, "WIDTH": width, "BW": block, "BT": BLOCK // block, "RUN": ROWS,
        "GATE": "none" if gate is None else kind, "EPS": eps,
    }  # fmt: skip
