"""y = W_out concat_h(W_o [e; r] + b_o) + b_out and its way back, block by block, for CPUs.

Nothing stands between the two maps, so that their product serves where there are tokens enough to pay for it:

    M[:, h] = W_out[:, h] W_o,      m = b_out + Σ_h W_out[:, h] b_o,      y = M [scores] + m
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .layer import Weights
from .reference import wide


class OutputGradients(NamedTuple):
    score_weight: Tensor
    score_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x Wᵀ + b into `out`, which may be of a wider type."""
    if out.dtype != x.dtype:
        return out.copy_(F.linear(x, weight, bias))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, overwriting the total, which is wide; only the product is rounded to the type of a and b."""
    if total is None:
        return (a @ b).to(wide(a.dtype))
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


def add_column_sums(total: Tensor | None, rows: Tensor) -> Tensor:
    sums = rows.sum(0, dtype=wide(rows.dtype))
    return sums if total is None else total.add_(sums)


class Folded:
    """Both maps as one. scores: (rows, H·2s), y: (rows, d)."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self.weights, self.heads = weights, heads
        w_out, w_o = weights.out_weight, weights.score_weight
        self.by_head = w_out.reshape(-1, w_o.shape[0])  # (d·H, p)
        self.product = (self.by_head @ w_o).view(w_out.shape[0], -1)
        self.grad_product: Tensor | None = None
        self.grad_shift: Tensor | None = None

    def shift(self) -> Tensor | None:
        b_o, b_out, w_out = self.weights.score_bias, self.weights.out_bias, self.weights.out_weight
        if b_o is None:
            return b_out
        b_o = b_o.repeat(self.heads)
        return w_out @ b_o if b_out is None else torch.addmv(b_out, w_out, b_o)

    def forward(self, scores: Tensor, y: Tensor) -> None:
        linear(scores, self.product, self.shift(), y)

    def backward(self, grad_y: Tensor, scores: Tensor, learns: bool) -> Tensor:
        if learns:
            self.grad_product = add_product(self.grad_product, grad_y.t(), scores)
            self.grad_shift = add_column_sums(self.grad_shift, grad_y)
        return grad_y @ self.product

    def gradients(self) -> OutputGradients:
        assert self.grad_product is not None
        assert self.grad_shift is not None
        kind, w_o, b_o = self.grad_product.dtype, self.weights.score_weight, self.weights.score_bias
        p, columns = w_o.shape
        grad_product, w_out = self.grad_product.view(-1, columns), self.weights.out_weight.to(kind)
        grad_out = (grad_product @ w_o.t().to(kind)).view(w_out.shape)
        if b_o is not None:
            grad_out.addr_(self.grad_shift, b_o.to(kind).repeat(self.heads))
        return OutputGradients(
            (grad_product.t() @ self.by_head.to(kind)).t(),  # this way round is the faster one
            (self.grad_shift @ w_out).view(self.heads, p).sum(0),
            grad_out,
            self.grad_shift,
        )


class Apart:
    """One map after the other; the heads' outputs between them are made again on the way back."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.p, self.columns = weights.score_weight.shape
        self.grad_o: Tensor | None = None
        self.grad_b_o: Tensor | None = None
        self.grad_out: Tensor | None = None
        self.grad_b_out: Tensor | None = None

    def _heads(self, scores: Tensor) -> Tensor:
        each = F.linear(scores.view(-1, self.columns), self.weights.score_weight, self.weights.score_bias)
        return each.view(scores.shape[0], -1)  # (rows, d)

    def forward(self, scores: Tensor, y: Tensor) -> None:
        linear(self._heads(scores), self.weights.out_weight, self.weights.out_bias, y)

    def backward(self, grad_y: Tensor, scores: Tensor, learns: bool) -> Tensor:
        grad_each = (grad_y @ self.weights.out_weight).view(-1, self.p)  # (rows·H, p)
        if learns:
            self.grad_out = add_product(self.grad_out, grad_y.t(), self._heads(scores))
            self.grad_b_out = add_column_sums(self.grad_b_out, grad_y)
            self.grad_o = add_product(self.grad_o, grad_each.t(), scores.view(-1, self.columns))
            self.grad_b_o = add_column_sums(self.grad_b_o, grad_each)
        return (grad_each @ self.weights.score_weight).view(scores.shape)

    def gradients(self) -> OutputGradients:
        return OutputGradients(self.grad_o, self.grad_b_o, self.grad_out, self.grad_b_out)  # type: ignore[arg-type]


def output_map(weights: Weights, heads: int, rows: int) -> Folded | Apart:
    """The cheaper of the two for so many tokens, by the multiplications of a pass forward and back."""
    d, columns = weights.out_weight.shape[0], weights.score_weight.shape[1]
    # M is made in both directions, and its gradient is taken apart by two products of the same size.
    folded = 3 * rows * d * heads * columns + 4 * d * d * columns
    apart = 3 * rows * d * d + 4 * rows * d * columns
    return Folded(weights, heads) if folded < apart else Apart(weights)
