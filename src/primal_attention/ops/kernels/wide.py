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

Layouts: qk (rows, 2·H·p); each head's output o: (rows, H·p); score_weight (p, 2·rank); wx (B or 1, H, 2, p, S), or in
two tensors, wx for e and `other` for r, (B, H, 1, p, S) each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import precision, wide_tiles
from .fold import foldable
from .landmarks import second_side
from .products import dot
from .scores import EPS
from .sequences import Sequences
from .square import add_product, in_one, no_sums, output_map, store_energies

WIDEST = 64  # head width beyond which a program cannot hold the p × p sums


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
def rows_forward(
    z, out, a_q, a_k, shift, first, rows, sums_q, sums_k,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows: writes the head's output, and adds to both C."""
    row, p = first + tl.arange(0, BT), tl.arange(0, BP)
    inside = (row < rows)[:, None] & (p[None] < P)
    place = z + row[:, None] * (2 * HEADS * P) + p[None]
    z_q = tl.load(place, mask=inside, other=0.0)
    z_k = tl.load(place + HEADS * P, mask=inside, other=0.0)
    wide_q, _, _ = normalised(z_q)
    wide_k, _, _ = normalised(z_k)
    phi_q, phi_k = wide_q.to(z_q.dtype), wide_k.to(z_k.dtype)
    found = dot(phi_q, a_q, PRECISION) + dot(phi_k, a_k, PRECISION) + shift[None]
    if ENERGY:
        sums_q = add_product(sums_q[0], sums_q[1], phi_q, phi_q, BT, BP, PRECISION)
        sums_k = add_product(sums_k[0], sums_k[1], phi_k, phi_k, BT, BP, PRECISION)
    tl.store(out + row[:, None] * (HEADS * P) + p[None], found.to(z_q.dtype), mask=inside)
    return sums_q, sums_k


@triton.jit
def _mix(
    qk, wx_e, wx_r, score_weight, score_bias, each, energy, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, APART: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of one head, both sides."""
    program = tl.program_id(0)
    chunk, head = program // HEADS, program % HEADS
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p = tl.arange(0, BP)
    place = tl.load(chunk_sequence + chunk) * wx_batch_stride + head * APART
    w_q, w_k = wx_e + place, wx_r + place
    a_q = output_map(w_q, score_weight, qk, P, S, RANK, BP, BS, NS, PRECISION)
    a_k = output_map(w_k, score_weight + RANK, qk, P, S, RANK, BP, BS, NS, PRECISION)
    shift = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32) if BIAS else tl.zeros((BP,), tl.float32)
    sums_q, sums_k = no_sums(BT, BP), no_sums(BT, BP)
    z = qk + start * (2 * HEADS * P) + head * P
    out = each + start * (HEADS * P) + head * P
    rows = (end - start).to(tl.int32)
    for first in range(0, rows, BT):
        sums_q, sums_k = rows_forward(
            z, out, a_q, a_k, shift, first, rows, sums_q, sums_k, HEADS, P, BT, BP, ENERGY, PRECISION
        )
    if ENERGY:
        energy += program.to(tl.int64) * (2 * S)
        store_energies(in_one(sums_q[0], sums_q[1], BT, BP), w_q, energy, qk, P, S, BP, BS, NS, PRECISION)
        store_energies(in_one(sums_k[0], sums_k[1], BT, BP), w_k, energy + S, qk, P, S, BP, BS, NS, PRECISION)


def sizes(qk: Tensor, wx: Tensor, rank: int) -> dict[str, object]:
    _, heads, sides, p, stored = wx.shape
    kind = precision(qk.dtype)
    return {"HEADS": heads, "P": p, "S": stored, "APART": sides * p * stored, "RANK": rank, "PRECISION": kind}


def mix_forward(
    qk: Tensor,
    wx: Tensor,
    other: Tensor | None,
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
            qk, wx, second_side(wx, other), score_weight, score_weight if score_bias is None else score_bias,
            each, energy, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end, wx.stride(0) if wx.shape[0] > 1 else 0,
            **sizes(qk, wx, rank), BT=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            BIAS=score_bias is not None, ENERGY=measured,
            num_warps=size.warps, num_stages=size.stages, maxnreg=size.registers,
        )  # fmt: skip
    return each, energy
