"""The way back of `wide.py`, whose docstring has the equations and the layouts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two, wide_back_tiles
from .landmarks import second_side
from .products import dot
from .scores import EPS
from .segments import column_sum, segment_sum, two_column_sums
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
    twice_energy,
    weight_gradients,
    weight_gradients_at_once,
)
from .wide import normalised, sizes

PROGRAMS = 768  # enough to fill a large GPU a few times over
AT_ONCE = 264  # as many as stand side by side on a large GPU, where each does little between its chunks


@triton.jit
def rows_back(
    z, g, dz, a, b, most, first, rows, sums, grams,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows: writes dz, adds to Dᵀ and C, and hands dz on."""
    row, p = first + tl.arange(0, BT), tl.arange(0, BP)
    inside = (row < rows)[:, None] & (p[None] < P)
    place = row[:, None] * (2 * HEADS * P) + p[None]
    z = tl.load(z + place, mask=inside, other=0.0)
    g = tl.load(g + row[:, None] * (HEADS * P) + p[None], mask=inside, other=0.0)
    wide, norm, inverse = normalised(z)
    phi = wide.to(z.dtype)
    # z and g are factors as they were loaded wherever that can be: they then never leave shared memory.
    sums = add_product(sums[0], sums[1], g, phi, BT, BP, PRECISION)
    grad = dot(g, tl.trans(a), PRECISION)
    if ENERGY:
        if z.dtype == tl.float16:  # which may not hold φ over the norm
            grams = add_product(grams[0], grams[1], phi, phi, BT, BP, PRECISION)
        else:
            grams = add_product(grams[0], grams[1], z, (wide * inverse[:, None]).to(z.dtype), BT, BP, PRECISION)
        grad += dot(z, b, PRECISION) * (inverse * most)[:, None]
    along = tl.where(norm > EPS, tl.sum(wide * grad, 1), 0.0)
    found = (grad - wide * along[:, None]) * inverse[:, None]
    tl.store(dz + place, found.to(z.dtype), mask=inside)
    return sums, grams, found


@triton.jit
def _mix_backward(
    qk, wx_e, wx_r, score_weight, grad_each, grad_energy, grad_qk, of_e, of_r, grad_score, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_batch_stride, chunks, per_group,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, APART: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, BR: tl.constexpr,
    DEPENDS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A group of chunks, one head and one side. Where W is one block, it is read once and stays at hand."""
    group, lane = (tl.program_id(0) // (2 * HEADS)).to(tl.int64), tl.program_id(0) % (2 * HEADS)
    head, side = lane // 2, lane % 2
    p = tl.arange(0, BP)
    first_column = (side * HEADS + head) * P
    kind: tl.constexpr = qk.dtype.element_ty
    wx = tl.where(side == 0, wx_e, wx_r)
    grad_wx = tl.where(side == 0, of_e, of_r)
    score_weight += side * RANK
    grad_score += ((group * HEADS + head) * (2 * P) + side) * S
    if NS == 1:
        w_o = score_map(score_weight, 0, P, RANK, BP, BS)
    sum_b = tl.zeros((BT // 16, BP), tl.float32)  # sixteen rows are a warp's: no warp waits for another
    begins = group * per_group
    for chunk in range(begins, tl.minimum(begins + per_group, chunks)):
        start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
        sequence = tl.load(chunk_sequence + chunk)
        w = wx + sequence * wx_batch_stride + head * APART
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
        for first in range(0, rows, BT):
            sums, grams, found = rows_back(
                z, g, dz, a, b, most, first, rows, sums, grams, HEADS, P, BT, BP, ENERGY, PRECISION
            )
            sum_b += tl.sum(tl.reshape(found, (BT // 16, 16, BP)), 1)
        own = grad_wx + ((chunk if DEPENDS else group) * HEADS + head) * APART
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
    tl.store(grad_bias + group * (2 * HEADS * P) + first_column + p, tl.sum(sum_b, 0), mask=p < P)


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

    def score_and_bias_gradients(self, like: Tensor, of_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Of W_o (p, 2s), and of the projection's bias from its partial sums."""
        p, stored, rank = self.shape[3], self.shape[4], like.shape[1] // 2
        total, bias = two_column_sums(self.of_score.flatten(2).flatten(0, 1), of_bias, like.dtype)
        return total.view(p, 2, stored)[:, :, :rank].reshape(p, 2 * rank), bias


def _room(wx: Tensor, spend: bool, chunks: int, seqs: Sequences) -> Tensor:
    """For what the chunks give the gradient of weights that depend on the data."""
    if seqs.single:
        return wx if spend else torch.empty_like(wx)
    return torch.empty((chunks, *wx.shape[1:]), dtype=torch.float32, device=wx.device)


def mix_backward(
    qk: Tensor,
    wx: Tensor,
    other: Tensor | None,
    score_weight: Tensor,
    grad_each: Tensor,
    grad_energy: Tensor | None,
    seqs: Sequences,
    depends: bool,
    whole: bool,
    spend: bool = False,
    spend_wx: bool = False,
    spend_other: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of qk, of wx and other in their dtype, of the score map, and of the projection's bias.

    depends: each sequence has weights of its own. spend…: the gradient may take the place of qk, of wx, of other:
    a program reads and writes its own parts of them alone. Rows of qk between the sequences then stay as they are:
    x is zero there, and nobody asks for their gradient.
    """
    heads, p, rank = wx.shape[1], wx.shape[3], score_weight.shape[1] // 2
    chunks = seqs.chunk_start.shape[0]
    size = wide_back_tiles(qk.dtype, p, rank)
    parts = Parts(qk, wx, chunks, depends, AT_ONCE if size.rank_blocks == 1 else PROGRAMS)
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    grad_wx = _room(wx, spend_wx, chunks, seqs) if parts.of_wx is None else parts.of_wx
    grad_other = None if other is None else _room(other, spend_other, chunks, seqs)
    grad_bias = torch.empty((parts.groups, 2 * heads * p), dtype=torch.float32, device=qk.device)
    if chunks:
        _mix_backward[(parts.groups * 2 * heads,)](
            qk, wx, second_side(wx, other), score_weight, grad_each, qk if grad_energy is None else grad_energy,
            grad_qk, grad_wx, second_side(grad_wx, grad_other), parts.of_score, grad_bias,
            seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end, wx.stride(0) if wx.shape[0] > 1 else 0,
            chunks, parts.per_group,
            **sizes(qk, wx, rank), BT=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            BR=power_of_two(rank), DEPENDS=depends, ENERGY=grad_energy is not None,
            num_warps=size.warps, num_stages=size.stages, maxnreg=size.registers,
        )  # fmt: skip
    grad_wx = segment_sum(grad_wx, seqs, wx.dtype) if depends else parts.weight_gradient()
    if grad_other is not None:
        grad_other = segment_sum(grad_other, seqs, wx.dtype)
    return grad_qk, grad_wx, grad_other, *parts.score_and_bias_gradients(score_weight, grad_bias)
