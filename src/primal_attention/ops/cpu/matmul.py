"""Accumulated matrix products and transposes of the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_maps import accumulation_dtype


def linear_into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write a bᵀ + bias to `out` and return it."""
    return torch.mm(a, b.t(), out=out) if bias is None else torch.addmm(bias, a, b.t(), out=out)


def accumulate_linear(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a bᵀ in the accumulation dtype. `total` is overwritten."""
    if total is None:
        return F.linear(a, b).to(accumulation_dtype(a.dtype))
    return total.addmm_(a, b.t()) if a.dtype == total.dtype else total.add_(F.linear(a, b))


def accumulate_column_sums(total: Tensor | None, rows: Tensor) -> Tensor:
    """Return total + Σ rows in the accumulation dtype. `total` is overwritten."""
    sums = rows.sum(0, dtype=accumulation_dtype(rows.dtype))
    return sums if total is None else total.add_(sums)


def transpose_copy(matrices: Tensor) -> Tensor:
    """(g, m, n) → (g, n, m), contiguous."""
    g, m, n = matrices.shape
    is_plain = matrices.dtype == torch.float32 and matrices.device.type == "cpu" and matrices.numel() > 0
    if not is_plain or torch.compiler.is_compiling():
        return matrices.mT.contiguous()
    # torch's channel shuffle is a vectorised transposition, two to four times faster than copying a transposed view.
    pixels = matrices.contiguous().view(g, 1, 1, m * n).permute(0, 3, 1, 2)  # a matrix is the channels of one pixel
    return torch.native_channel_shuffle(pixels, m).permute(0, 2, 3, 1).reshape(g, n, m)
