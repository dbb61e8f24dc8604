"""Scores and energies in one pass: normalise, project, write e and r, add up Σe² and Σr²; and the way back.

A program owns one chunk of one sequence, one head and one side (0: queries → e, 1: keys → r). With z a row of q or k
and u = W_{·|X}ᵀ z it uses e = u / ‖z‖, so the normalised row is never stored nor rounded. The way back recomputes e:

    de ← de + 2 g_E ⊙ e        (g_E: the gradient of the energies)
    dz = W (de / ‖z‖) − z (e·de) / ‖z‖²,      dW = Σ zᵀ (de / ‖z‖),      db = Σ dz

Sums over a chunk are written as partial sums and added in a fixed order: bit-reproducible from run to run.

Layouts: qk (rows, 2·H·p) as the projection wrote it; wx (B or 1, H, 2, p, S) float32 or as qk; scores (rows, H, 2, S),
with S the stored rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import precision, stored_rank, tiles
from .products import dot
from .sequences import Sequences

EPS = tl.constexpr(1e-12)


@triton.jit
def _scores(
    qk, wx, scores, energy, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    qk += (side * HEADS + head) * P
    wx += sequence * wx_batch_stride + lane * (P * S)
    for block in tl.static_range(NS):
        s = block * BS + tl.arange(0, BS)
        w = tl.load(wx + p[:, None] * S + s[None], mask=(p[:, None] < P) & (s[None] < S), other=0.0).to(
            qk.dtype.element_ty
        )
        total = tl.zeros((BS,), tl.float32)
        for first in range(start, end, BT):
            row = first + t
            live = row < end
            z = tl.load(qk + row[:, None] * (2 * HEADS * P) + p[None], mask=live[:, None] & (p[None] < P), other=0.0)
            z32 = z.to(tl.float32)
            inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(z32 * z32, 1)), EPS)
            e = dot(z, w, PRECISION) * inverse[:, None]
            total += tl.sum(e * e, 0)
            # The first column beyond the rank, where there is one, holds ones: with it the product that gives the
            # gradient of the output map gives the gradient of its bias too.
            e = tl.where((s[None] == RANK) & (lane == 0), 1.0, e)
            place = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
            tl.store(place, e.to(scores.dtype.element_ty), mask=live[:, None] & (s[None] < S))
        tl.store(energy + (chunk.to(tl.int64) * (2 * HEADS) + lane) * S + s, total, mask=s < S)


@triton.jit
def _scores_backward(
    qk, wx, grad_scores, grad_energy, grad_qk, grad_wx, grad_bias,
    chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole rank fits one block: everything in one pass."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    column = (side * HEADS + head) * P + p
    w = tl.load(
        wx + sequence * wx_batch_stride + lane * (P * S) + p[:, None] * S + s[None],
        mask=(p[:, None] < P) & (s[None] < S), other=0.0,
    ).to(qk.dtype.element_ty)  # fmt: skip
    # Stored columns beyond the rank hold no direction: whatever gradient arrives there ends here.
    twice = 2.0 * tl.load(grad_energy + (sequence * (2 * HEADS) + lane) * S + s, mask=s < RANK, other=0.0)
    sum_w = tl.zeros((BP, BS), tl.float32)
    sum_b = tl.zeros((BP,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0)
        de = tl.load(
            grad_scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None],
            mask=live[:, None] & (s[None] < RANK), other=0.0,
        ).to(tl.float32)  # fmt: skip
        z32 = z.to(tl.float32)
        norm = tl.sqrt(tl.sum(z32 * z32, 1))
        inverse = 1.0 / tl.maximum(norm, EPS)
        e = dot(z, w, PRECISION) * inverse[:, None]
        de += twice[None] * e
        along = tl.where(norm > EPS, tl.sum(e * de, 1) * inverse * inverse, 0.0)
        du = (de * inverse[:, None]).to(z.dtype)
        dz = dot(du, tl.trans(w), PRECISION) - z32 * along[:, None]
        sum_w += dot(tl.trans(z), du, PRECISION)
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + row[:, None] * (2 * HEADS * P) + column[None], dz.to(z.dtype), mask=inside)
    out = chunk.to(tl.int64) * (2 * HEADS) + lane
    tl.store(
        grad_wx + out * (P * S) + p[:, None] * S + s[None], sum_w.to(grad_wx.dtype.element_ty),
        mask=(p[:, None] < P) & (s[None] < S),
    )  # fmt: skip
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)


@triton.jit
def _scores_backward_rows(
    qk, wx, grad_scores, grad_energy, grad_qk, grad_bias, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A rank of several blocks, first half: dz and db, a block of directions after the other."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = (side * HEADS + head) * P + p
    wx += sequence * wx_batch_stride + lane * (P * S)
    sum_b = tl.zeros((BP,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0)
        z32 = z.to(tl.float32)
        norm = tl.sqrt(tl.sum(z32 * z32, 1))
        inverse = 1.0 / tl.maximum(norm, EPS)
        dz = tl.zeros((BT, BP), tl.float32)
        along = tl.zeros((BT,), tl.float32)
        for block in range(NS):
            s = block * BS + tl.arange(0, BS)
            w = tl.load(wx + p[:, None] * S + s[None], mask=(p[:, None] < P) & (s[None] < S), other=0.0).to(
                qk.dtype.element_ty
            )
            twice = 2.0 * tl.load(grad_energy + (sequence * (2 * HEADS) + lane) * S + s, mask=s < RANK, other=0.0)
            de = tl.load(
                grad_scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None],
                mask=live[:, None] & (s[None] < RANK), other=0.0,
            ).to(tl.float32)  # fmt: skip
            e = dot(z, w, PRECISION) * inverse[:, None]
            de += twice[None] * e
            along += tl.sum(e * de, 1)
            du = (de * inverse[:, None]).to(z.dtype)
            dz += dot(du, tl.trans(w), PRECISION)
        dz -= z32 * tl.where(norm > EPS, along * inverse * inverse, 0.0)[:, None]
        sum_b += tl.sum(dz, 0)
        tl.store(grad_qk + row[:, None] * (2 * HEADS * P) + column[None], dz.to(z.dtype), mask=inside)
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)


@triton.jit
def _scores_backward_weights(
    qk, wx, grad_scores, grad_energy, grad_wx, chunk_sequence, chunk_start, chunk_end, wx_batch_stride,
    HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A rank of several blocks, second half: dW of one block of directions."""
    chunk, lane, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), block * BS + tl.arange(0, BS)
    column = (side * HEADS + head) * P + p
    w = tl.load(
        wx + sequence * wx_batch_stride + lane * (P * S) + p[:, None] * S + s[None],
        mask=(p[:, None] < P) & (s[None] < S), other=0.0,
    ).to(qk.dtype.element_ty)  # fmt: skip
    twice = 2.0 * tl.load(grad_energy + (sequence * (2 * HEADS) + lane) * S + s, mask=s < RANK, other=0.0)
    sum_w = tl.zeros((BP, BS), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        inside = live[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0)
        z32 = z.to(tl.float32)
        inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(z32 * z32, 1)), EPS)
        de = tl.load(
            grad_scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None],
            mask=live[:, None] & (s[None] < RANK), other=0.0,
        ).to(tl.float32)  # fmt: skip
        de += twice[None] * (dot(z, w, PRECISION) * inverse[:, None])
        sum_w += dot(tl.trans(z), (de * inverse[:, None]).to(z.dtype), PRECISION)
    out = chunk.to(tl.int64) * (2 * HEADS) + lane
    tl.store(
        grad_wx + out * (P * S) + p[:, None] * S + s[None], sum_w.to(grad_wx.dtype.element_ty),
        mask=(p[:, None] < P) & (s[None] < S),
    )  # fmt: skip


def scores_forward(qk: Tensor, wx: Tensor, seqs: Sequences, rank: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Scores (rows, H, 2, S) and the energies' partial sums per chunk (chunks, H, 2, S).

    whole: the sequences cover every row; otherwise the rows between them must read as zero.
    """
    heads, p, stored = wx.shape[1], wx.shape[3], stored_rank(rank)
    scores = (torch.empty if whole else torch.zeros)((qk.shape[0], heads, 2, stored), dtype=qk.dtype, device=qk.device)
    chunks = seqs.chunk_start.shape[0]
    energy = torch.empty((chunks, heads, 2, stored), dtype=torch.float32, device=qk.device)
    size = tiles(qk.dtype, p, rank)
    if chunks:
        _scores[(chunks, 2 * heads)](
            qk, wx, scores, energy, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end,
            wx.stride(0) if wx.shape[0] > 1 else 0,
            HEADS=heads, P=p, S=stored, RANK=rank, BT=size.tokens, BP=size.width, BS=size.rank, NS=size.rank_blocks,
            PRECISION=precision(qk.dtype), num_warps=size.warps,
        )  # fmt: skip
    return scores, energy


def scores_backward(
    qk: Tensor,
    wx: Tensor,
    grad_scores: Tensor,
    grad_energy: Tensor,
    seqs: Sequences,
    rank: int,
    depends: bool,
    whole: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_qk like qk, and per chunk the partial sums of grad_wx (chunks, H, 2, p, S) and of the bias' gradient.

    depends: each sequence has weights of its own; with a single chunk each, its sum is their gradient, in their dtype.
    spend: grad_qk may take the place of qk: a program reads and writes its own rows and columns alone.
    """
    heads, p, stored = wx.shape[1], wx.shape[3], stored_rank(rank)
    chunks = seqs.chunk_start.shape[0]
    size = tiles(qk.dtype, p, rank)
    spend = spend and whole and size.rank_blocks == 1  # several blocks of directions read qk twice
    grad_qk = qk if spend else (torch.empty_like if whole else torch.zeros_like)(qk)
    kind = wx.dtype if depends and seqs.single else torch.float32
    grad_wx = torch.empty((chunks, heads, 2, p, stored), dtype=kind, device=qk.device)
    grad_bias = torch.empty((chunks, 2 * heads * p), dtype=torch.float32, device=qk.device)
    if not chunks:
        return grad_qk, grad_wx, grad_bias
    tables = (seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end, wx.stride(0) if wx.shape[0] > 1 else 0)
    grid = (chunks, 2 * heads)
    common = {
        "HEADS": heads, "P": p, "S": stored, "RANK": rank, "BT": min(size.tokens, 64), "BP": size.width,
        "BS": size.rank, "PRECISION": precision(qk.dtype), "num_warps": size.warps,
    }  # fmt: skip
    if size.rank_blocks == 1:
        _scores_backward[grid](qk, wx, grad_scores, grad_energy, grad_qk, grad_wx, grad_bias, *tables, **common)
    else:
        rows = (qk, wx, grad_scores, grad_energy, grad_qk, grad_bias)
        _scores_backward_rows[grid](*rows, *tables, NS=size.rank_blocks, **common)
        weights = (qk, wx, grad_scores, grad_energy, grad_wx)
        _scores_backward_weights[(chunks, 2 * heads, size.rank_blocks)](*weights, *tables, **common)
    return grad_qk, grad_wx, grad_bias
