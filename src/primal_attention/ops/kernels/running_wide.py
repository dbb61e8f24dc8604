"""The causal running sums (`running.py`) of heads whose rank is large against their width (`wide.py`).

Blocks of 32 rows as in `running.py`, with the sums C and D in halves (`no_sums`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import power_of_two, quick_precision, wide_running_tiles
from .grouped import add_energy_gradient, store_output_gradients
from .products import dot
from .running import _running_rows
from .scan import Plan, before_chunk, last_row, powers, sums_within, triangle_of
from .scores import EPS
from .sequences import Sequences
from .square import add_product, energy_map, in_one, no_sums, output_map, store_energies
from .wide_back import Parts


@triton.jit
def _features(z, carry, triangle, fade, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """The sums of a block, φ in float32, the norm, and one over it."""
    sums = sums_within(z, triangle, DECAY, PRECISION, FINE) + fade[:, None] * carry[None]
    norm = tl.sqrt(tl.sum(sums * sums, 1))
    inverse = 1.0 / tl.maximum(norm, EPS)
    return sums, sums * inverse[:, None], norm, inverse


@triton.jit
def _running_mix(
    qk, wx, carries, final, score_weight, score_bias, each, energy, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, ENERGY: tl.constexpr, EARLIER: tl.constexpr, FINAL: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """A chunk of one head, both sides."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w_q = wx + head * (2 * P * S)
    w_k = w_q + P * S
    a_q = output_map(w_q, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
    a_k = output_map(w_k, score_weight + RANK, qk, P, S, RANK, BP, BS, NS, PRECISION)
    shift = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32) if BIAS else tl.zeros((BP,), tl.float32)
    low_q, high_q = no_sums(BT, BP)
    low_k, high_k = no_sums(BT, BP)
    own = program.to(tl.int64) * 2
    carry_q = before_chunk(carries, own, P, BP, EARLIER)
    carry_k = before_chunk(carries, own + 1, P, BP, EARLIER)
    qk += start * (2 * HEADS * P) + head * P
    each += start * (HEADS * P) + head * P
    rows = (end - start).to(tl.int32)
    for first in range(0, rows, BT):
        row = first + t
        live = (row < rows)[:, None]
        inside = live & (p[None] < P)
        place = qk + row[:, None] * (2 * HEADS * P) + p[None]
        z_q = tl.load(place, mask=inside, other=0.0)
        z_k = tl.load(place + HEADS * P, mask=inside, other=0.0)
        sums, wide, _, _ = _features(z_q, carry_q, triangle, fade, DECAY, PRECISION, FINE)
        carry_q = last_row(sums, rows - first, BT)
        phi_q = tl.where(live, wide, 0.0).to(z_q.dtype)
        sums, wide, _, _ = _features(z_k, carry_k, triangle, fade, DECAY, PRECISION, FINE)
        carry_k = last_row(sums, rows - first, BT)
        phi_k = tl.where(live, wide, 0.0).to(z_k.dtype)
        out = dot(phi_q, a_q, PRECISION) + dot(phi_k, a_k, PRECISION) + shift[None]
        if ENERGY:
            low_q, high_q = add_product(low_q, high_q, phi_q, phi_q, BT, BP, PRECISION)
            low_k, high_k = add_product(low_k, high_k, phi_k, phi_k, BT, BP, PRECISION)
        tl.store(each + row[:, None] * (HEADS * P) + p[None], out.to(z_q.dtype), mask=inside)
    if FINAL:
        tl.store(final + own * P + p, carry_q, mask=p < P)
        tl.store(final + own * P + P + p, carry_k, mask=p < P)
    if ENERGY:
        energy += own * S
        store_energies(in_one(low_q, high_q, BT, BP), w_q, energy, qk, P, S, BP, BS, NS, PRECISION)
        store_energies(in_one(low_k, high_k, BT, BP), w_k, energy + S, qk, P, S, BP, BS, NS, PRECISION)


@triton.jit
def _adjoint(
    z, g, carry, a, b, most, triangle, fade, live,
    ENERGY: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """A block's sums s, φ and ds."""
    sums, wide, norm, inverse = _features(z, carry, triangle, fade, DECAY, PRECISION, FINE)
    phi = tl.where(live, wide, 0.0).to(z.dtype)
    grad = dot(g, tl.trans(a), PRECISION)
    if ENERGY:
        grad += dot(phi, b, PRECISION) * most
    along = tl.where(norm > EPS, tl.sum(wide * grad, 1), 0.0)  # ds stands upright on s, as in running.py
    return sums, phi, tl.where(live, (grad - wide * along[:, None]) * inverse[:, None], 0.0)


@triton.jit
def _adjoint_mix(
    qk, wx, carries, score_weight, grad_each, grad_energy, grad_sums, block_carries, sums, grad_wx, grad_score,
    log_decay, chunk_sequence, chunk_start, chunk_end, chunks, per_group,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BR: tl.constexpr,
    ENERGY: tl.constexpr, EARLIER: tl.constexpr, LATER: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """As `_adjoint_sums`: of a group of chunks, one head and one side; dW and dW_o are the group's."""
    group, lane = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    head, side = lane // 2, lane % 2
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    rate = tl.load(log_decay + head) if DECAY else 0.0
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w = wx + lane * (P * S)
    score_weight += side * RANK
    grad_score += ((group * HEADS + head) * (2 * P) + side) * S
    grad_wx += (group * (2 * HEADS) + lane) * (P * S)
    a = output_map(w, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
    low, high = no_sums(BT, BP)
    begins = group * per_group
    for chunk in range(begins, tl.minimum(begins + per_group, chunks)):
        start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
        of_energy = grad_energy + (tl.load(chunk_sequence + chunk) * (2 * HEADS) + lane) * S
        b, most = a, 0.0
        if ENERGY:
            b, most = energy_map(w, of_energy, qk, P, S, RANK, BP, BS, NS, BR, PRECISION)
        gram_low, gram_high = no_sums(BT, BP)
        own = chunk * (2 * HEADS) + lane
        carry = before_chunk(carries, own, P, BP, EARLIER)
        total = tl.zeros((BP,), tl.float32)
        begin = start * (2 * HEADS * P) + (side * HEADS + head) * P
        from_out = grad_each + start * (HEADS * P) + head * P
        kept = block_carries + (chunk * BLOCKS * (2 * HEADS) + lane) * P + p
        rows = (end - start).to(tl.int32)
        for first in range(0, rows, BT):
            row = first + t
            live = (row < rows)[:, None]
            inside = live & (p[None] < P)
            place = row[:, None] * (2 * HEADS * P) + p[None]
            z = tl.load(qk + begin + place, mask=inside, other=0.0)
            g = tl.load(from_out + row[:, None] * (HEADS * P) + p[None], mask=inside, other=0.0)
            if DECAY:
                tl.store(kept, carry, mask=p < P)
                kept += 2 * HEADS * P
            within, phi, grad = _adjoint(z, g, carry, a, b, most, triangle, fade, live, ENERGY, DECAY, PRECISION, FINE)
            carry = last_row(within, rows - first, BT)
            if LATER:
                total += tl.sum(grad * powers(rate, row, DECAY)[:, None] if DECAY else grad, 0)
            if not DECAY:
                tl.store(grad_sums + begin + place, grad.to(z.dtype), mask=inside)
            low, high = add_product(low, high, phi, g, BT, BP, PRECISION)
            if ENERGY:
                gram_low, gram_high = add_product(gram_low, gram_high, phi, phi, BT, BP, PRECISION)
        if LATER:
            tl.store(sums + own * P + p, total, mask=p < P)
        if ENERGY:
            gram = in_one(gram_low, gram_high, BT, BP)
            add_energy_gradient(gram, w, of_energy, grad_wx, chunk > begins, qk, P, S, RANK, BP, BS, NS, PRECISION)
    cross = in_one(low, high, BT, BP)
    store_output_gradients(
        cross, w, score_weight, grad_wx, grad_score, qk, P, S, RANK, BP, BS, NS, ENERGY, PRECISION
    )  # fmt: skip


@triton.jit
def _decayed_rows(
    qk, wx, block_carries, after, score_weight, grad_each, grad_energy, grad_qk, grad_bias, grad_decay,
    log_decay, chunk_sequence, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BR: tl.constexpr,
    ENERGY: tl.constexpr, LATER: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """As `_running_rows` with decay: ds once more, in float32, and with it dz and the gradients of b and log γ."""
    chunk, lane = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    rate = tl.load(log_decay + head)
    triangle = triangle_of(rate, BT, DECAY)
    fade = powers(rate, t + 1, DECAY)
    w = wx + lane * (P * S)
    a = output_map(w, score_weight + side * RANK, qk, P, S, RANK, BP, BS, NS, PRECISION)
    b, most = a, 0.0
    if ENERGY:
        of_energy = grad_energy + (tl.load(chunk_sequence + chunk) * (2 * HEADS) + lane) * S
        b, most = energy_map(w, of_energy, qk, P, S, RANK, BP, BS, NS, BR, PRECISION)
    sum_b = tl.zeros((BP,), tl.float32)
    sum_decay = tl.zeros((BP,), tl.float32)
    later = before_chunk(after, chunk * (2 * HEADS) + lane, P, BP, LATER)
    column = (side * HEADS + head) * P
    begin = start * (2 * HEADS * P) + column
    from_out = grad_each + start * (HEADS * P) + head * P
    rows = (end - start).to(tl.int32)
    blocks = tl.cdiv(rows, BT)
    for back in range(blocks):
        block = blocks - 1 - back
        row = block * BT + t
        live = (row < rows)[:, None]
        inside = live & (p[None] < P)
        place = row[:, None] * (2 * HEADS * P) + p[None]
        kept = (chunk * BLOCKS + block) * (2 * HEADS) + lane
        carry = tl.load(block_carries + kept * P + p, mask=p < P, other=0.0)
        z = tl.load(qk + begin + place, mask=inside, other=0.0)
        g = tl.load(from_out + row[:, None] * (HEADS * P) + p[None], mask=inside, other=0.0)
        sums, _, grad = _adjoint(z, g, carry, a, b, most, triangle, fade, live, ENERGY, DECAY, PRECISION, FINE)
        ahead = powers(rate, tl.maximum(tl.minimum(rows - block * BT, BT) - t, 0), DECAY)
        dz = dot(tl.trans(triangle), grad, FINE) + ahead[:, None] * later[None]
        dz = tl.where(inside, dz, 0.0)
        sum_decay += tl.sum(dz * (sums - z.to(tl.float32)), 0)
        later = tl.sum(tl.where(t[:, None] == 0, dz, 0.0), 0)
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + begin + place, dz.to(z.dtype), mask=inside)
    tl.store(grad_bias + chunk * (2 * HEADS * P) + column + p, sum_b, mask=p < P)
    tl.store(grad_decay + chunk * (2 * HEADS) + lane, tl.sum(sum_decay, 0))


def _plan(qk: Tensor, wx: Tensor, log_decay: Tensor | None, seqs: Sequences, rank: int) -> Plan:
    size = wide_running_tiles(qk.dtype, wx.shape[3], rank, log_decay is not None)
    plan = Plan(qk, wx, log_decay, seqs, rank, size)
    if log_decay is None:
        plan.full["PRECISION"] = quick_precision(qk.dtype)
    return plan


def running_mix_forward(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    score_bias: Tensor | None,
    log_decay: Tensor | None,
    seqs: Sequences,
    whole: bool,
    measured: bool,
    initial: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `wide.mix_forward`, and the chunks' carries for the way back. initial, final: as in `running_forward`."""
    rank = score_weight.shape[1] // 2
    plan = _plan(qk, wx, log_decay, seqs, rank)
    each = (torch.empty if whole else torch.zeros)(
        (qk.shape[0], plan.heads * plan.p), dtype=qk.dtype, device=qk.device
    )  # fmt: skip
    shape = (plan.chunks if measured else 0, plan.heads, 2, plan.stored)
    energy = torch.empty(shape, dtype=torch.float32, device=qk.device)
    if not plan.chunks:
        return each, energy, plan.sums()
    carries = plan.forward_carries(qk, initial, final)
    _running_mix[(plan.chunks * plan.heads,)](
        qk, wx, carries, energy if final is None else final, score_weight,
        score_weight if score_bias is None else score_bias, each, energy, plan.rate,
        seqs.chunk_start, seqs.chunk_end, **{**plan.full, "num_stages": 1}, NS=plan.size.rank_blocks,
        BIAS=score_bias is not None, ENERGY=measured, EARLIER=bool(len(carries)),
        FINAL=seqs.single and final is not None, num_warps=plan.size.warps,
    )  # fmt: skip
    return each, energy, carries


def running_mix_backward(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    log_decay: Tensor | None,
    carries: Tensor,
    grad_each: Tensor,
    grad_energy: Tensor | None,
    seqs: Sequences,
    whole: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `wide_back.mix_backward`, and the partial sums of the gradient of log γ (chunks, H, 2)."""
    rank = score_weight.shape[1] // 2
    plan = _plan(qk, wx, log_decay, seqs, rank)
    parts = Parts(qk, wx, plan.chunks, False)
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    grad_bias, grad_decay = (
        torch.empty((plan.chunks, width), dtype=torch.float32, device=qk.device)
        for width in (2 * plan.heads * plan.p, 2 * plan.heads)
    )
    if plan.chunks:
        maps = {
            "NS": plan.size.rank_blocks, "BR": power_of_two(rank), "ENERGY": grad_energy is not None,
            "LATER": not seqs.single,
        }  # fmt: skip
        tables = (plan.rate, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end)
        of_energy = wx if grad_energy is None else grad_energy
        sums, block_carries = plan.sums(), plan.sums(0 if log_decay is None else plan.blocks)
        _adjoint_mix[(parts.groups * 2 * plan.heads,)](
            qk, wx, carries, score_weight, grad_each, of_energy, grad_qk, block_carries, sums, parts.of_wx,
            parts.of_score, *tables, plan.chunks, parts.per_group,
            **plan.full, **maps, BLOCKS=plan.blocks, EARLIER=bool(len(carries)), num_warps=plan.size.warps,
        )  # fmt: skip
        after = plan.backward_carries(sums)
        if log_decay is None:
            _running_rows[(plan.chunks, 2 * plan.heads)](
                qk, wx, block_carries, after, grad_each, of_energy, grad_qk, grad_bias, grad_decay, *tables,
                **plan.full, BLOCKS=plan.blocks, NS=1, LATER=maps["LATER"], num_warps=plan.size.warps,
            )  # fmt: skip
        else:
            _decayed_rows[(plan.chunks * 2 * plan.heads,)](
                qk, wx, block_carries, after, score_weight, grad_each, of_energy, grad_qk, grad_bias, grad_decay,
                *tables, **plan.full, **maps, BLOCKS=plan.blocks, num_warps=plan.size.warps,
            )  # fmt: skip
    return grad_qk, parts.weight_gradient(), *parts.score_and_bias_gradients(score_weight, grad_bias), grad_decay
