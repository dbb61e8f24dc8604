"""The causal data-dependent scores: n landmarks as n keys whose values are the rows of W_e.

    e_i = Σ_{j: g_j ≤ i} a_ij W_e[j],      a_ij = γ^(i − g_j) φ(z_i)·x_{g_j}

so W_{e|X≤i} is never formed. With de the whole gradient of e (from the output and from the energies),

    dφ_i = Σ_j γ^(i − g_j) (de_i·W_e[j]) x_{g_j},   dz = (dφ − φ (e·de)) / ‖z‖
    dW_e[j] = Σ_i a_ij de_i,   dx_{g_j} = Σ_i γ^(i − g_j) (de_i·W_e[j]) φ_i
    d log γ = Σ_ij (i − g_j) a_ij (de_i·W_e[j])

Rows of the landmarks come as in `landmarks.py` (−1 where the sequence does not reach the grid), their positions as
`grid`. Sums over tokens are partial sums of a chunk, added in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two, precision, stored_rank
from .products import dot
from .scores import EPS
from .sequences import Sequences


@triton.jit
def _tokens(
    qk, row, live, column, HEADS: tl.constexpr, P: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """A block's rows z, their norms' inverse, and φ."""
    p = tl.arange(0, BP)
    z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=live[:, None] & (p[None] < P), other=0.0)
    z32 = z.to(tl.float32)
    norm = tl.sqrt(tl.sum(z32 * z32, 1))
    inverse = 1.0 / tl.maximum(norm, EPS)
    return z, norm, inverse, (z32 * inverse[:, None]).to(z.dtype)


@triton.jit
def _landmarks(
    x, rows, grid, w, sequence, head, first, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """A block of landmarks: their rows of x and of W, and their positions (beyond everything where there is none)."""
    mark = first + tl.arange(0, BN)
    p, s = tl.arange(0, BP), tl.arange(0, BS)
    row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
    xl = tl.load(
        x + row[:, None] * (HEADS * P) + head * P + p[None], mask=(row >= 0)[:, None] & (p[None] < P), other=0.0
    )  # fmt: skip
    inside = (mark < n)[:, None] & (s[None] < RANK)
    value = tl.load(w + (head * n + mark)[:, None] * RANK + s[None], mask=inside, other=0.0).to(xl.dtype)
    place = tl.load(grid + mark, mask=mark < n, other=0)
    return xl, value, tl.where(row >= 0, place, 2147483647)


@triton.jit
def _fade(position, place, live, rate, DECAY: tl.constexpr):
    """γ^(i − g_j) where the landmark was seen, else 0."""
    age = position[:, None] - place[None]
    seen = (age >= 0) & live[:, None]
    power = tl.exp(rate * tl.maximum(age, 0).to(tl.float32)) if DECAY else age.to(tl.float32) * 0.0 + 1.0
    return tl.where(seen, power, 0.0)


@triton.jit
def _growing_scores(
    qk, x, rows, grid, w_e, w_r, scores, energy, log_decay, starts, chunk_sequence, chunk_start, chunk_end, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    origin = tl.load(starts + sequence)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    column = (side * HEADS + head) * P + p
    rate = tl.load(log_decay + head) if DECAY else 0.0
    w = w_e if side == 0 else w_r
    total = tl.zeros((BS,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        _, _, _, phi = _tokens(qk, row, live, column, HEADS, P, BP)
        e = tl.zeros((BT, BS), tl.float32)
        for mark in range(0, n, BN):
            xl, value, place = _landmarks(x, rows, grid, w, sequence, head, mark, n, HEADS, P, RANK, BN, BP, BS)
            a = dot(phi, tl.trans(xl), PRECISION) * _fade(row - origin, place, live, rate, DECAY)
            e += dot(a.to(phi.dtype), value, PRECISION)
        total += tl.sum(e * e, 0)
        e = tl.where((s[None] == RANK) & (lane == 0), 1.0, e)  # see scores.py
        out = scores + row[:, None] * (2 * HEADS * S) + lane * S + s[None]
        tl.store(out, e.to(scores.dtype.element_ty), mask=live[:, None] & (s[None] < S))
    tl.store(energy + (chunk.to(tl.int64) * (2 * HEADS) + lane) * S + s, total, mask=s < S)


@triton.jit
def _whole_gradient(
    scores, grad_scores, grad_energy, row, live, lane, sequence,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """e as it was written, and its gradient from the output and from the energies."""
    s = tl.arange(0, BS)
    place, inside = row[:, None] * (2 * HEADS * S) + lane * S + s[None], live[:, None] & (s[None] < RANK)
    e = tl.load(scores + place, mask=inside, other=0.0).to(tl.float32)
    twice = 2.0 * tl.load(grad_energy + (sequence * (2 * HEADS) + lane) * S + s, mask=s < RANK, other=0.0)
    return e, tl.load(grad_scores + place, mask=inside, other=0.0).to(tl.float32) + twice[None] * e


@triton.jit
def _growing_rows(
    qk, x, rows, grid, w_e, w_r, scores, grad_scores, grad_energy, grad_qk, grad_bias, grad_decay,
    log_decay, starts, chunk_sequence, chunk_start, chunk_end, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz of each token, and with it the gradients of the bias and of log γ."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    origin = tl.load(starts + sequence)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = (side * HEADS + head) * P + p
    rate = tl.load(log_decay + head) if DECAY else 0.0
    w = w_e if side == 0 else w_r
    sum_b = tl.zeros((BP,), tl.float32)
    sum_decay = tl.zeros((BT,), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        z, norm, inverse, phi = _tokens(qk, row, live, column, HEADS, P, BP)
        e, de = _whole_gradient(scores, grad_scores, grad_energy, row, live, lane, sequence, HEADS, RANK, S, BS)
        narrow = de.to(z.dtype)
        grad = tl.zeros((BT, BP), tl.float32)
        for mark in range(0, n, BN):
            xl, value, place = _landmarks(x, rows, grid, w, sequence, head, mark, n, HEADS, P, RANK, BN, BP, BS)
            da = dot(narrow, tl.trans(value), PRECISION) * _fade(row - origin, place, live, rate, DECAY)
            grad += dot(da.to(z.dtype), xl, PRECISION)
            if DECAY:
                age = tl.maximum((row - origin)[:, None] - place[None], 0).to(tl.float32)
                sum_decay += tl.sum(dot(phi, tl.trans(xl), PRECISION) * da * age, 1)
        along = tl.where(norm > EPS, tl.sum(e * de, 1) * inverse, 0.0)
        dz = (grad - z.to(tl.float32) * along[:, None]) * inverse[:, None]
        sum_b += tl.sum(dz, 0)
        inside = live[:, None] & (p[None] < P)
        tl.store(grad_qk + row[:, None] * (2 * HEADS * P) + column[None], dz.to(z.dtype), mask=inside)
    tl.store(grad_bias + chunk.to(tl.int64) * (2 * HEADS * P) + column, sum_b, mask=p < P)
    if DECAY:
        tl.store(grad_decay + chunk.to(tl.int64) * (2 * HEADS) + lane, tl.sum(sum_decay, 0))


@triton.jit
def _growing_landmarks(
    qk, x, rows, grid, w_e, w_r, scores, grad_scores, grad_energy, grad_rows, grad_w,
    log_decay, starts, chunk_sequence, chunk_start, chunk_end, n,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of a chunk send to a block of landmarks: to their rows of x and to their rows of W."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    first_mark = tl.program_id(2) * BN
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    sequence = tl.load(chunk_sequence + chunk)
    origin = tl.load(starts + sequence)
    p, t, s = tl.arange(0, BP), tl.arange(0, BT), tl.arange(0, BS)
    column = (side * HEADS + head) * P + p
    rate = tl.load(log_decay + head) if DECAY else 0.0
    w = w_e if side == 0 else w_r
    xl, value, place = _landmarks(x, rows, grid, w, sequence, head, first_mark, n, HEADS, P, RANK, BN, BP, BS)
    sum_x = tl.zeros((BN, BP), tl.float32)
    sum_w = tl.zeros((BN, BS), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        live = row < end
        _, _, _, phi = _tokens(qk, row, live, column, HEADS, P, BP)
        _, de = _whole_gradient(scores, grad_scores, grad_energy, row, live, lane, sequence, HEADS, RANK, S, BS)
        narrow = de.to(phi.dtype)
        fade = _fade(row - origin, place, live, rate, DECAY)
        a = (dot(phi, tl.trans(xl), PRECISION) * fade).to(phi.dtype)
        da = (dot(narrow, tl.trans(value), PRECISION) * fade).to(phi.dtype)
        sum_x += dot(tl.trans(da), phi, PRECISION)
        sum_w += dot(tl.trans(a), narrow, PRECISION)
    mark = first_mark + tl.arange(0, BN)
    out = ((chunk.to(tl.int64) * (2 * HEADS) + lane) * n + mark)[:, None]
    tl.store(grad_rows + out * P + p[None], sum_x, mask=(mark < n)[:, None] & (p[None] < P))
    tl.store(grad_w + out * S + s[None], sum_w, mask=(mark < n)[:, None] & (s[None] < S))


@triton.jit
def _add_rows(
    grad_rows, rows, grad_x, first_chunk, n,
    HEADS: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """grad_x[row_j] += Σ over chunks and sides; the first of equal rows adds for all of them, as in `landmarks.py`."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    mark, p = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BP)
    row = tl.load(rows + sequence * n + mark, mask=mark < n, other=-1)
    before = tl.load(rows + sequence * n + mark - 1, mask=(mark < n) & (mark > 0), other=-1)
    leads = (row >= 0) & (row != before)
    grad = tl.zeros((BN, BP), tl.float32)
    step = 0
    follows = leads.to(tl.int32)
    while tl.max(follows, 0) > 0:
        inside = (follows > 0)[:, None] & (p[None] < P)
        for chunk in range(tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)):
            place = ((chunk * HEADS + head) * 2 * n + mark + step)[:, None] * P + p[None]
            grad += tl.load(grad_rows + place, mask=inside, other=0.0)
            grad += tl.load(grad_rows + place + n * P, mask=inside, other=0.0)
        step += 1
        ahead = mark + step
        same = tl.load(rows + sequence * n + ahead, mask=(follows > 0) & (ahead < n), other=-2) == row
        follows = (same & (follows > 0)).to(tl.int32)
    target = grad_x + row[:, None] * (HEADS * P) + head * P + p[None]
    inside = leads[:, None] & (p[None] < P)
    grad += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, grad.to(grad_x.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """Tokens and landmarks of a block, as many of each, and the warps that share it."""

    rows: int
    warps: int


def blocks(head_dim: int, rank: int) -> Blocks:
    """Beyond a width or rank of 128 half as many rows, on more warps: their products would not fit in the registers."""
    return Blocks(32, 4) if max(head_dim, stored_rank(rank)) <= 128 else Blocks(16, 8)


def _sizes(qk: Tensor, w: Tensor, log_decay: Tensor | None) -> dict[str, Any]:
    heads, _, rank = w.shape
    p = qk.shape[1] // (2 * heads)
    size, passes = blocks(p, rank), precision(qk.dtype)
    if size.rows < 32 and passes == "tf32x3":
        passes = "ieee"  # three passes take more registers than there are
    return {
        "HEADS": heads, "P": p, "RANK": rank, "S": stored_rank(rank), "BT": size.rows, "BN": size.rows,
        "BP": power_of_two(p), "BS": power_of_two(stored_rank(rank)), "DECAY": log_decay is not None,
        "PRECISION": passes, "num_warps": size.warps, "num_stages": 1,
    }  # fmt: skip


def growing_forward(
    qk: Tensor,
    x: Tensor,
    rows: Tensor,
    grid: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
    seqs: Sequences,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Scores (rows, H, 2, S) and the energies' partial sums per chunk."""
    size = _sizes(qk, w_e, log_decay)
    heads, stored, chunks = w_e.shape[0], stored_rank(w_e.shape[2]), seqs.chunk_start.shape[0]
    scores = (torch.empty if whole else torch.zeros)((qk.shape[0], heads, 2, stored), dtype=qk.dtype, device=qk.device)
    energy = torch.empty((chunks, heads, 2, stored), dtype=torch.float32, device=qk.device)
    if chunks:
        _growing_scores[(chunks, 2 * heads)](
            qk, x, rows, grid, w_e, w_r, scores, energy, qk if log_decay is None else log_decay, *_where(seqs),
            w_e.shape[1], **size,
        )  # fmt: skip
    return scores, energy


def growing_backward(
    qk: Tensor,
    x: Tensor,
    rows: Tensor,
    grid: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
    scores: Tensor,
    grad_scores: Tensor,
    grad_energy: Tensor,
    seqs: Sequences,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_qk, and per chunk what goes to the bias, to log γ, to the landmarks' rows and to (W_e, W_r)."""
    size = _sizes(qk, w_e, log_decay)
    heads, n, rank = w_e.shape
    p, chunks = qk.shape[1] // (2 * heads), seqs.chunk_start.shape[0]
    grad_qk = (torch.empty_like if whole else torch.zeros_like)(qk)
    shapes = ((2 * heads * p,), (heads, 2), (heads, 2, n, p), (heads, 2, n, stored_rank(rank)))
    parts = [torch.empty((chunks, *shape), dtype=torch.float32, device=qk.device) for shape in shapes]
    grad_bias, grad_decay, grad_rows, grad_w = parts
    if chunks:
        given = (qk, x, rows, grid, w_e, w_r, scores, grad_scores, grad_energy)
        rate = qk if log_decay is None else log_decay
        _growing_rows[(chunks, 2 * heads)](
            *given, grad_qk, grad_bias, grad_decay, rate, *_where(seqs), n, **size
        )  # fmt: skip
        _growing_landmarks[(chunks, 2 * heads, ceil_div(n, size["BN"]))](
            *given, grad_rows, grad_w, rate, *_where(seqs), n, **size
        )  # fmt: skip
    return grad_qk, grad_bias, grad_decay, grad_rows, grad_w


def add_rows(grad_rows: Tensor, rows: Tensor, grad_x: Tensor, seqs: Sequences) -> None:
    """Adds the landmarks' share to grad_x (rows, H·p) in place. grad_rows: (chunks, H, 2, n, p)."""
    _, heads, _, n, p = grad_rows.shape
    if rows.shape[0]:
        _add_rows[(rows.shape[0], ceil_div(n, 32), heads)](
            grad_rows, rows, grad_x, seqs.first_chunk, n, HEADS=heads, P=p, BN=32, BP=power_of_two(p)
        )


def _where(seqs: Sequences) -> tuple[Tensor, ...]:
    return seqs.starts, seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end
