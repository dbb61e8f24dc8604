"""y = W_out concat_h(W_o [e; r] + b_o) + b_out and its way back, block by block, for CPUs.

Nothing stands between the two maps, so that their product serves where there are tokens enough to pay for it:

    M[:, h] = W_out[:, h] W_o,      m = b_out + Σ_h W_out[:, h] b_o,      y = M [scores] + m

Scores come as in `lean.scores`, (g, 2, H, s, m): W_o is taken apart into its halves for e and for r.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..layer import Weights
from ..reference import wide
from .products import add_product, product, turned
from .scores import one_by_one


class OutputGradients(NamedTuple):
    score_weight: Tensor
    score_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


def add_column_sums(total: Tensor | None, rows: Tensor) -> Tensor:
    sums = rows.sum(0, dtype=wide(rows.dtype))
    return sums if total is None else total.add_(sums)


class Folded:
    """Both maps as one."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self.weights, self.heads = weights, heads
        self.by_head = weights.out_weight.t().unflatten(0, (heads, -1))  # (H, p, d), a view
        self.grad_map: Tensor | None = None
        self.grad_shift: Tensor | None = None

    @cached_property
    def map(self) -> Tensor:
        """Mᵀ, (2Hs, d)."""
        w_out, w_o = self.weights.out_weight, self.weights.score_weight
        halves = w_o.t().contiguous().view(2, 1, -1, w_o.shape[0]).expand(-1, self.heads, -1, -1)  # (2, H, s, p)
        of_sides = w_out.new_empty(*halves.shape[:3], w_out.shape[0])
        for side, half in zip(of_sides, halves, strict=True):
            torch.bmm(half, self.by_head, out=side)
        return of_sides.flatten(0, 2)

    @cached_property
    def shift(self) -> Tensor | None:
        b_o, b_out, w_out = self.weights.score_bias, self.weights.out_bias, self.weights.out_weight
        if b_o is None:
            return b_out
        b_o = b_o.repeat(self.heads)
        return w_out @ b_o if b_out is None else torch.addmv(b_out, w_out, b_o)

    def forward(self, scores: Tensor) -> Tensor:
        return product(_tokens(scores), self.map.t(), self.shift)

    def backward(self, grad_y: Tensor, scores: Tensor, learns: bool) -> Tensor:
        g, m = scores.shape[0], scores.shape[4]
        if learns:
            if one_by_one(g, m):
                for columns, rows in zip(scores.flatten(1, 3), grad_y.view(g, m, -1), strict=True):
                    self.grad_map = add_product(self.grad_map, columns, rows.t())
            else:
                self.grad_map = add_product(self.grad_map, _tokens(scores).t(), grad_y.t())
            self.grad_shift = add_column_sums(self.grad_shift, grad_y)
        if g == 1:
            return product(self.map, grad_y).view(scores.shape)
        return turned(product(grad_y, self.map).view(g, m, -1)).view(scores.shape)

    def gradients(self) -> OutputGradients:
        assert self.grad_map is not None
        assert self.grad_shift is not None
        kind, w_o, b_o = self.grad_map.dtype, self.weights.score_weight, self.weights.score_bias
        p, d = w_o.shape[0], self.grad_map.shape[1]
        # As the columns of W_o stand: for each head those of e, then those of r.
        grad_map = self.grad_map.view(2, self.heads, -1, d).transpose(0, 1).reshape(self.heads, -1, d)
        grad_out = turned(torch.bmm(w_o.to(kind).expand(self.heads, -1, -1), grad_map).view(1, -1, d))[0]
        if b_o is not None:
            grad_out.addr_(self.grad_shift, b_o.to(kind).repeat(self.heads))
        return OutputGradients(
            torch.bmm(grad_map, self.by_head.mT.to(kind)).sum(0).t(),
            (self.grad_shift @ self.weights.out_weight.to(kind)).view(self.heads, p).sum(0),
            grad_out,
            self.grad_shift,
        )


class Apart:
    """One map after the other; the heads' outputs between them are made again on the way back."""

    def __init__(self, weights: Weights, heads: int) -> None:
        self.weights, self.heads = weights, heads
        self.p, self.columns = weights.score_weight.shape
        self.grad_o: Tensor | None = None
        self.grad_b_o: Tensor | None = None
        self.grad_out: Tensor | None = None
        self.grad_b_out: Tensor | None = None

    def _of_heads(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[e; r] of each head, (g·m·H, 2s), and the heads' outputs, (g·m, d)."""
        both = _tokens(scores.transpose(1, 2)).view(-1, self.columns)
        return both, product(both, self.weights.score_weight, self.weights.score_bias).view(-1, self.heads * self.p)

    def forward(self, scores: Tensor) -> Tensor:
        return product(self._of_heads(scores)[1], self.weights.out_weight, self.weights.out_bias)

    def backward(self, grad_y: Tensor, scores: Tensor, learns: bool) -> Tensor:
        g, sides, heads, rank, m = scores.shape
        grad_each = product(grad_y, self.weights.out_weight.t()).view(-1, self.p)  # (g·m·H, p)
        if learns:
            both, made = self._of_heads(scores)
            self.grad_out = add_product(self.grad_out, grad_y.t(), made.t())
            self.grad_b_out = add_column_sums(self.grad_b_out, grad_y)
            self.grad_o = add_product(self.grad_o, grad_each.t(), both.t())
            self.grad_b_o = add_column_sums(self.grad_b_o, grad_each)
        grad = turned(product(grad_each, self.weights.score_weight.t()).view(g, m, -1))
        return grad.view(g, heads, sides, rank, m).transpose(1, 2).contiguous()

    def gradients(self) -> OutputGradients:
        return OutputGradients(self.grad_o, self.grad_b_o, self.grad_out, self.grad_b_out)  # type: ignore[arg-type]


def _tokens(columns: Tensor) -> Tensor:
    """What a token has in a row: (g, …, m) → (g·m, …)."""
    return turned(columns.flatten(1, -2)).flatten(0, 1)


def folding_pays(weights: Weights, heads: int, rows: int) -> bool:
    """Whether one map is cheaper than two for so many tokens, by the multiplications of a pass forward and back."""
    d, columns = weights.out_weight.shape[0], weights.score_weight.shape[1]
    # M is made in both directions, and its gradient is taken apart by two products of the same size.
    folded = 3 * rows * d * heads * columns + 4 * d * d * columns
    apart = 3 * rows * d * d + 4 * rows * d * columns
    return folded < apart


def output_map(weights: Weights, heads: int, rows: int) -> Folded | Apart:
    """The cheaper of the two."""
    return Folded(weights, heads) if folding_pays(weights, heads, rows) else Apart(weights, heads)
