"""The delta layer on fused kernels: three operators `primal::…`, each with a way back that keeps little.

Features   projections → φ(q), φ(k) and h: convolution, SiLU, cosine map    keeps the projections
Written    φ, h, γ, β → scores and the last W                               keeps them and one T per chunk
Gated      scores → one size in each head, the gate, the energies           keeps scores and gate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import current
from ..kernels.delta import Plan, delta_forward
from ..kernels.delta_backward import delta_backward
from ..kernels.delta_features import features_backward, features_forward
from ..kernels.delta_heads import gated_backward, gated_forward
from .nodes import Gradients, Node, through
from .operator import Operator


def _fake_features(z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, ...]:
    batch, length, columns = z.shape
    return tuple(z.new_empty(batch, length, 2, heads, width) for width in (columns // (2 * heads) - rank, rank))


def _fake_written(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Any, crossed: bool
) -> tuple[Tensor, ...]:
    plan = Plan(q, v, crossed)
    y = plan.empty(plan.batch, plan.length, plan.heads, plan.sides, plan.s)
    return y, plan.empty(*plan.state_shape(), dtype=torch.float32), plan.empty(*plan.inverse_shape())


def _fake_written_backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Any, inverse: Tensor, grad_y: Tensor,
    grad_last: Tensor, crossed: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(torch.empty_like(t) for t in (q, k, v, log_decay, strength, grad_last))


def _fake_gated(x: Tensor, gate: Any, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.shape[0], *x.shape[2:]), dtype=torch.float32)


def _fake_gated_backward(x: Tensor, gate: Any, norm: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(x if gate is None else gate), torch.empty_like(norm)


FEATURES = Operator(features_forward, _fake_features, "delta_features")
FEATURES_BACKWARD = Operator(
    features_backward,
    lambda z, weight, bias, *rest: tuple(map(torch.empty_like, (z, weight, bias))),
    "delta_features_backward",
)
WRITTEN = Operator(delta_forward, _fake_written, "delta_written")
WRITTEN_BACKWARD = Operator(delta_backward, _fake_written_backward, "delta_written_backward")
GATED = Operator(gated_forward, _fake_gated, "delta_gated")
GATED_BACKWARD = Operator(gated_backward, _fake_gated_backward, "delta_gated_backward")


class Features(Node):
    """(z, weight, bias) → (φ, h)."""

    operator = FEATURES

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad_phi: Tensor, grad_h: Tensor) -> Gradients:
        grads = FEATURES_BACKWARD(*ctx.saved_tensors, grad_phi.contiguous(), grad_h.contiguous())
        return *grads, None, None


class Written(Node):
    """(q, k, v, log γ, β, W) → (y, last W, T)."""

    operator = WRITTEN

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], output[2])
        ctx.crossed, ctx.shapes = inputs[6], [t.shape for t in output]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None, _: Any) -> Gradients:
        q, *_rest = saved = ctx.saved_tensors
        grad_y = q.new_zeros(ctx.shapes[0]) if grad_y is None else grad_y.contiguous()
        grad_last = q.new_zeros(ctx.shapes[1], dtype=torch.float32) if grad_last is None else grad_last.contiguous()
        *grads, grad_start = WRITTEN_BACKWARD(*saved, grad_y, grad_last, ctx.crossed)
        return *grads, grad_start if ctx.needs_input_grad[5] else None, None


class Gated(Node):
    """(x, gate, norm) → (o, energies)."""

    operator = GATED

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3])
        ctx.eps, ctx.shapes = inputs[3], [t.shape for t in output]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_energy: Tensor | None) -> Gradients:
        x, gate, norm = ctx.saved_tensors
        grad_out = x.new_zeros(ctx.shapes[0]) if grad_out is None else grad_out.contiguous()
        if grad_energy is None:
            grad_energy = x.new_zeros(ctx.shapes[1], dtype=torch.float32)
        grad_x, grad_gate, grad_norm = GATED_BACKWARD(x, gate, norm, ctx.eps, grad_out, grad_energy.contiguous())
        return grad_x, None if gate is None else grad_gate, grad_norm, None


def features(z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """φ and h (B, 2, H, N, ·) of the projections z (B, N, 2H(p + s)); they lie in memory token by token."""
    with current(z.device):
        phi, h = through(Features, "delta_features", z.contiguous(), weight, bias, heads, rank)
    return phi.permute(0, 2, 3, 1, 4), h.permute(0, 2, 3, 1, 4)


def gated(scores: Tensor, gate: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scores (B, N, H, 2s) as W_o takes them, and their energies (B, H, 2s)."""
    gate = None if gate is None else gate.contiguous()
    with current(scores.device):
        return through(Gated, "delta_gated", scores.contiguous(), gate, norm, eps)  # type: ignore[no-any-return]


def written(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Tensor | None, crossed: bool
) -> tuple[Tensor, Tensor]:
    """As `written.corrected_weights`, of q, k (B, A, H, N, p) and so on; y lies in memory as (B, N, H, A, s)."""
    lead, length = q.shape[:3], q.shape[3]
    rows = (t.permute(0, 3, 1, 2, 4).contiguous() for t in (q, k, v))
    numbers = (t.float().expand(*lead, length).permute(0, 3, 1, 2).contiguous() for t in (log_decay, strength))
    if start is not None:
        start = start.float().expand(*lead, q.shape[-1], v.shape[-1]).contiguous()
    with current(q.device):
        y, last, _ = through(Written, "delta_written", *rows, *numbers, start, crossed)
    return y.permute(0, 3, 2, 1, 4), last
