"""Output projection y = W_out concat_h(W_o [e; r] + b_o) + b_out of the CPU path, forward and backward.

Both maps are linear, so one matrix replaces them:

    M[:, h] = W_out[:, h] W_o,      m = b_out + Σ_h W_out[:, h] b_o,      y = M [scores] + m

It saves 18 % of a layer's step at d = 512, H = 8, rank 30 (4096 tokens) and costs up to 8 % at rank 96.
Scores have the layout of `scores.py`, (g, 2, H, s, m).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_maps import accumulation_dtype
from ..types import Weights
from .scores import is_long


class OutputGradients(NamedTuple):
    """Gradients of the output maps; None if no block contributed."""

    score_weight: Tensor | None = None
    score_bias: Tensor | None = None
    out_weight: Tensor | None = None
    out_bias: Tensor | None = None


class OutputMap:
    """M and m; `backward` accumulates their gradients, `gradients` splits them."""

    def __init__(self, weights: Weights, heads: int) -> None:
        assert weights.score_weight is not None
        assert weights.out_weight is not None
        self.heads, self.w_o, self.b_o = heads, weights.score_weight, weights.score_bias
        self.w_out, self.b_out = weights.out_weight, weights.out_bias
        self.w_out_by_head = self.w_out.t().unflatten(0, (heads, -1))  # (H, p, d), a view
        self.grad_map: Tensor | None = None
        self.grad_shift: Tensor | None = None

    @cached_property
    def map(self) -> Tensor:
        """Mᵀ, (2Hs, d)."""
        sides = self.w_o.t().contiguous().view(2, 1, -1, self.w_o.shape[0]).expand(-1, self.heads, -1, -1)
        return torch.stack([torch.bmm(side, self.w_out_by_head) for side in sides]).flatten(0, 2)

    @cached_property
    def shift(self) -> Tensor | None:
        if self.b_o is None:
            return self.b_out
        b_o = self.b_o.repeat(self.heads)
        return self.w_out @ b_o if self.b_out is None else torch.addmv(self.b_out, self.w_out, b_o)

    def forward(self, scores: Tensor, y: Tensor) -> None:
        """Write the output to y, (g·m, d)."""
        linear_into(y, _token_rows(scores), self.map.t(), self.shift)

    def backward(self, grad_y: Tensor, scores: Tensor, needs_weights: bool) -> Tensor:
        """Return the gradient of the scores and accumulate those of the maps."""
        g, m = scores.shape[0], scores.shape[4]
        if needs_weights:
            if is_long(g, m):
                for columns, rows in zip(scores.flatten(1, 3), grad_y.view(g, m, -1), strict=True):
                    self.grad_map = accumulate_linear(self.grad_map, columns, rows.t())
            else:
                self.grad_map = accumulate_linear(self.grad_map, _token_rows(scores).t(), grad_y.t())
            self.grad_shift = accumulate_column_sums(self.grad_shift, grad_y)
        if g == 1:
            return F.linear(self.map, grad_y).view(scores.shape)
        return transpose_copy(F.linear(grad_y, self.map).view(g, m, -1)).view(scores.shape)

    def gradients(self) -> OutputGradients:
        if self.grad_map is None or self.grad_shift is None:
            return OutputGradients()
        dtype, heads, (p, _), d = self.grad_map.dtype, self.heads, self.w_o.shape, self.grad_map.shape[1]
        # In the order of the columns of W_o: of each head those of e, then those of r.
        grad_map = self.grad_map.view(2, heads, -1, d).transpose(0, 1).reshape(heads, -1, d)
        grad_out = transpose_copy(torch.bmm(self.w_o.to(dtype).expand(heads, -1, -1), grad_map).view(1, -1, d))[0]
        if self.b_o is not None:
            grad_out.addr_(self.grad_shift, self.b_o.to(dtype).repeat(heads))
        return OutputGradients(
            torch.bmm(grad_map, self.w_out_by_head.mT.to(dtype)).sum(0).t(),
            (self.grad_shift @ self.w_out.to(dtype)).view(heads, p).sum(0),
            grad_out,
            self.grad_shift,
        )


def _token_rows(scores: Tensor) -> Tensor:
    """(g, …, m) → (g·m, …): one row per token."""
    return transpose_copy(scores.flatten(1, -2)).flatten(0, 1)


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
