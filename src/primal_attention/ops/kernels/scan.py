"""A chunked scan over the rows of q and k: what all causal kernels share.

    s_i = γ s_{i−1} + z_i

A block of rows holds L z with L_ij = γ^(i−j) for j ≤ i; what came before the block enters as γ^(i+1) times its carry,
which is float32. The chunks' own sums come first, the carries from them in a small scan, then the blocks of each chunk.
A lane is (head, side).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import Tiles, ceil_div, fine_precision, precision, stored_rank
from .products import dot, dot_ones
from .sequences import CHUNK, Sequences


@triton.jit
def powers(log_decay, exponent, DECAY: tl.constexpr):
    """γ^exponent."""
    return tl.exp(log_decay * exponent.to(tl.float32)) if DECAY else exponent.to(tl.float32) * 0.0 + 1.0


@triton.jit
def triangle_of(log_decay, BT: tl.constexpr, DECAY: tl.constexpr):
    """L, (BT, BT) float32."""
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None]
    return tl.where(i >= j, powers(log_decay, tl.maximum(i - j, 0), DECAY), 0.0)


@triton.jit
def sums_within(z, triangle, DECAY: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """L z. Without decay L is ones, exact in any type; with decay its powers need more than 16 bits."""
    if DECAY:
        return dot(triangle, z.to(tl.float32), FINE)
    return dot_ones(triangle.to(z.dtype), z, PRECISION)


@triton.jit
def _chunk_sums(
    qk, sums, log_decay, chunk_start, chunk_end,
    HEADS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Σ_j γ^(m−1−j) z_j of each chunk of m rows."""
    chunk, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    start, end = tl.load(chunk_start + chunk), tl.load(chunk_end + chunk)
    p, t = tl.arange(0, BP), tl.arange(0, BT)
    column = (side * HEADS + head) * P + p
    rate = tl.load(log_decay + head) if DECAY else 0.0
    parts = tl.zeros((BT, BP), tl.float32)
    for first in range(start, end, BT):
        row = first + t
        inside = (row < end)[:, None] & (p[None] < P)
        z = tl.load(qk + row[:, None] * (2 * HEADS * P) + column[None], mask=inside, other=0.0).to(tl.float32)
        parts += z * powers(rate, tl.maximum(end - 1 - row, 0), DECAY)[:, None] if DECAY else z
    place = (chunk.to(tl.int64) * (2 * HEADS) + lane) * P + p
    tl.store(sums + place, tl.sum(parts, 0), mask=p < P)


@triton.jit
def _carries(
    sums, carries, initial, final, log_decay, first_chunk, lengths,
    HEADS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """What stands before each chunk (or, reversed, after it): a scan over the chunks' sums, `BC` columns a program."""
    sequence, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.load(first_chunk + sequence)
    count = tl.load(first_chunk + sequence + 1) - first
    length = tl.load(lengths + sequence)
    rate = tl.load(log_decay + lane // 2) if DECAY else 0.0
    here, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None]
    state_place = (sequence * (2 * HEADS) + lane) * P + column
    carry = tl.load(initial + state_place, mask=column < P, other=0.0) if INITIAL else tl.zeros((BC,), tl.float32)
    for group in range(0, count, 64):
        if REVERSE:
            # The same scan with the chunks numbered from the end.
            k, j = count - 1 - group - here, count - 1 - group - other
            far = tl.minimum((count - group) * ROWS, length)
            near = tl.minimum(tl.maximum(count - group - 64, 0) * ROWS, length)
            gap = tl.minimum(j * ROWS, length) - tl.minimum((k + 1) * ROWS, length)
            kept = far - tl.minimum((k + 1) * ROWS, length)
            tail = tl.minimum(j * ROWS, length) - near
            whole = far - near
        else:
            k, j = group + here, group + other
            far, near = tl.minimum((group + 64) * ROWS, length), tl.minimum(group * ROWS, length)
            gap = tl.minimum(k * ROWS, length) - tl.minimum((j + 1) * ROWS, length)
            kept = tl.minimum(k * ROWS, length) - near
            tail = far - tl.minimum((j + 1) * ROWS, length)
            whole = far - near
        index = tl.reshape(j, (64,))
        inside = (index >= 0) & (index < count)
        part = tl.load(
            sums + ((first + index)[:, None] * (2 * HEADS) + lane) * P + column[None],
            mask=inside[:, None] & (column[None] < P), other=0.0,
        )  # fmt: skip
        mix = tl.where(other < here, powers(rate, tl.maximum(gap, 0), DECAY), 0.0)
        result = tl.dot(mix, part, input_precision="ieee") + powers(rate, kept, DECAY) * carry[None]
        target = tl.reshape(k, (64,))
        tl.store(
            carries + ((first + target)[:, None] * (2 * HEADS) + lane) * P + column[None], result,
            mask=((target >= 0) & (target < count))[:, None] & (column[None] < P),
        )  # fmt: skip
        weight = tl.reshape(powers(rate, tl.maximum(tail, 0), DECAY), (64,))
        carry = carry * powers(rate, whole, DECAY) + tl.sum(part * weight[:, None], 0)
    if FINAL:
        tl.store(final + state_place, carry, mask=column < P)


@triton.jit
def before_chunk(carries, index, P: tl.constexpr, BP: tl.constexpr, EARLIER: tl.constexpr):
    """The sums before a chunk; nothing stands there unless EARLIER. index: of chunk and lane, int64."""
    p = tl.arange(0, BP)
    return tl.load(carries + index * P + p, mask=p < P, other=0.0) if EARLIER else tl.zeros((BP,), tl.float32)


@triton.jit
def last_row(sums, left, BT: tl.constexpr):
    """What a block hands on to the next. left: rows from its first to the chunk's end."""
    return tl.sum(tl.where(tl.arange(0, BT)[:, None] == tl.minimum(left, BT) - 1, sums, 0.0), 0)


class Plan:
    """What the launches share."""

    def __init__(
        self, qk: Tensor, wx: Tensor, log_decay: Tensor | None, seqs: Sequences, rank: int, size: Tiles
    ) -> None:
        self.heads, self.p, self.stored, self.size = wx.shape[1], wx.shape[3], stored_rank(rank), size
        self.blocks = CHUNK // size.tokens
        self.chunks, self.batch = seqs.chunk_start.shape[0], seqs.starts.shape[0]
        self.rate = qk if log_decay is None else log_decay  # never read without decay
        self.seqs, self.device = seqs, qk.device
        self.shape = {"HEADS": self.heads, "P": self.p, "DECAY": log_decay is not None}
        self.full = {
            **self.shape, "S": self.stored, "RANK": rank, "BT": size.tokens, "BP": size.width,
            "BS": size.rank, "PRECISION": precision(qk.dtype),
            # Powers of γ and float32 gradients, whose small differences make the gradient of γ: TF32 alone loses them.
            "FINE": fine_precision(qk.dtype), "num_stages": size.stages, "maxnreg": size.registers,
        }  # fmt: skip

    def sums(self, per_chunk: int = 1) -> Tensor:
        shape = (self.chunks * per_chunk, self.heads, 2, self.p)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def carries(self, sums: Tensor, reverse: bool, initial: Tensor | None, final: Tensor | None) -> Tensor:
        carries = torch.empty_like(sums)
        _carries[(self.batch, 2 * self.heads, ceil_div(self.p, 16))](
            sums, carries, sums if initial is None else initial, sums if final is None else final, self.rate,
            self.seqs.first_chunk, self.seqs.lengths, **self.shape, ROWS=CHUNK, BC=16, REVERSE=reverse,
            INITIAL=initial is not None, FINAL=final is not None,
        )  # fmt: skip
        return carries

    def forward_carries(self, qk: Tensor, initial: Tensor | None, final: Tensor | None) -> Tensor:
        """What stands before each chunk. initial, final: see `running_forward`.

        Sequences of one chunk each have nothing before it but `initial`, and no sums to hand on: without it, what is
        returned is empty. Their final sums come from the kernel that runs over the rows (`FINAL`).
        """
        if self.seqs.single:
            return self.sums(0) if initial is None else initial.clone()
        sums, starts = self.sums(), (self.seqs.chunk_start, self.seqs.chunk_end)
        _chunk_sums[(self.chunks, 2 * self.heads)](
            qk, sums, self.rate, *starts, **self.shape, BT=32, BP=self.size.width
        )  # fmt: skip
        return self.carries(sums, False, initial, final)

    def backward_carries(self, sums: Tensor) -> Tensor:
        """What stands after each chunk; not to be read unless `LATER`."""
        return sums if self.seqs.single else self.carries(sums, True, None, None)
