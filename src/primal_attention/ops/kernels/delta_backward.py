"""The way back of `delta.py`: a scan over the chunks from the end, then every chunk's gradients on their own.

With dY and the gradient dW of what a chunk leaves behind,

    dU = (Q Kᵀ ∘ D)ᵀ dY + e^(G_C − G) K dW,   Z = Tᵀ dU
    dW ← e^(G_C) dW + Qᵀ e^G dY − Kᵀ β e^G Z

needs no W, so W before each chunk and U are made again by `delta_states` and both scans are short. Then, with
P = dY Uᵀ ∘ D and A = −Z Uᵀ ∘ D below the diagonal (β k kᵀ enters through the inverse, whose gradient is −Z Uᵀ),

    dQ = P K + e^G dY Wᵀ                 dV = β Z
    dK = Pᵀ Q + (βA + (βA)ᵀ) K + e^(G_C − G) U dWᵀ − β e^G Z Wᵀ
    dβ = Z·V + (A ∘ K Kᵀ) 1 − e^G K·(Z Wᵀ)

and log γ has the sums over G of all that holds a G: each pair (i, j) enters once with + and once with −, as the same
float32 number, so that what cancels does so exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div
from .delta import Plan, delta_states, left, load_fading, load_numbers, load_rows, rows_of, store_rows, weights_place
from .products import dot


@triton.jit
def _adjoints(
    q, k, log_decay, strength, inverse, grad_y, grad_last, adjoints, solved, grad_start, length, chunks,
    SIDES: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, CROSSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW after each chunk and Z, from the last chunk to the first, and what is left for the W at the start."""
    lane, column = tl.program_id(0), tl.program_id(1) * BS
    stride: tl.constexpr = SIDES * HEADS
    t = tl.arange(0, C)
    head, side = lane % HEADS, lane // HEADS % SIDES
    swap = (head * SIDES + side) - (side * HEADS + head)  # y has heads before sides
    place, turned, inside = weights_place(lane, column, P, S, BP, BS)
    grad_w = tl.load(grad_last + place, mask=inside, other=0.0)
    for back in range(chunks):
        chunk = chunks - 1 - back
        here, here_k, live = rows_of(chunk, lane, length, SIDES, HEADS, C, CROSSED)
        block = lane.to(tl.int64) * chunks + chunk
        key = load_rows(k, here_k, live, 0, stride, P, C, BP)
        query = load_rows(q, here, live, 0, stride, P, C, BP)
        grad = load_rows(grad_y, here + swap, live, column, stride, S, C, BS)
        # read as its transpose
        solve = tl.load(inverse + block * (C * C) + t[None] * C + t[:, None])
        total, whole = load_fading(log_decay, here, live, stride, C)
        beta = load_numbers(strength, here, live, stride, C)
        from_start, narrow = tl.exp(total)[:, None], grad_w.to(key.dtype)
        tl.store(adjoints + block * (P * S) + turned, narrow, mask=inside)
        near = dot(key, tl.trans(query), PRECISION) * tl.exp(
            tl.where(t[:, None] <= t[None], total[None] - total[:, None], float("-inf"))
        )
        grad_u = tl.exp(whole - total)[:, None] * dot(key, tl.trans(narrow), PRECISION)
        grad_u += dot(near.to(key.dtype), grad, PRECISION)
        z = dot(solve, grad_u.to(key.dtype), PRECISION)
        store_rows(solved, block * C, t >= 0, column, z, 1, S, C, BS)
        grad_w = tl.exp(whole) * grad_w
        grad_w += dot(tl.trans((from_start * grad).to(key.dtype)), query, PRECISION)
        grad_w -= dot(tl.trans((from_start * beta[:, None] * z).to(key.dtype)), key, PRECISION)
    tl.store(grad_start + place, grad_w, mask=inside)


@triton.jit
def _overlap(a, b, first, first_b, live, STRIDE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
             BQ: tl.constexpr, NP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """a bᵀ over the head width, part by part."""
    total = tl.zeros((C, C), tl.float32)
    for part in tl.static_range(NP):
        one = load_rows(a, first, live, part * BQ, STRIDE, P, C, BQ)
        other = load_rows(b, first_b, live, part * BQ, STRIDE, P, C, BQ)
        total += dot(one, tl.trans(other), PRECISION)
    return total


@triton.jit
def _gradients(
    q, k, v, log_decay, strength, states, writes, adjoints, solved, grad_y,
    grad_q, grad_k, grad_v, grad_decay, grad_strength, length, chunks,
    SIDES: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BQ: tl.constexpr, NP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, C: tl.constexpr,
    CROSSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    stride: tl.constexpr = SIDES * HEADS
    t = tl.arange(0, C)
    here, here_k, live = rows_of(chunk, lane, length, SIDES, HEADS, C, CROSSED)
    head, side = lane % HEADS, lane // HEADS % SIDES
    there = here + (head * SIDES + side) - (side * HEADS + head)
    block = tl.program_id(0).to(tl.int64)
    total, whole = load_fading(log_decay, here, live, stride, C)
    beta = load_numbers(strength, here, live, stride, C)
    from_start, to_end = tl.exp(total)[:, None], tl.exp(whole - total)[:, None]

    near = tl.zeros((C, C), tl.float32)
    for part in tl.static_range(NS):
        grad = load_rows(grad_y, there, live, part * BS, stride, S, C, BS)
        u = load_rows(writes, block * C, t >= 0, part * BS, 1, S, C, BS)
        near += dot(grad, tl.trans(u), PRECISION)
    near *= left(total, C, True)
    each = near * _overlap(q, k, here, here_k, live, stride, P, C, BQ, NP, PRECISION)
    grad_total = tl.sum(each, 1) - tl.sum(each, 0)
    near = near.to(q.dtype.element_ty)

    clash = tl.zeros((C, C), tl.float32)
    grad_beta = tl.zeros((C,), tl.float32)
    for part in tl.static_range(NS):
        z = load_rows(solved, block * C, t >= 0, part * BS, 1, S, C, BS)
        u = load_rows(writes, block * C, t >= 0, part * BS, 1, S, C, BS)
        clash -= dot(z, tl.trans(u), PRECISION)
        value = load_rows(v, here, live, part * BS, stride, S, C, BS)
        grad_beta += tl.sum(z.to(tl.float32) * value.to(tl.float32), 1)
        store_rows(grad_v, here, live, part * BS, beta[:, None] * z, stride, S, C, BS)
    clash *= left(total, C, False)
    each = clash * _overlap(k, k, here_k, here_k, live, stride, P, C, BQ, NP, PRECISION)
    grad_beta += tl.sum(each, 1)
    each *= beta[:, None]
    grad_total += tl.sum(each, 1) - tl.sum(each, 0)
    clash = (clash * beta[:, None]).to(q.dtype.element_ty)

    after = 0.0  # the gradient of the chunk's whole fading
    for part in range(NP):
        query = load_rows(q, here, live, part * BQ, stride, P, C, BQ)
        key = load_rows(k, here_k, live, part * BQ, stride, P, C, BQ)
        p = part * BQ + tl.arange(0, BQ)[None]
        read = tl.zeros((C, BQ), tl.float32)
        held = tl.zeros((C, BQ), tl.float32)
        ahead = tl.zeros((C, BQ), tl.float32)
        for piece in tl.static_range(NS):
            s = piece * BS + tl.arange(0, BS)[:, None]
            offset, fits = block * (P * S) + s * P + p, (p < P) & (s < S)
            w = tl.load(states + offset, mask=fits, other=0.0)
            grad_w = tl.load(adjoints + offset, mask=fits, other=0.0)
            grad = load_rows(grad_y, there, live, piece * BS, stride, S, C, BS)
            u = load_rows(writes, block * C, t >= 0, piece * BS, 1, S, C, BS)
            z = load_rows(solved, block * C, t >= 0, piece * BS, 1, S, C, BS)
            read += dot(grad, w, PRECISION)
            held += dot(z, w, PRECISION)
            ahead += dot(u, grad_w, PRECISION)
            after += tl.exp(whole) * tl.sum(tl.sum(w.to(tl.float32) * grad_w.to(tl.float32), 1), 0)
        read, held, ahead = read * from_start, held * from_start, ahead * to_end
        along = tl.sum(held * key, 1)
        later = tl.sum(ahead * key, 1)
        grad_beta -= along
        grad_total += tl.sum(read * query, 1) - beta * along - later
        after += tl.sum(later, 0)
        store_rows(grad_q, here, live, part * BQ, read + dot(near, key, PRECISION), stride, P, C, BQ)
        ahead += dot(tl.trans(near), query, PRECISION) - beta[:, None] * held
        ahead += dot(clash, key, PRECISION)
        ahead += dot(tl.trans(clash), key, PRECISION)
        store_rows(grad_k, here_k, live, part * BQ, ahead, stride, P, C, BQ)
    place = here + t * stride
    tl.store(grad_strength + place, grad_beta, mask=live)
    tl.store(grad_decay + place, tl.cumsum(grad_total, 0, reverse=True) + after, mask=live)


def delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    start: Tensor | None,
    inverse: Tensor,
    grad_y: Tensor,
    grad_last: Tensor,
    crossed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log γ, β and of the W at the start."""
    plan = Plan(q, v, crossed)
    states, writes = delta_states(plan, k, v, log_decay, strength, start, inverse)
    adjoints, solved = torch.empty_like(states), torch.empty_like(writes)
    grads = [torch.empty_like(t) for t in (q, k, v, log_decay, strength)]
    grad_start = torch.empty_like(grad_last)
    if grad_start.numel():
        _adjoints[plan.scans](
            q, k, log_decay, strength, inverse, grad_y, grad_last, adjoints, solved, grad_start,
            plan.length, plan.chunks, **plan.scan_sizes,
        )  # fmt: skip
    if solved.numel():
        _gradients[(plan.lanes * plan.chunks,)](
            q, k, v, log_decay, strength, states, writes, adjoints, solved, grad_y, *grads,
            plan.length, plan.chunks, **plan.sizes,
            S=plan.s, BQ=plan.tiles.part, NP=ceil_div(plan.p, plan.tiles.part), BS=plan.tiles.rank,
            NS=ceil_div(plan.s, plan.tiles.rank), num_stages=1, maxnreg=plan.tiles.gradient_registers,
        )  # fmt: skip
    return (*grads, grad_start)  # type: ignore[return-value]
