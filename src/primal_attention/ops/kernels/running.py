"""The causal scores: a running sum of q and k (with or without decay), normalised and projected, and the way back.

    s_i = γ s_{i−1} + z_i,   φ_i = s_i / ‖s_i‖,   e_i = Wᵀ φ_i

The scan is that of `scan.py`. Three launches forward: the chunks' own sums, the carries from them, the scores. Back
the same: ds and the chunks' adjoint sums, their carries from the end, then dz = Lᵀ ds plus what comes after the block.
Sequences of one chunk each need neither sums nor carries: EARLIER and LATER say whether there are any to be read.
Blocks are short (32 rows): products that small stay on instructions that the compiler gets right, and the kernels wait
for memory, not for them.
The gradient of log γ is Σ_i dz_i · (s_i − z_i). Layouts as in `scores.py`; a lane is (head, side).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import running_tiles
from .products import dot, dot_ones
from .scan import Plan, before_chunk, last_row, powers, sums_within, triangle_of
from .scores import EPS
from .sequences import Sequences


@triton.jit
def _weights_block(wx, lane, rank_block, like, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    p, s = tl.arange(0, BP), rank_block * BS + tl.arange(0, BS)
    inside = (p[:, None] < P) & (s[None] < S)
    return tl.load(wx + lane * (P * S) + p[:, None] * S + s[None], mask=inside, other=0.0).to(like.dtype.element_ty)


@triton.jit
def _running_scores(
    qk, wx, carries, final, scores, energy, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, EARLIER: tl.constexpr,
    FINAL: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    own = chunk.to(tl.int64) * (2 * HEADS) + lane
    qk += (side * HEADS + head) * P
    for rank_block in tl.static_range(NS):
        s = rank_block * BS + tl.arange(0, BS)
        w = _weights_block(wx, lane, rank_block, qk, P, S, BP, BS)
        total = tl.zeros((BS,), tl.float32)
        carry = before_chunk(carries, own, P, BP, EARLIER)
        for first in range(start, end, BT):
            row = first + t
            live = row < end
            z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
            sums = sums_within(z, triangle, DECAY, PRECISION, FINE) + fade[:, None] * carry[None]
            carry = last_row(sums, end - first, BT)
            inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(sums * sums, 1)), EPS)
            e = dot((sums * inverse[:, None]).to(z.dtype), w, PRECISION)
            total += tl.sum(tl.where(live[:, None], e * e, 0.0), 0)
            e = tl.where((s[None] == RANK) & (lane == 0), 1.0, e)  # see scores.py
            place = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
            tl.store(place, e.to(scores.dtype.element_ty), mask=live[:, None] & (s[None] < S))
        tl.store(energy + own * S + s, total, mask=s < S)
        if FINAL and rank_block == 0:
            tl.store(final + own * P + p, carry, mask=p < P)


@triton.jit
def _score_gradient(
    phi, w, grad_scores, grad_energy, row, live, lane, sequence, rank_block,
    HEADS: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e of a block of directions, and its whole gradient: from the output and from the energies."""
    s = rank_block * BS + tl.arange(0, BS)
    twice = 2.0 * tl.load(grad_energy + (sequence * (2 * HEADS) + lane) * S + s, mask=s < RANK, other=0.0)
    de = tl.load(
        grad_scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None],
        mask=live[:, None] & (s[None] < RANK), other=0.0,
    ).to(tl.float32)  # fmt: skip
    e = dot(phi, w, PRECISION)
    return e, de + tl.where(live[:, None], twice[None] * e, 0.0)


@triton.jit
def _adjoint_of_sums(
    z, w, wx, carry, grad_scores, grad_energy, triangle, fade, row, live, lane, sequence,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """A block's sums s, φ, ds, and de of the last block of directions. w: the weights' first block."""
    sums = sums_within(z, triangle, DECAY, PRECISION, FINE) + fade[:, None] * carry[None]
    norm = tl.sqrt(tl.sum(sums * sums, 1))
    inverse = 1.0 / tl.maximum(norm, EPS)
    wide = sums * inverse[:, None]
    phi = wide.to(z.dtype)
    _, de = _score_gradient(
        phi, w, grad_scores, grad_energy, row, live, lane, sequence, 0, HEADS, S, RANK, BS, PRECISION
    )  # fmt: skip
    grad = dot(de.to(z.dtype), tl.trans(w), PRECISION)
    for rank_block in tl.static_range(1, NS):
        other = _weights_block(wx, lane, rank_block, grad_scores, P, S, BP, BS)
        _, de = _score_gradient(
            phi, other, grad_scores, grad_energy, row, live, lane, sequence, rank_block, HEADS, S, RANK, BS, PRECISION
        )  # fmt: skip
        grad += dot(de.to(z.dtype), tl.trans(other), PRECISION)
    # φ · grad is e · de, but formed from the rounded grad: ds must stand upright on s, or the sum over i of ds_i · s_i,
    # which is what the gradient of log γ is made of, drowns in what rounding left along s.
    along = tl.where(norm > EPS, tl.sum(wide * grad, 1), 0.0)
    grad = (grad - wide * along[:, None]) * inverse[:, None]
    return sums, phi, tl.where(live[:, None], grad, 0.0), de


@triton.jit
def _adjoint_sums(
    qk, wx, carries, grad_scores, grad_energy, grad_sums, block_carries, sums, grad_wx,
    log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, EARLIER: tl.constexpr,
    LATER: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dW (where NS is 1); if LATER, Σ_i γ^i ds_i; without decay ds itself, with decay the carry before each block.

    The gradient of log γ is a sum of small differences that does not bear ds in 16 bits: with decay it is formed again.
    """
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w = _weights_block(wx, lane, 0, qk, P, S, BP, BS)
    sum_w = tl.zeros((BS, BP), tl.float32)
    parts = tl.zeros((BT, BP), tl.float32)
    out = chunk.to(tl.int64) * (2 * HEADS) + lane
    carry = before_chunk(carries, out, P, BP, EARLIER)
    place = (chunk.to(tl.int64) * BLOCKS * (2 * HEADS) + lane) * P + p
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=live[:, None] & (p[None] < P), other=0.0)
        if DECAY:
            tl.store(block_carries + place, carry, mask=p < P)
            place += 2 * HEADS * P
        rows, phi, grad, de = _adjoint_of_sums(
            z, w, wx, carry, grad_scores, grad_energy, triangle, fade, row, live, lane, sequence,
            HEADS, P, S, RANK, BT, BP, BS, NS, DECAY, PRECISION, FINE,
        )  # fmt: skip
        carry = last_row(rows, end - first, BT)
        if LATER:
            parts += grad * powers(rate, row - start, DECAY)[:, None] if DECAY else grad
        if not DECAY:
            inside = live[:, None] & (p[None] < P)
            tl.store(grad_sums + row[:, None] * (2 * HEADS * P) + column[None], grad.to(z.dtype), mask=inside)
        if NS == 1:
            sum_w += dot(tl.trans(de.to(phi.dtype)), phi, PRECISION)
    if LATER:
        tl.store(sums + out * P + p, tl.sum(parts, 0), mask=p < P)
    if NS == 1:
        fits = (p[None] < P) & (s[:, None] < S)
        tl.store(grad_wx + out * (P * S) + p[None] * S + s[:, None], sum_w, mask=fits)


@triton.jit
def _running_rows(
    qk, wx, block_carries, after, grad_scores, grad_energy, grad_qk, grad_bias, grad_decay,
    log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, LATER: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """From the chunk's end: dz = Lᵀ ds + γ^(m−t)·(what comes after the block), and the gradients of b and log γ."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w = _weights_block(wx, lane, 0, qk, P, S, BP, BS)
    sum_b = tl.zeros((BP,), tl.float32)
    sum_decay = tl.zeros((BP,), tl.float32)
    later = before_chunk(after, chunk.to(tl.int64) * (2 * HEADS) + lane, P, BP, LATER)
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
            sums, _, grad, _ = _adjoint_of_sums(
                z, w, wx, carry, grad_scores, grad_energy, triangle, fade, row, live, lane, sequence,
                HEADS, P, S, RANK, BT, BP, BS, NS, DECAY, PRECISION, FINE,
            )  # fmt: skip
            dz = dot(tl.trans(triangle), grad, FINE) + ahead[:, None] * later[None]
            dz = tl.where(inside, dz, 0.0)
            sum_decay += tl.sum(dz * (sums - z.to(tl.float32)), 0)
        else:
            grad = tl.load(grad_qk + place, mask=inside, other=0.0)
            dz = dot_ones(tl.trans(triangle).to(grad.dtype), grad, PRECISION) + later[None]
            dz = tl.where(inside, dz, 0.0)
        later = tl.sum(tl.where(t[:, None] == 0, dz, 0.0), 0)
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + place, dz.to(grad_qk.dtype.element_ty), mask=inside)
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if DECAY:
        tl.store(grad_decay + chunk.to(tl.int64) * (2 * HEADS) + lane, tl.sum(sum_decay, 0))


@triton.jit
def _running_weights(
    qk, wx, carries, grad_scores, grad_energy, grad_wx, log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, EARLIER: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dW of one block of directions, for ranks of several blocks."""
    chunk, lane, rank_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), rank_block * BS + tl.arange(0, BS)
    column = ((lane % 2) * HEADS + lane // 2) * P + p
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w = _weights_block(wx, lane, rank_block, qk, P, S, BP, BS)
    sum_w = tl.zeros((BS, BP), tl.float32)
    out = chunk.to(tl.int64) * (2 * HEADS) + lane
    carry = before_chunk(carries, out, P, BP, EARLIER)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=live[:, None] & (p[None] < P), other=0.0)
        sums = sums_within(z, triangle, DECAY, PRECISION, FINE) + fade[:, None] * carry[None]
        carry = last_row(sums, end - first, BT)
        phi = (sums / tl.maximum(tl.sqrt(tl.sum(sums * sums, 1)), EPS)[:, None]).to(z.dtype)
        _, de = _score_gradient(
            phi, w, grad_scores, grad_energy, row, live, lane, sequence, rank_block, HEADS, S, RANK, BS, PRECISION
        )  # fmt: skip
        sum_w += dot(tl.trans(de.to(phi.dtype)), phi, PRECISION)
    fits = (p[None] < P) & (s[:, None] < S)
    tl.store(grad_wx + out * (P * S) + p[None] * S + s[:, None], sum_w, mask=fits)


def running_forward(
    qk: Tensor,
    wx: Tensor,
    log_decay: Tensor | None,
    seqs: Sequences,
    rank: int,
    whole: bool,
    initial: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (rows, H, 2, S), the energies' partial sums per chunk, and the chunks' carries for the way back.

    initial, final: (B, H, 2, p) float32, the sums before the first token, and where to write those after the last.
    """
    plan = Plan(qk, wx, log_decay, seqs, rank, running_tiles(qk.dtype, wx.shape[3], rank))
    make = torch.empty if whole else torch.zeros
    scores = make((qk.shape[0], plan.heads, 2, plan.stored), dtype=qk.dtype, device=qk.device)
    energy = torch.empty((plan.chunks, plan.heads, 2, plan.stored), dtype=torch.float32, device=qk.device)
    if not plan.chunks:
        return scores, energy, plan.sums()
    carries = plan.forward_carries(qk, initial, final)
    _running_scores[(plan.chunks, 2 * plan.heads)](
        qk, wx, carries, energy if final is None else final, scores, energy, plan.rate, seqs.chunk_start,
        seqs.chunk_end, **plan.full, NS=plan.size.rank_blocks, EARLIER=bool(len(carries)),
        FINAL=seqs.single and final is not None, num_warps=max(1, plan.size.warps // 2),
    )  # fmt: skip
    return scores, energy, carries


def running_backward(
    qk: Tensor,
    wx: Tensor,
    log_decay: Tensor | None,
    carries: Tensor,
    grad_scores: Tensor,
    grad_energy: Tensor,
    seqs: Sequences,
    rank: int,
    whole: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad_qk, and per chunk the partial sums of the gradients of wx, of the bias and of log γ (chunks, H, 2).

    spend: grad_qk may take the place of qk, as in `scores_backward`.
    """
    plan = Plan(qk, wx, log_decay, seqs, rank, running_tiles(qk.dtype, wx.shape[3], rank))
    spend = spend and whole and plan.size.rank_blocks == 1
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    shapes = ((plan.heads, 2, plan.p, plan.stored), (2 * plan.heads * plan.p,), (plan.heads, 2))
    parts = [torch.empty((plan.chunks, *shape), dtype=torch.float32, device=qk.device) for shape in shapes]
    grad_wx, grad_bias, grad_decay = parts
    if not plan.chunks:
        return grad_qk, grad_wx, grad_bias, grad_decay
    tables = (plan.rate, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end)
    grid, rank_blocks, earlier = (plan.chunks, 2 * plan.heads), plan.size.rank_blocks, bool(len(carries))
    sums, block_carries = plan.sums(), plan.sums(0 if log_decay is None else plan.blocks)
    _adjoint_sums[grid](
        qk, wx, carries, grad_scores, grad_energy, grad_qk, block_carries, sums, grad_wx, *tables,
        **plan.full, BLOCKS=plan.blocks, NS=rank_blocks, EARLIER=earlier, LATER=not seqs.single,
        num_warps=plan.size.warps,
    )  # fmt: skip
    after = plan.backward_carries(sums)
    _running_rows[grid](
        qk, wx, block_carries, after, grad_scores, grad_energy, grad_qk, grad_bias, grad_decay, *tables,
        **plan.full, BLOCKS=plan.blocks, NS=rank_blocks, LATER=not seqs.single, num_warps=plan.size.warps,
    )  # fmt: skip
    if rank_blocks > 1:
        _running_weights[(plan.chunks, 2 * plan.heads, rank_blocks)](
            qk, wx, carries, grad_scores, grad_energy, grad_wx, *tables, **plan.full, EARLIER=earlier,
            num_warps=plan.size.warps,
        )  # fmt: skip
    return grad_qk, grad_wx, grad_bias, grad_decay
