"""Heads whose rank is large against their width: the rank never meets a token, and no score is written.

The score map W_o follows the scores at once, so a head's output is a p × p map of its normalised rows, and its energies
are a quadratic form in their p × p Gram matrix. With φ a row of q or k over its norm, W = W_{·|X} of a side (p × S):

    o = Σ_sides φ A + b_o,        A = W W_oᵀ                  (p × p)
    E_s = w_sᵀ C w_s,             C = Σ φᵀ φ                  (p × p)

and back, with g the gradient of o and g_E that of the energies:

    dφ = g Aᵀ + φ B,              B = 2 W diag(g_E) Wᵀ
    dW = D W_o + 2 C W diag(g_E), dW_o = Σ Dᵀ W,              D = Σ φᵀ g

so that a token costs p² per product whatever the rank. A program forms A and B first, runs over its rows, and turns C
and D into energies or gradients at the end. Sums over chunks are partial sums added in a fixed order.

Layouts: qk (rows, 2·H·p); wx (B or 1, H, 2, p, S); each head's output o: (rows, H·p); score_weight (p, 2·rank).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two, precision, wide_back_tiles, wide_tiles
from .fold import foldable
from .products import dot
from .scores import EPS
from .segments import column_sum, segment_sum
from .sequences import Sequences
from .square import (
    add_product,
    directions,
    energy_map,
    in_one,
    largest,
    no_sums,
    output_map,
    score_map,
    store_energies,
    twice_energy,
    weight_gradients,
    weight_gradients_at_once,
)

WIDEST = 64  # head width beyond which a program cannot hold the p × p sums
PROGRAMS = 768  # enough to fill a large GPU a few times over
AT_ONCE = 264  # as many as stand side by side on a large GPU, where each does little between its chunks


def wide(heads: int, head_dim: int, rank: int) -> bool:
    """Whether these kernels serve such heads better than written scores do."""
    return head_dim <= WIDEST and not foldable(heads, head_dim, rank)


@triton.jit
def normalised(z):
    """φ in float32, the norm, and one over it."""
    wide = z.to(tl.float32)
    norm = tl.sqrt(tl.sum(wide * wide, 1))
    inverse = 1.0 / tl.maximum(norm, EPS)
    return wide * inverse[:, None], norm, inverse


@triton.jit
def whole_blocks(rows, BT: tl.constexpr, TAIL: tl.constexpr):
    """Rows that go through in blocks of BT: all but a tail that fits into a shorter block."""
    over = rows % BT
    return tl.where(over <= TAIL, rows - over, rows)


@triton.jit
def rows_forward(
    z, out, a_q, a_k, shift, first, rows, sums_q, sums_k,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows: writes the head's output, and adds to both C. BT: by which sums are halved or not."""
    row, p = first + tl.arange(0, BLOCK), tl.arange(0, BP)
    inside = (row < rows)[:, None] & (p[None] < P)
    place = z + row[:, None] * (2 * HEADS * P) + p[None]
    z_q = tl.load(place, mask=inside, other=0.0)
    z_k = tl.load(place + HEADS * P, mask=inside, other=0.0)
    wide_q, _, _ = normalised(z_q)
    wide_k, _, _ = normalised(z_k)
    phi_q, phi_k = wide_q.to(z_q.dtype), wide_k.to(z_k.dtype)
    found = dot(phi_q, a_q, PRECISION) + dot(phi_k, a_k, PRECISION) + shift[None]
    if ENERGY:
        sums_q = add_product(sums_q[0], sums_q[1], phi_q, phi_q, BT, BLOCK, BP, PRECISION)
        sums_k = add_product(sums_k[0], sums_k[1], phi_k, phi_k, BT, BLOCK, BP, PRECISION)
    tl.store(out + row[:, None] * (HEADS * P) + p[None], found.to(z_q.dtype), mask=inside)
    return sums_q, sums_k


@triton.jit
def _mix(
    qk, wx, score_weight, score_bias, each, energy, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, TAIL: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of one head, both sides."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p = tl.arange(0, BP)
    w_q = wx + tl.load(chunk_sequence + chunk) * wx_batch_stride + head * (2 * P * S)
    w_k = w_q + P * S
    a_q = output_map(w_q, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
    a_k = output_map(w_k, score_weight + RANK, qk, P, S, RANK, BP, BS, NS, PRECISION)
    shift = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32) if BIAS else tl.zeros((BP,), tl.float32)
    sums_q, sums_k = no_sums(BT, BP), no_sums(BT, BP)
    z = qk + start * (2 * HEADS * P) + head * P
    out = each + start * (HEADS * P) + head * P
    rows = (end - start).to(tl.int32)
    full = whole_blocks(rows, BT, TAIL)
    for first in range(0, full, BT):
        sums_q, sums_k = rows_forward(
            z, out, a_q, a_k, shift, first, rows, sums_q, sums_k, HEADS, P, BT, BT, BP, ENERGY, PRECISION
        )
    if TAIL and full < rows:
        sums_q, sums_k = rows_forward(
            z, out, a_q, a_k, shift, full, rows, sums_q, sums_k, HEADS, P, BT, TAIL, BP, ENERGY, PRECISION
        )
    if ENERGY:
        energy += program.to(tl.int64) * (2 * S)
        store_energies(in_one(sums_q[0], sums_q[1], BT, BP), w_q, energy, qk, P, S, BP, BS, NS, PRECISION)
        store_energies(in_one(sums_k[0], sums_k[1], BT, BP), w_k, energy + S, qk, P, S, BP, BS, NS, PRECISION)


@triton.jit
def rows_back(
    z, g, dz, a, b, most, first, rows, sums, grams,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows: writes dz, adds to Dᵀ and C, and hands dz on. BT: by which sums are halved or not."""
    row, p = first + tl.arange(0, BLOCK), tl.arange(0, BP)
    inside = (row < rows)[:, None] & (p[None] < P)
    place = row[:, None] * (2 * HEADS * P) + p[None]
    z = tl.load(z + place, mask=inside, other=0.0)
    g = tl.load(g + row[:, None] * (HEADS * P) + p[None], mask=inside, other=0.0)
    wide, norm, inverse = normalised(z)
    phi = wide.to(z.dtype)
    # z and g are factors as they were loaded wherever that can be: they then never leave shared memory.
    sums = add_product(sums[0], sums[1], g, phi, BT, BLOCK, BP, PRECISION)
    grad = dot(g, tl.trans(a), PRECISION)
    if ENERGY:
        if z.dtype == tl.float16:  # which may not hold φ over the norm
            grams = add_product(grams[0], grams[1], phi, phi, BT, BLOCK, BP, PRECISION)
        else:
            grams = add_product(grams[0], grams[1], z, (wide * inverse[:, None]).to(z.dtype), BT, BLOCK, BP, PRECISION)
        grad += dot(z, b, PRECISION) * (inverse * most)[:, None]
    along = tl.where(norm > EPS, tl.sum(wide * grad, 1), 0.0)
    found = (grad - wide * along[:, None]) * inverse[:, None]
    tl.store(dz + place, found.to(z.dtype), mask=inside)
    return sums, grams, found


@triton.jit
def _mix_backward(
    qk, wx, score_weight, grad_each, grad_energy, grad_qk, grad_wx, grad_score, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_batch_stride, chunks, per_group,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, TAIL: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BR: tl.constexpr,
    DEPENDS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A group of chunks, one head and one side. Where W is one block, it is read once and stays at hand."""
    group, lane = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    head, side = lane // 2, lane % 2
    p = tl.arange(0, BP)
    first_column = (side * HEADS + head) * P
    kind: tl.constexpr = qk.dtype.element_ty
    score_weight += side * RANK
    grad_score += ((group * HEADS + head) * (2 * P) + side) * S
    if NS == 1:
        w_o = score_map(score_weight, 0, P, RANK, BP, BS)
    sum_b, tail_b = tl.zeros((BT // 16, BP), tl.float32), tl.zeros((BP,), tl.float32)  # sixteen rows are a warp's
    begins = group * per_group
    for chunk in range(begins, tl.minimum(begins + per_group, chunks)):
        start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
        sequence = tl.load(chunk_sequence + chunk)
        w = wx + sequence * wx_batch_stride + lane * (P * S)
        of_energy = grad_energy + (sequence * (2 * HEADS) + lane) * S
        if NS == 1:
            w_s = directions(w, 0, qk, P, S, BP, BS)
            a = dot(w_s, tl.trans(w_o), PRECISION).to(kind)
            twice = twice_energy(of_energy, 0, RANK if ENERGY else 0, BS)
            most = largest(twice)
            b = a
            if ENERGY:
                weighted = (w_s.to(tl.float32) * (twice / most)[None]).to(kind)
                b = dot(weighted, tl.trans(w_s), PRECISION).to(kind)
        else:
            a = output_map(w, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
            b, most = a, 1.0
            if ENERGY:
                b, most = energy_map(w, of_energy, qk, P, S, RANK, BP, BS, NS, BR, PRECISION)
        sums = no_sums(BT, BP)  # Dᵀ
        grams = no_sums(BT, BP)  # C
        z = qk + start * (2 * HEADS * P) + first_column
        g = grad_each + start * (HEADS * P) + head * P
        dz = grad_qk + start * (2 * HEADS * P) + first_column
        rows = (end - start).to(tl.int32)
        full = whole_blocks(rows, BT, TAIL)
        for first in range(0, full, BT):
            sums, grams, found = rows_back(
                z, g, dz, a, b, most, first, rows, sums, grams, HEADS, P, BT, BT, BP, ENERGY, PRECISION
            )
            sum_b += tl.sum(tl.reshape(found, (BT // 16, 16, BP)), 1)
        if TAIL and full < rows:
            sums, grams, found = rows_back(
                z, g, dz, a, b, most, full, rows, sums, grams, HEADS, P, BT, TAIL, BP, ENERGY, PRECISION
            )
            tail_b += tl.sum(found, 0)
        own = grad_wx + ((chunk if DEPENDS else group) * (2 * HEADS) + lane) * (P * S)
        turned, gram = in_one(sums[0], sums[1], BT, BP), in_one(grams[0], grams[1], BT, BP)
        if NS == 1:
            weight_gradients_at_once(
                turned, gram, w_s, w_o, twice, own, grad_score, chunk > begins,
                P, S, BP, BS, DEPENDS, ENERGY, PRECISION,
            )  # fmt: skip
        else:
            weight_gradients(
                tl.trans(turned), gram, w, score_weight, of_energy, own, grad_score, chunk > begins, qk,
                P, S, RANK, BP, BS, NS, DEPENDS, ENERGY, PRECISION,
            )  # fmt: skip
    tl.store(grad_bias + group * (2 * HEADS * P) + first_column + p, tl.sum(sum_b, 0) + tail_b, mask=p < P)


class Parts:
    """Where the way back leaves sums over many chunks: in a few groups, so that they stay small beside the tokens."""

    def __init__(self, qk: Tensor, wx: Tensor, chunks: int, depends: bool, programs: int = PROGRAMS) -> None:
        _, heads, _, p, stored = wx.shape
        few = max(1, min(programs // (2 * heads), qk.shape[0] // stored))
        self.per_group = max(1, ceil_div(chunks, few))
        self.groups = ceil_div(chunks, self.per_group)
        self.shape, self.device = wx.shape, qk.device
        self.of_score = self._empty(heads, p, 2, stored)
        self.of_wx = None if depends else self._empty(heads, 2, p, stored)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty((self.groups, *shape), dtype=torch.float32, device=self.device)

    def weight_gradient(self) -> Tensor:
        """Of wx (1, H, 2, p, S)."""
        assert self.of_wx is not None
        return column_sum(self.of_wx.flatten(1), torch.float32).view(1, *self.shape[1:])

    def score_gradient(self, like: Tensor) -> Tensor:
        """Of W_o (p, 2s)."""
        p, stored, rank = self.shape[3], self.shape[4], like.shape[1] // 2
        total = column_sum(self.of_score.flatten(2).flatten(0, 1), like.dtype).view(p, 2, stored)
        return total[:, :, :rank].reshape(p, 2 * rank)


def sizes(qk: Tensor, wx: Tensor, rank: int) -> dict[str, object]:
    return {"HEADS": wx.shape[1], "P": wx.shape[3], "S": wx.shape[4], "RANK": rank, "PRECISION": precision(qk.dtype)}


def mix_forward(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    score_bias: Tensor | None,
    seqs: Sequences,
    whole: bool,
    measured: bool,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs (rows, H·p) and, if they are to be measured, the energies' partial sums (chunks, H, 2, S)."""
    heads, p, stored = wx.shape[1], wx.shape[3], wx.shape[4]
    rank = score_weight.shape[1] // 2
    each = (torch.empty if whole else torch.zeros)((qk.shape[0], heads * p), dtype=qk.dtype, device=qk.device)
    chunks = seqs.chunk_start.shape[0]
    energy = torch.empty((chunks if measured else 0, heads, 2, stored), dtype=torch.float32, device=qk.device)
    size = wide_tiles(qk.dtype, p, rank)
    if chunks:
        _mix[(chunks * heads,)](
            qk, wx, score_weight, score_weight if score_bias is None else score_bias, each, energy,
            seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end, wx.stride(0) if wx.shape[0] > 1 else 0,
            **sizes(qk, wx, rank), BT=size.tokens, TAIL=size.tail, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            BIAS=score_bias is not None, ENERGY=measured,
            num_warps=size.warps, num_stages=size.stages, maxnreg=size.registers,
        )  # fmt: skip
    return each, energy


def mix_backward(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    grad_each: Tensor,
    grad_energy: Tensor | None,
    seqs: Sequences,
    depends: bool,
    whole: bool,
    spend: bool = False,
    spend_wx: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qk, of wx in its dtype, of the score map, and of the projection's bias.

    depends: each sequence has weights of its own. spend, spend_wx: the gradient may take the place of qk, of wx:
    a program reads and writes its own parts of them alone. Rows of qk between the sequences then stay as they are:
    x is zero there, and nobody asks for their gradient.
    """
    heads, p, rank = wx.shape[1], wx.shape[3], score_weight.shape[1] // 2
    chunks = seqs.chunk_start.shape[0]
    size = wide_back_tiles(qk.dtype, p, rank)
    parts = Parts(qk, wx, chunks, depends, AT_ONCE if size.rank_blocks == 1 else PROGRAMS)
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    if not depends:
        grad_wx = parts.of_wx
    elif seqs.single:
        grad_wx = wx if spend_wx else torch.empty_like(wx)
    else:
        grad_wx = torch.empty((chunks, *wx.shape[1:]), dtype=torch.float32, device=qk.device)
    assert grad_wx is not None
    grad_bias = torch.empty((parts.groups, 2 * heads * p), dtype=torch.float32, device=qk.device)
    if chunks:
        _mix_backward[(parts.groups * 2 * heads,)](
            qk, wx, score_weight, grad_each, qk if grad_energy is None else grad_energy, grad_qk, grad_wx,
            parts.of_score, grad_bias, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end,
            wx.stride(0) if wx.shape[0] > 1 else 0, chunks, parts.per_group,
            **sizes(qk, wx, rank), BT=size.tokens, TAIL=size.tail, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            BR=power_of_two(rank), DEPENDS=depends, ENERGY=grad_energy is not None,
            num_warps=size.warps, num_stages=size.stages, maxnreg=size.registers,
        )  # fmt: skip
    grad_wx = segment_sum(grad_wx, seqs, wx.dtype) if depends else parts.weight_gradient()
    return grad_qk, grad_wx, parts.score_gradient(score_weight), column_sum(grad_bias, qk.dtype)
