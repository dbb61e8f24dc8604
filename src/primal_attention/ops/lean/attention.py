"""The layer in few passes over memory, for CPUs: one autograd node whose way back is written out.

The tokens go through in blocks that stay in the cache, from x to y and, on the way back, from dy to dx:

    z = W_qk x + b,    e = (z_q W_{e|X}) / ‖z_q‖,    r = (z_k W_{r|X}) / ‖z_k‖,    y = W_out concat_h(W_o [e; r])

What stays for the way back is x, z (its running sums in the causal mode), the scores and 1/‖z‖; the projection weights
are built again from x. All between the large products is computed in at least float32. The gradients cannot be
differentiated once more: that takes the equations (backend="reference").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference as eq
from ..layer import Attended, Objective, Weights
from ..modes import Mode, State
from ..once import once
from ..reference import RunningState, Scores
from . import native
from .back import Kept, WayBack
from .blocks import blocks, keep_freed_memory
from .output import output_map
from .plan import Plan, scale
from .products import product
from .scan import decay_factors, scan_
from .scores import project
from .weights import Landmarks, Projections


class Layer(torch.autograd.Function):
    """(x, γ, starting sums, √Λ, weights) → (y, J, scores, final sums); None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        valid: Tensor | None,
        places: Tensor | None,
        empty: Tensor | None,
        x: Tensor,
        decay: Tensor | None,
        start: Tensor | None,
        sqrt_lambda: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        weights = Weights(*parameters)  # type: ignore[arg-type]
        (batch, length, d), heads, rank = x.shape, plan.mode.heads, weights.w_e.shape[2]
        wide = eq.wide(x.dtype)
        landmarks = None if places is None else Landmarks(places, empty)
        projections = Projections(x, landmarks, weights.w_e, weights.w_r)
        out = output_map(weights, heads, batch * length)
        factors = None if decay is None else decay_factors(decay, valid, batch, length, wide)

        energy = None if sqrt_lambda is None else x.new_zeros(batch, 2, heads, rank, dtype=wide)
        scores_all = x.new_empty(batch, 2, heads, rank, length) if plan.scores else None
        final = x.new_empty(batch, 2 * heads, d // heads, dtype=wide) if plan.final else None
        order = list(blocks(batch, length, 2 * (d + heads * rank)))
        y = x.new_empty(x.shape) if len(order) != 1 else None
        kept: list[Tensor | None] = []
        carry = None
        for block in order:
            gap = block.gap(valid)
            z = product(block.rows_of(x, gap), weights.qk_weight, weights.qk_bias)
            if plan.mode.causal:
                z = z.to(wide)
                if gap is not None:
                    z.masked_fill_(gap, 0.0)
                if block.n0 == 0:
                    carry = None if start is None else start[block.sequences]
                tokens = z.view(*block.shape, 2 * heads, -1)
                carry = scan_(tokens, None if factors is None else block.of(factors), carry)
                if final is not None:
                    final[block.sequences] = carry
            # By sequence where each has its own weights, else all rows as one sequence.
            g, m = (1, z.shape[0]) if landmarks is None else block.shape
            scores, inverse = project(z.view(g, m, 2 * heads, -1).to(wide), projections.of(block.sequences))
            scores = scores.to(x.dtype)
            by_sequence = block.by_sequence(scores)
            if gap is not None:
                by_sequence.masked_fill_(gap.view(-1, 1, 1, 1, block.shape[1]), 0.0)
            if energy is not None:
                energy[block.sequences].add_(by_sequence.to(wide).square().sum(-1))
            if scores_all is not None:
                block.of_scores(scores_all).copy_(by_sequence)
            dropped = torch.rand(scores.shape, device=x.device) < plan.dropout if plan.dropout else None
            here = Kept(z, inverse, scores, dropped)
            rows = out.forward(here.seen(scores, plan.dropout))
            if gap is not None:
                rows.masked_fill_(gap, 0.0)
            if y is None:
                y = rows.view(x.shape)
            else:
                block.rows_of(y).copy_(rows)
            if plan.keep:
                kept.extend(here)
        j = None
        if energy is not None:
            assert sqrt_lambda is not None
            energy = energy.sum(1)  # Λ weighs e and r alike
            j = (energy * sqrt_lambda.to(wide).square()).sum((1, 2)).mul_(scale(plan, valid, length, wide))
            j -= _trace(plan, projections) / heads
        if plan.keep:
            ctx.plan = plan
            ctx.save_for_backward(valid, places, empty, x, decay, start, sqrt_lambda, energy, *parameters, *kept)
        return y, j, scores_all, final

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *WayBack(ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[4:], grads).run()


def _trace(plan: Plan, projections: Projections) -> Tensor:
    """Σ_h of the trace under J, one number or (B,)."""
    if plan.trace == "projections":
        return (projections.w_x[:, 0] * projections.w_x[:, 1]).sum((1, 2, 3))
    w_e, w_r = projections.sides
    return (w_e * w_r).sum()


def lean_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    need_scores: bool = False,
    need_state: bool = False,
) -> Attended:
    """The layer of `ops.primal.reference_attention` with the cosine map, but for the causal data-dependent mode."""
    device = "cpu" if x.is_cpu else x.device.type  # on a CPU small things count, and the name of a device is one
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            cast = Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
            return lean_attention(
                x.to(dtype), cast, mode, valid=valid, decay=decay, state=state, shift=shift, dropout=dropout,
                objective=objective, need_scores=need_scores, need_state=need_state,
            )  # fmt: skip
    past = state if isinstance(state, RunningState) else None
    start = None if past is None else torch.cat([past.query_sum, past.key_sum], dim=1)  # (B, 2H, p)
    sqrt_lambda, form, trace = (None, "mean", "weights") if objective is None else objective
    given = (x.contiguous(), decay, start, sqrt_lambda, *weights)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    plan = Plan(mode, dropout, form, trace, need_scores, need_state, keep)  # type: ignore[arg-type]
    if not torch.compiler.is_compiling():
        keep_freed_memory()
    lib = native.fitting(x, weights, sqrt_lambda, mode, valid, shift, dropout)
    if not isinstance(lib, str):
        y, j, scores = native.native_attention(lib, x, weights, plan, sqrt_lambda, valid)
        return Attended(y, j, None if scores is None else Scores(*scores.unbind(3)))  # (B, H, N, s) each
    places, empty = Landmarks.of(x, valid, mode.landmarks, shift) if mode.data_dependent else (None, None)
    y, j, scores, final = Layer.apply(plan, valid, places, empty, *given)
    return Attended(
        y,
        j,
        None if scores is None else Scores(*scores.mT.unbind(1)),  # (B, H, N, s) each
        None if final is None else _state_after(x, final, mode, valid, decay, past),
    )


def _state_after(
    x: Tensor, final: Tensor, mode: Mode, valid: Tensor | None, decay: Tensor | None, past: RunningState | None
) -> RunningState:
    query_sum, key_sum = final.chunk(2, dim=1)
    one_each = x.new_empty(1).expand(x.shape[0], mode.heads, x.shape[1], 1)
    weight = eq.running_weight(one_each, decay, valid, None if past is None else past.weight)
    return RunningState(query_sum, key_sum, weight[:, :, -1, 0])
