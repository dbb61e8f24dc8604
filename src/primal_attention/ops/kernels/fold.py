"""The product of the two output maps, and the way back through it.

    M[:, h] = W_out[:, h] W_o   (d × 2S for each head),      m = b_out + Σ_h W_out[:, h] b_o

so that y = M [scores] + m. Back, from dM and dm (the gradients of M and m, float32):

    dW_out[:, h] = dM[:, h] W_oᵀ + dm b_oᵀ,    dW_o = Σ_h W_out[:, h]ᵀ dM[:, h],    db_o = Σ_h W_out[:, h]ᵀ dm

One program holds a few rows of W_out; sums over rows are partial sums, added in a fixed order by `_finish`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two, precision, stored_rank
from .products import dot

ROWS = 32


def foldable(heads: int, head_dim: int, rank: int) -> bool:
    """Whether one product is cheaper than two maps, and small enough for one program to hold."""
    columns = 2 * stored_rank(rank)
    return heads * columns <= heads * head_dim + columns and max(head_dim, columns) <= 128


@triton.jit
def _fold(
    out_weight, out_bias, score_weight, score_bias, product, bias,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BD + tl.arange(0, BD)
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    # Column c of the stored layout is direction c % S of side c // S; the map's own columns have no padding.
    real = (c < 2 * S) & (c % S < RANK)
    w_o = tl.load(
        score_weight + p[:, None] * (2 * RANK) + (c // S * RANK + c % S)[None],
        mask=(p[:, None] < P) & real[None], other=0.0,
    )  # fmt: skip
    total = tl.load(out_bias + row, mask=row < D, other=0.0).to(tl.float32) if BIAS else tl.zeros((BD,), tl.float32)
    for head in range(HEADS):
        w_out = tl.load(
            out_weight + row[:, None] * D + head * P + p[None], mask=(row[:, None] < D) & (p[None] < P), other=0.0
        )  # fmt: skip
        part = dot(w_out, w_o, PRECISION)
        tl.store(
            product + row[:, None] * (HEADS * 2 * S) + head * (2 * S) + c[None], part.to(product.dtype.element_ty),
            mask=(row[:, None] < D) & (c[None] < 2 * S) & ((head > 0) | (c[None] != RANK) | (RANK == S)),
        )  # fmt: skip
        if SHIFT:
            b_o = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32)
            total += tl.sum(w_out.to(tl.float32) * b_o[None], 1)
    rounded = total.to(bias.dtype.element_ty)
    tl.store(bias + row, rounded, mask=row < D)
    if RANK < S:
        # What rounding takes from the bias meets the scores' column of ones.
        rest = (total - rounded.to(tl.float32)).to(product.dtype.element_ty)
        tl.store(product + row * (HEADS * 2 * S) + RANK, rest, mask=row < D)


@triton.jit
def _unfold(
    grad_product, grad_bias, out_weight, score_weight, score_bias, grad_out, grad_out_bias, parts, bias_parts,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr,
    BD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, SHIFT: tl.constexpr, ONES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """ONES: the scores carried a column of ones, so column RANK of grad_product is the gradient of the bias."""
    program = tl.program_id(0)
    row = program * BD + tl.arange(0, BD)
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    real = (c < 2 * S) & (c % S < RANK)
    w_o = tl.load(
        score_weight + p[:, None] * (2 * RANK) + (c // S * RANK + c % S)[None],
        mask=(p[:, None] < P) & real[None], other=0.0,
    )  # fmt: skip
    kind = w_o.dtype
    width = HEADS * 2 * S
    dm = tl.load(grad_product + row * width + RANK if ONES else grad_bias + row, mask=row < D, other=0.0)
    tl.store(grad_out_bias + row, dm.to(kind), mask=row < D)
    b_o = tl.load(score_bias + p, mask=p < P, other=0.0).to(tl.float32) if SHIFT else tl.zeros((BP,), tl.float32)
    sum_w = tl.zeros((BP, BC), tl.float32)
    sum_b = tl.zeros((BP,), tl.float32)
    for head in range(HEADS):
        inside = (row[:, None] < D) & (p[None] < P)
        place = row[:, None] * D + head * P + p[None]
        w_out = tl.load(out_weight + place, mask=inside, other=0.0)
        part = tl.load(
            grad_product + row[:, None] * width + head * (2 * S) + c[None],
            mask=(row[:, None] < D) & real[None], other=0.0,
        ).to(kind)  # fmt: skip
        grad = dot(part, tl.trans(w_o), PRECISION) + dm[:, None] * b_o[None]
        tl.store(grad_out + place, grad.to(kind), mask=inside)
        sum_w += dot(tl.trans(w_out), part, PRECISION)
        sum_b += tl.sum(w_out.to(tl.float32) * dm[:, None], 0)
    tl.store(
        parts + program * (P * 2 * S) + p[:, None] * (2 * S) + c[None], sum_w, mask=(p[:, None] < P) & (c[None] < 2 * S)
    )
    tl.store(bias_parts + program * P + p, sum_b, mask=p < P)


@triton.jit
def _finish(
    parts, bias_parts, grad_score, grad_score_bias, programs,
    P: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BC)
    real = (c < 2 * S) & (c % S < RANK)
    total = tl.zeros((BC,), tl.float32)
    bias = tl.zeros((), tl.float32)
    for program in range(programs):
        total += tl.load(parts + (program * P + row) * (2 * S) + c, mask=real, other=0.0)
        if SHIFT:
            bias += tl.load(bias_parts + program * P + row)
    tl.store(grad_score + row * (2 * RANK) + c // S * RANK + c % S, total.to(grad_score.dtype.element_ty), mask=real)
    if SHIFT:
        tl.store(grad_score_bias + row, bias.to(grad_score_bias.dtype.element_ty))


def _sizes(out_weight: Tensor, score_weight: Tensor) -> dict[str, object]:
    d, p, rank = out_weight.shape[0], score_weight.shape[0], score_weight.shape[1] // 2
    stored = stored_rank(rank)
    return {
        "HEADS": d // p, "D": d, "P": p, "RANK": rank, "S": stored, "BD": ROWS, "BP": power_of_two(p),
        "BC": power_of_two(2 * stored), "PRECISION": precision(out_weight.dtype),
    }  # fmt: skip


def fold(
    out_weight: Tensor, out_bias: Tensor | None, score_weight: Tensor, score_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """M (d, H·2S) and m (d,) in the weights' dtype."""
    size = _sizes(out_weight, score_weight)
    d, stored, heads = out_weight.shape[0], size["S"], size["HEADS"]
    product = out_weight.new_empty(d, heads * 2 * stored)  # type: ignore[operator]
    bias = out_weight.new_empty(d)
    _fold[(ceil_div(d, ROWS),)](
        out_weight, out_weight if out_bias is None else out_bias, score_weight,
        out_weight if score_bias is None else score_bias, product, bias,
        BIAS=out_bias is not None, SHIFT=score_bias is not None, **size,
    )  # fmt: skip
    return product, bias


def unfold(
    grad_product: Tensor, grad_bias: Tensor | None, out_weight: Tensor, score_weight: Tensor, score_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of W_out, W_o, b_out and b_o from those of M (d, H·2S) and m (d,), both float32.

    grad_bias is None where the scores carried a column of ones: then grad_product has it.
    """
    size = _sizes(out_weight, score_weight)
    d, p, stored = out_weight.shape[0], score_weight.shape[0], stored_rank(score_weight.shape[1] // 2)
    programs = ceil_div(d, ROWS)
    grad_out, grad_score = torch.empty_like(out_weight), torch.empty_like(score_weight)
    grad_out_bias, grad_score_bias = out_weight.new_empty(d), out_weight.new_empty(p)
    parts = torch.empty(programs, p, 2 * stored, dtype=torch.float32, device=out_weight.device)
    bias_parts = torch.empty(programs, p, dtype=torch.float32, device=out_weight.device)
    shift = score_bias is not None
    _unfold[(programs,)](
        grad_product, grad_product if grad_bias is None else grad_bias, out_weight, score_weight,
        out_weight if score_bias is None else score_bias, grad_out, grad_out_bias, parts, bias_parts,
        SHIFT=shift, ONES=grad_bias is None, **size,
    )  # fmt: skip
    _finish[(p,)](
        parts, bias_parts, grad_score, grad_score_bias, programs,
        P=p, RANK=size["RANK"], S=stored, BC=size["BC"], SHIFT=shift,
    )  # fmt: skip
    return grad_out, grad_score, grad_out_bias, grad_score_bias
