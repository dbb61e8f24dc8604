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
from .square import add_product, energy_map, in_one, no_sums, output_map, store_energies, weight_gradients

WIDEST = 64  # head width beyond which a program cannot hold the p × p sums
PROGRAMS = 768  # enough to fill a large GPU a few times over


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
def _mix(
    qk, wx, score_weight, score_bias, each, energy, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of one head, both sides."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    w_q = wx + tl.load(chunk_sequence + chunk) * wx_batch_stride + head * (2 * P * S)
    w_k = w_q + P * S
    a_q = output_map(w_q, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
    a_k = output_map(w_k, score_weight + RANK, qk, P, S, RANK, BP, BS, NS, PRECISION)
    shift = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32) if BIAS else tl.zeros((BP,), tl.float32)
    low_q, high_q = no_sums(BT, BP)
    low_k, high_k = no_sums(BT, BP)
    qk += start * (2 * HEADS * P) + head * P
    each += start * (HEADS * P) + head * P
    rows = (end - start).to(tl.int32)
    for first in range(0, rows, BT):
        row = first + t
        inside = (row < rows)[:, None] & (p[None] < P)
        place = qk + row[:, None] * (2 * HEADS * P) + p[None]
        z_q = tl.load(place, mask=inside, other=0.0)
        z_k = tl.load(place + HEADS * P, mask=inside, other=0.0)
        wide_q, _, _ = normalised(z_q)
        wide_k, _, _ = normalised(z_k)
        phi_q, phi_k = wide_q.to(z_q.dtype), wide_k.to(z_k.dtype)
        out = dot(phi_q, a_q, PRECISION) + dot(phi_k, a_k, PRECISION) + shift[None]
        if ENERGY:
            low_q, high_q = add_product(low_q, high_q, phi_q, phi_q, BT, BP, PRECISION)
            low_k, high_k = add_product(low_k, high_k, phi_k, phi_k, BT, BP, PRECISION)
        tl.store(each + row[:, None] * (HEADS * P) + p[None], out.to(z_q.dtype), mask=inside)
    if ENERGY:
        energy += program.to(tl.int64) * (2 * S)
        store_energies(in_one(low_q, high_q, BT, BP), w_q, energy, qk, P, S, BP, BS, NS, PRECISION)
        store_energies(in_one(low_k, high_k, BT, BP), w_k, energy + S, qk, P, S, BP, BS, NS, PRECISION)


@triton.jit
def _mix_backward(
    qk, wx, score_weight, grad_each, grad_energy, grad_qk, grad_wx, grad_score, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_batch_stride, chunks, per_group,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BR: tl.constexpr,
    DEPENDS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A group of chunks, one head and one side."""
    group, lane = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    head, side = lane // 2, lane % 2
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    first_column = (side * HEADS + head) * P
    score_weight += side * RANK
    grad_score += ((group * HEADS + head) * (2 * P) + side) * S
    sum_b = tl.zeros((BP,), tl.float32)
    begins = group * per_group
    for chunk in range(begins, tl.minimum(begins + per_group, chunks)):
        start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
        sequence = tl.load(chunk_sequence + chunk)
        w = wx + sequence * wx_batch_stride + lane * (P * S)
        of_energy = grad_energy + (sequence * (2 * HEADS) + lane) * S
        a = output_map(w, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
        if ENERGY:
            b, most = energy_map(w, of_energy, qk, P, S, RANK, BP, BS, NS, BR, PRECISION)
        low, high = no_sums(BT, BP)  # D
        gram_low, gram_high = no_sums(BT, BP)  # C
        begin = start * (2 * HEADS * P) + first_column
        from_out = grad_each + start * (HEADS * P) + head * P
        rows = (end - start).to(tl.int32)
        for first in range(0, rows, BT):
            row = first + t
            inside = (row < rows)[:, None] & (p[None] < P)
            place = row[:, None] * (2 * HEADS * P) + p[None]
            z = tl.load(qk + begin + place, mask=inside, other=0.0)
            g = tl.load(from_out + row[:, None] * (HEADS * P) + p[None], mask=inside, other=0.0)
            wide, norm, inverse = normalised(z)
            phi = wide.to(z.dtype)
            grad = dot(g, tl.trans(a), PRECISION)
            low, high = add_product(low, high, phi, g, BT, BP, PRECISION)
            if ENERGY:
                grad += dot(phi, b, PRECISION) * most
                gram_low, gram_high = add_product(gram_low, gram_high, phi, phi, BT, BP, PRECISION)
            along = tl.where(norm > EPS, tl.sum(wide * grad, 1), 0.0)
            dz = (grad - wide * along[:, None]) * inverse[:, None]
            sum_b += tl.sum(dz, 0)
            tl.store(grad_qk + begin + place, dz.to(z.dtype), mask=inside)
        owner = chunk if DEPENDS else group
        weight_gradients(
            in_one(low, high, BT, BP), in_one(gram_low, gram_high, BT, BP), w, score_weight, of_energy,
            grad_wx + (owner * (2 * HEADS) + lane) * (P * S), grad_score, chunk > begins, qk,
            P, S, RANK, BP, BS, NS, DEPENDS, ENERGY, PRECISION,
        )  # fmt: skip
    tl.store(grad_bias + group * (2 * HEADS * P) + first_column + p, sum_b, mask=p < P)


class Parts:
    """Where the way back leaves sums over many chunks: in a few groups, so that they stay small beside the tokens."""

    def __init__(self, qk: Tensor, wx: Tensor, chunks: int, depends: bool) -> None:
        _, heads, _, p, stored = wx.shape
        few = max(1, min(PROGRAMS // (2 * heads), qk.shape[0] // stored))
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
            **sizes(qk, wx, rank), BT=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
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
    parts = Parts(qk, wx, chunks, depends)
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    if not depends:
        grad_wx = parts.of_wx
    elif seqs.single:
        grad_wx = wx if spend_wx else torch.empty_like(wx)
    else:
        grad_wx = torch.empty((chunks, *wx.shape[1:]), dtype=torch.float32, device=qk.device)
    assert grad_wx is not None
    grad_bias = torch.empty((parts.groups, 2 * heads * p), dtype=torch.float32, device=qk.device)
    size = wide_back_tiles(qk.dtype, p, rank)
    if chunks:
        _mix_backward[(parts.groups * 2 * heads,)](
            qk, wx, score_weight, grad_each, qk if grad_energy is None else grad_energy, grad_qk, grad_wx,
            parts.of_score, grad_bias, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end,
            wx.stride(0) if wx.shape[0] > 1 else 0, chunks, parts.per_group,
            **sizes(qk, wx, rank), BT=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            BR=power_of_two(rank), DEPENDS=depends, ENERGY=grad_energy is not None,
            num_warps=size.warps, num_stages=size.stages, maxnreg=size.registers,
        )  # fmt: skip
    grad_wx = segment_sum(grad_wx, seqs, wx.dtype) if depends else parts.weight_gradient()
    return grad_qk, grad_wx, parts.score_gradient(score_weight), column_sum(grad_bias, qk.dtype)
