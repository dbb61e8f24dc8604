"""The way back of the lean path: from dy to dx and to the gradients of the parameters, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layer import Weights
from ..reference import wide
from .blocks import Block, blocks
from .output import add_column_sums, output_map
from .plan import Plan, scale
from .products import add_product, product
from .scan import backward_factors, decay_factors, scan_
from .scores import project_backward
from .weights import Landmarks, Projections


class Pass(NamedTuple):
    """What went into a pass, and what the objective's gradient needs of its result."""

    valid: Tensor | None
    places: Tensor | None
    empty: Tensor | None
    x: Tensor
    decay: Tensor | None
    start: Tensor | None
    sqrt_lambda: Tensor | None
    energy: Tensor | None


class Kept(NamedTuple):
    """What a block keeps."""

    z: Tensor  # (rows, 2d); its running sums in the causal mode
    inverse: Tensor  # 1/‖z‖, (g, 2H, m)
    scores: Tensor  # (g, 2, H, s, m)
    dropped: Tensor | None  # like the scores

    def seen(self, values: Tensor, rate: float) -> Tensor:
        """Dropout, which is its own way back. values: the scores or their gradient."""
        return values if self.dropped is None else values.masked_fill(self.dropped, 0.0).mul_(1 / (1 - rate))


class WayBack:
    """The gradients of a pass, gathered block by block; the causal mode goes from the last block to the first."""

    def __init__(self, plan: Plan, saved: Sequence[Any], needs: Sequence[bool], grads: Sequence[Tensor | None]) -> None:
        self.plan, self.needs, self.given = plan, needs, Pass(*saved[:8])
        self.weights = weights = Weights(*saved[8:16])
        self.kept = [Kept(*saved[i : i + 4]) for i in range(16, len(saved), 4)]
        self.x = x = self.given.x
        self.wide, self.heads = wide(x.dtype), plan.mode.heads
        batch, length, _ = x.shape
        landmarks = None if self.given.places is None else Landmarks(self.given.places, self.given.empty)
        self.projections = Projections(x, landmarks, weights.w_e, weights.w_r)
        self.out = output_map(weights, self.heads, batch * length)
        self.factors = self.backwards = None
        if self.given.decay is not None:
            self.factors = decay_factors(self.given.decay, self.given.valid, batch, length, self.wide)
            self.backwards = backward_factors(self.factors)

        grad_y, self.grad_j, self.grad_scores, self.grad_final = grads
        self.grad_y = None if grad_y is None else grad_y.contiguous()
        if self.grad_j is not None:
            assert self.given.sqrt_lambda is not None
            self.root = self.given.sqrt_lambda.to(self.wide)
            self.grad_energy = (self.grad_j * scale(plan, self.given.valid, length, self.wide))[:, None, None]
            self.twice_lambda = 2 * self.root.square() * self.grad_energy  # (B, H, s)
        self.carry: Tensor | None = None  # the gradient that the next block sends to this one

        need_x, self.need_decay, need_start, _, self.need_qk, self.need_qk_bias, *_ = needs
        self.learns_output = any(needs[8:])
        self.grad_x = torch.empty_like(x) if need_x else None
        self.grad_qk: Tensor | None = None
        self.grad_qk_bias: Tensor | None = None
        self.grad_w_x = torch.zeros_like(self.projections.w_x, memory_format=torch.contiguous_format)
        self.grad_decay = None if self.given.decay is None else self.grad_w_x.new_zeros(2 * self.heads)
        self.grad_start = torch.zeros_like(self.given.start) if need_start else None  # type: ignore[arg-type]

    def run(self) -> tuple[Tensor | None, ...]:
        (batch, length, d), rank = self.x.shape, self.weights.w_e.shape[2]
        order = list(enumerate(blocks(batch, length, 2 * (d + self.heads * rank))))
        for i, block in reversed(order) if self.plan.mode.causal else order:
            self._take(block, self.kept[i], self.kept[i - 1].z if block.n0 else None)
        return self._gradients()

    def _take(self, block: Block, kept: Kept, earlier: Tensor | None) -> None:
        gap, sequences = block.gap(self.given.valid), block.sequences
        (g, channels, m), z = kept.inverse.shape, kept.z
        rows = z.view(g, m, channels, -1).to(self.wide)
        grad = self._of_scores(block, gap, kept)
        grad_rows, grad_w_x = project_backward(grad, rows, self.projections.of(sequences), kept.inverse, kept.scores)
        (self.grad_w_x if self.projections.landmarks is None else self.grad_w_x[sequences]).add_(grad_w_x)
        grad_z = grad_rows.view(z.shape)
        if self.plan.mode.causal:
            self._through_the_sums(grad_z.view(*block.shape, channels, -1), z, earlier, block)
            if gap is not None:
                grad_z.masked_fill_(gap, 0.0)
        narrow = grad_z.to(self.x.dtype)
        if self.grad_x is not None:
            of_x = product(narrow, self.weights.qk_weight.t())
            if len(self.kept) == 1:
                self.grad_x = of_x.view(self.x.shape)
            else:
                block.rows_of(self.grad_x).copy_(of_x)
        if self.need_qk:
            self.grad_qk = add_product(self.grad_qk, narrow.t(), block.rows_of(self.x, gap).t())
        if self.need_qk_bias:
            self.grad_qk_bias = add_column_sums(self.grad_qk_bias, grad_z)

    def _of_scores(self, block: Block, gap: Tensor | None, kept: Kept) -> Tensor:
        """The gradient of the scores from all that they went into, (g, 2, H, s, m), wide."""
        scores, rate = kept.scores, self.plan.dropout
        if self.grad_y is None:
            grad = torch.zeros_like(scores, dtype=self.wide)
        else:
            grad = self.out.backward(block.rows_of(self.grad_y, gap), kept.seen(scores, rate), self.learns_output)
            grad = kept.seen(grad.to(self.wide), rate)
        by_sequence = block.by_sequence(grad)
        if self.grad_j is not None:
            twice_lambda = self.twice_lambda[block.sequences, None, ..., None]
            by_sequence.addcmul_(block.by_sequence(scores).to(self.wide), twice_lambda)
        if self.grad_scores is not None:
            by_sequence.add_(block.of_scores(self.grad_scores))
        if gap is not None:
            by_sequence.masked_fill_(gap.view(-1, 1, 1, 1, block.shape[1]), 0.0)
        return grad

    def _through_the_sums(self, grad: Tensor, sums: Tensor, earlier: Tensor | None, block: Block) -> None:
        """Turn the gradient of the running sums, (B, N, 2H, p), into that of what they sum."""
        start = self.given.start
        if block.n1 == self.x.shape[1]:
            self.carry = None if self.grad_final is None else self.grad_final[block.sequences]
        self.carry = scan_(grad, None if self.backwards is None else block.of(self.backwards), self.carry, reverse=True)
        if block.n0 == 0 and self.grad_start is not None:
            fade = 1.0 if self.factors is None else self.factors[block.sequences, 0]
            self.grad_start[block.sequences] = fade * self.carry
        if self.grad_decay is None or not self.need_decay:
            return
        met = torch.zeros_like(grad[..., 0])  # ⟨ds_i, s_{i−1}⟩
        met[:, 1:] = (grad[:, 1:] * sums.view(grad.shape)[:, :-1]).sum(-1)
        if earlier is not None:
            met[:, 0] = (grad[:, 0] * earlier[-1].view(grad.shape[2:])).sum(-1)
        elif start is not None:
            met[:, 0] = (grad[:, 0] * start[block.sequences]).sum(-1)
        if self.given.valid is not None:
            met *= block.of(self.given.valid)[..., None]
        self.grad_decay += met.sum((0, 1))

    def _gradients(self) -> tuple[Tensor | None, ...]:
        """In the order of the inputs of `Layer`, from x on; what is wider than its input, autograd makes narrow."""
        grad_lambda = through_trace = None
        if self.grad_j is not None:
            assert self.given.energy is not None
            grad_lambda = 2 * self.root * (self.given.energy * self.grad_energy).sum(0)
            through_trace = self.grad_j / -self.heads  # (B,)
            if self.plan.trace == "projections":
                self._through_projected_trace(through_trace)
        grad_e, grad_r = self.projections.backward(self.grad_w_x, self.grad_x)
        if through_trace is not None and self.plan.trace == "weights":
            total, (w_e, w_r) = through_trace.sum(), self.projections.sides
            grad_e, grad_r = torch.addcmul(grad_e, w_r, total), torch.addcmul(grad_r, w_e, total)
        learnt = self.learns_output and self.grad_y is not None and self.kept  # an empty batch keeps nothing
        output = self.out.gradients() if learnt else (None,) * 4
        grad_decay = None if self.grad_decay is None else self.grad_decay.view(2, -1).sum(0)
        found = (
            self.grad_x, grad_decay, self.grad_start, grad_lambda, self.grad_qk, self.grad_qk_bias, grad_e, grad_r,
            *output,
        )  # fmt: skip
        return tuple(grad if need else None for grad, need in zip(found, self.needs, strict=True))

    def _through_projected_trace(self, grad: Tensor) -> None:
        """Tr(W_{e|X}ᵀ W_{r|X}): each side's gradient is the other side."""
        if self.projections.landmarks is None:
            grad = grad.sum(0, keepdim=True)
        self.grad_w_x.addcmul_(self.projections.w_x.flip(1), grad[:, None, None, None, None])
