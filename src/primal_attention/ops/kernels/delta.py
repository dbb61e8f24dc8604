"""Projection weights that the tokens write with correction (`ops/written.py`), forward; per lane and chunk of C tokens

    G_i = Σ_{j≤i} log γ_j,   D_ij = e^(G_i − G_j) for j ≤ i,   T = (I + [β_i k_i·k_j D_ij]_{j<i})⁻¹
    U = T diag(β) (V − e^G K W),   Y = e^G Q W + (Q Kᵀ ∘ D) U,   W ← e^(G_C) W + Kᵀ e^(G_C − G) U

T depends on no earlier chunk: one program each. The rest goes from chunk to chunk with W in float32; its columns do not
meet, so a program takes a block of them. A lane is (sequence, side, head). Chunks and blocks are short, 32 rows, and W
is held as its transpose: no product has more rows, which keeps all on instructions that the compiler gets right (see
`running.py`) and their results in registers.

Layouts: q, k (B, N, A, H, p) and v (B, N, A, H, s) with A sides, log γ and β (B, N, A, H) float32, y (B, N, H, A, s), W
(B, A, H, p, s) float32, T (lanes, chunks, C, C). With CROSSED, a side's keys are the other side's: it reads k from the
end of the sides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, fine_precision, power_of_two, precision
from .products import dot


class DeltaTiles(NamedTuple):
    """Sizes that make one specialisation."""

    chunk: int  # tokens
    width: int  # head width, rounded up to a power of two
    rank: int  # columns of W in a program
    part: int  # of the head width, where the gradients take it in parts
    warps: int
    stages: int  # of loads ahead of the chunk at hand
    registers: int | None  # most for a thread of the scans
    gradient_registers: int | None  # and where a chunk's gradients are formed


def delta_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> DeltaTiles:
    """One choice per (dtype, head width, rank). float32 is multiplied without tensor cores, from more registers."""
    width, full = power_of_two(head_dim), power_of_two(rank)
    if dtype == torch.float32:
        return DeltaTiles(32, width, min(full, 16), min(width, 32), 8, 1, None, None)
    # The gradients fit 168 registers, three programs side by side, and take all 255 if nobody says so.
    return DeltaTiles(32, width, min(full, 32), min(width, 64), 4, 2, None, 168)


@triton.jit
def rows_of(
    chunk, lane, length, SIDES: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, CROSSED: tl.constexpr
):  # fmt: skip
    """A chunk's first place among (B, N, A, H), for k too, and which of its tokens there are."""
    batch = (lane // (SIDES * HEADS)).to(tl.int64)
    side, head = lane // HEADS % SIDES, lane % HEADS
    token = (batch * length + chunk * C) * (SIDES * HEADS)
    other = SIDES - 1 - side if CROSSED else side
    return token + side * HEADS + head, token + other * HEADS + head, chunk * C + tl.arange(0, C) < length


@triton.jit
def load_rows(base, place, live, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BW: tl.constexpr):
    """C rows of `WIDTH` numbers, `STRIDE` rows apart: a block of columns from `first` on, zeros where nothing is."""
    column = first + tl.arange(0, BW)
    offset = tl.arange(0, C)[:, None] * (STRIDE * WIDTH) + column[None]
    return tl.load(base + place * WIDTH + offset, mask=live[:, None] & (column[None] < WIDTH), other=0.0)


@triton.jit
def store_rows(
    base, place, live, first, value, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    column = first + tl.arange(0, BW)
    offset = tl.arange(0, C)[:, None] * (STRIDE * WIDTH) + column[None]
    fits = live[:, None] & (column[None] < WIDTH)
    tl.store(base + place * WIDTH + offset, value.to(base.dtype.element_ty), mask=fits)


@triton.jit
def load_numbers(base, place, live, STRIDE: tl.constexpr, C: tl.constexpr):
    """log γ or β of a chunk: what fills it neither fades nor writes."""
    return tl.load(base + place + tl.arange(0, C) * STRIDE, mask=live, other=0.0)


@triton.jit
def load_fading(log_decay, place, live, STRIDE: tl.constexpr, C: tl.constexpr):
    """G, and its last entry, bit for bit: in G_C − G the errors of both must cancel."""
    total = tl.cumsum(load_numbers(log_decay, place, live, STRIDE, C), 0)
    return total, tl.sum(tl.where(tl.arange(0, C) == C - 1, total, 0.0), 0)


@triton.jit
def left(total, C: tl.constexpr, DIAGONAL: tl.constexpr):
    """D: how much of entry j is left at entry i ≥ j (or > j)."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None]
    past = i >= j if DIAGONAL else i > j
    return tl.exp(tl.where(past, total[:, None] - total[None], float("-inf")))


@triton.jit
def weights_place(lane, first, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """Where rows of the transpose of a lane's (p, s) matrix lie, where in the transpose, and whether they are there."""
    p, s = tl.arange(0, BP)[None], first + tl.arange(0, BS)[:, None]
    return lane.to(tl.int64) * (P * S) + p * S + s, s * P + p, (p < P) & (s < S)


@triton.jit
def _unit_lower_inverse(a, SIZE: tl.constexpr, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """(I + a)⁻¹ for a strictly lower triangular: two blocks and what stands between them become one, from size 1 on."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level)), a, 0.0)
        inverse -= dot(inverse, dot(between, inverse, FINE), FINE)
    return inverse


@triton.jit
def _inverses(
    k, log_decay, strength, inverse, length, chunks,
    SIDES: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, CROSSED: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """T of each chunk."""
    lane, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    stride: tl.constexpr = SIDES * HEADS
    here, here_k, live = rows_of(chunk, lane, length, SIDES, HEADS, C, CROSSED)
    key = load_rows(k, here_k, live, 0, stride, P, C, BP)
    total, _ = load_fading(log_decay, here, live, stride, C)
    beta = load_numbers(strength, here, live, stride, C)
    clash = dot(key, tl.trans(key), PRECISION) * left(total, C, False) * beta[:, None]
    solve = _unit_lower_inverse(clash, C, LEVELS, FINE)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None]
    tl.store(inverse + tl.program_id(0).to(tl.int64) * (C * C) + i * C + j, solve.to(inverse.dtype.element_ty))


@triton.jit
def _written(
    q, k, v, log_decay, strength, inverse, start, y, last, states, writes, length, chunks,
    SIDES: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    CROSSED: tl.constexpr, START: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From chunk to chunk: y and the last W (READ), or for the way back W before each chunk and U."""
    lane, column = tl.program_id(0), tl.program_id(1) * BS
    stride: tl.constexpr = SIDES * HEADS
    t = tl.arange(0, C)
    place, turned, inside = weights_place(lane, column, P, S, BP, BS)
    w = tl.load(start + place, mask=inside, other=0.0) if START else tl.zeros((BS, BP), tl.float32)
    for chunk in range(chunks):
        here, here_k, live = rows_of(chunk, lane, length, SIDES, HEADS, C, CROSSED)
        block = lane.to(tl.int64) * chunks + chunk
        key = load_rows(k, here_k, live, 0, stride, P, C, BP)
        value = load_rows(v, here, live, column, stride, S, C, BS).to(tl.float32)
        solve = tl.load(inverse + block * (C * C) + t[:, None] * C + t[None])
        total, whole = load_fading(log_decay, here, live, stride, C)
        beta = load_numbers(strength, here, live, stride, C)
        from_start, narrow = tl.exp(total)[:, None], tl.trans(w.to(key.dtype))
        missing = beta[:, None] * (value - from_start * dot(key, narrow, PRECISION))
        u = dot(solve, missing.to(key.dtype), PRECISION)
        if READ:
            query = load_rows(q, here, live, 0, stride, P, C, BP)
            near = dot(query, tl.trans(key), PRECISION) * left(total, C, True)
            scores = from_start * dot(query, narrow, PRECISION)
            scores += dot(near.to(key.dtype), u.to(key.dtype), PRECISION)
            # y has heads before sides
            head, side = lane % HEADS, lane // HEADS % SIDES
            out = here + (head * SIDES + side) - (side * HEADS + head)
            store_rows(y, out, live, column, scores, stride, S, C, BS)
        else:
            tl.store(states + block * (P * S) + turned, w.to(key.dtype), mask=inside)
            store_rows(writes, block * C, t >= 0, column, u, 1, S, C, BS)
        to_end = (tl.exp(whole - total)[:, None] * u).to(key.dtype)
        w = tl.exp(whole) * w + dot(tl.trans(to_end), key, PRECISION)
    if READ:
        tl.store(last + place, w, mask=inside)


class Plan:
    """What the launches share."""

    def __init__(self, q: Tensor, v: Tensor, crossed: bool) -> None:
        self.batch, self.length, self.sides, self.heads, self.p = q.shape
        self.s = v.shape[-1]
        self.tiles = delta_tiles(q.dtype, self.p, self.s)
        self.lanes, self.chunks = self.batch * self.sides * self.heads, ceil_div(self.length, self.tiles.chunk)
        # As many programs of the scans as blocks of columns.
        self.scans = (self.lanes, ceil_div(self.s, self.tiles.rank))
        self.sizes = {
            "SIDES": self.sides, "HEADS": self.heads, "P": self.p, "C": self.tiles.chunk, "CROSSED": crossed,
            "PRECISION": precision(q.dtype), "num_warps": self.tiles.warps,
        }  # fmt: skip
        self.scan_sizes = {
            **self.sizes, "S": self.s, "BP": self.tiles.width, "BS": self.tiles.rank, "num_stages": self.tiles.stages,
            "maxnreg": self.tiles.registers,
        }  # fmt: skip
        self.like = q

    def inverse_shape(self) -> tuple[int, ...]:
        return self.lanes, self.chunks, self.tiles.chunk, self.tiles.chunk

    def state_shape(self) -> tuple[int, ...]:
        return self.batch, self.sides, self.heads, self.p, self.s

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.like.new_empty(shape, dtype=dtype)


def delta_inverses(plan: Plan, k: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """T, in the dtype of k."""
    inverse = plan.empty(*plan.inverse_shape())
    if inverse.numel():
        _inverses[(plan.lanes * plan.chunks,)](
            k, log_decay, strength, inverse, plan.length, plan.chunks, **plan.sizes, BP=plan.tiles.width,
            LEVELS=plan.tiles.chunk.bit_length() - 1,
            FINE=fine_precision(k.dtype),  # T is a long product: not in 16 bits
        )  # fmt: skip
    return inverse


def delta_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Tensor | None, crossed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, N, H, A, s), the last W, and T for the way back."""
    plan = Plan(q, v, crossed)
    inverse = delta_inverses(plan, k, log_decay, strength)
    y = plan.empty(plan.batch, plan.length, plan.heads, plan.sides, plan.s)
    last = plan.empty(*plan.state_shape(), dtype=torch.float32)
    if last.numel():
        _written[plan.scans](
            q, k, v, log_decay, strength, inverse, last if start is None else start, y, last, y, y,
            plan.length, plan.chunks, **plan.scan_sizes, START=start is not None, READ=True,
        )  # fmt: skip
    return y, last, inverse


def delta_states(
    plan: Plan, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Wᵀ before each chunk (lanes, chunks, s, p) and U (lanes, chunks, C, s), in the dtype of k: made again."""
    states = plan.empty(plan.lanes, plan.chunks, plan.s, plan.p)
    writes = plan.empty(plan.lanes, plan.chunks, plan.tiles.chunk, plan.s)
    if writes.numel():
        _written[plan.scans](
            k, k, v, log_decay, strength, inverse, states if start is None else start, states, states, states, writes,
            plan.length, plan.chunks, **plan.scan_sizes, START=start is not None, READ=False,
        )  # fmt: skip
    return states, writes
