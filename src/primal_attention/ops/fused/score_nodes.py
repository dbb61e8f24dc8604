"""From q and k to the scores and their energies, or straight to the heads' outputs, as autograd nodes.

    Score, RunningScore, GrowingScore   scores, which an output map follows
    Mix, RunningMix                     the heads' outputs, where the rank is large against the head's width

The projection's bias enters all of them for its gradient alone: they have it at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import score_operators as ops
from . import wide
from .nodes import Gradients, Node


def _present(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that nobody asked for, as zeros."""
    if grad_scores is None:
        grad_scores = like.new_zeros(ctx.shapes[0])
    if grad_energy is None:
        grad_energy = like.new_zeros(ctx.shapes[1], dtype=torch.float32)
    return grad_scores.contiguous(), grad_energy.contiguous()


def _spent() -> bool:
    """Whether this backward pass is the graph's last, so that what was kept for it may be written over."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and not keeps()


class Score(Node):
    """(qk, wx, b) → (scores, energies). b is the projection's bias: it enters for its gradient alone."""

    operator = ops.SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        qk, wx, _, origin, tables, ctx.single, ctx.rank, ctx.whole = inputs
        ctx.set_materialize_grads(False)
        # W_{·|X} is as large as a quarter of x when sequences are short: keep where it came from instead.
        ctx.save_for_backward(qk, *(origin or [wx]), *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.origins, ctx.exact = len(origin) or 1, wx.dtype == torch.float32
        ctx.lists = {3: len(origin), 4: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None) -> Gradients:
        qk, *rest = ctx.saved_tensors
        origin, tables = list(rest[: ctx.origins]), list(rest[ctx.origins :])
        grads = _present(ctx, grad_scores, grad_energy, qk)
        grad_qk, grad_wx, grad_bias = ops.SCORE_BACKWARD(
            qk, origin, *grads, tables, ctx.single, ctx.rank, ctx.whole, ctx.exact, spend=_spent()
        )
        return grad_qk, grad_wx, grad_bias if ctx.needs_input_grad[2] else None, None, None, None, None, None


class RunningScore(Node):
    """(qk, wx, b, log γ, initial sums) → (scores, energies, carries, final sums) of the causal running sums."""

    operator = ops.RUNNING_SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        qk, wx, _, log_decay, _, tables, ctx.single, ctx.rank, ctx.whole = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qk, wx, log_decay, output[2], *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.lists = {5: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, *_: Any) -> Gradients:
        qk, wx, log_decay, carries, *tables = ctx.saved_tensors
        grads = _present(ctx, grad_scores, grad_energy, qk)
        # Initial sums that have a gradient come from other ranks' q and k, and theirs from these: they read qk later.
        spend = _spent() and not ctx.needs_input_grad[4]
        grad_qk, grad_wx, grad_bias, grad_decay = ops.RUNNING_SCORE_BACKWARD(
            qk, wx, log_decay, carries, *grads, list(tables), ctx.single, ctx.rank, ctx.whole, spend=spend
        )
        grad_bias = grad_bias if ctx.needs_input_grad[2] else None
        grad_initial = _of_initial(grad_qk, log_decay, wx.shape, tables) if ctx.needs_input_grad[4] else None
        grad_decay = None if log_decay is None else grad_decay
        return grad_qk, grad_wx, grad_bias, grad_decay, grad_initial, None, None, None, None


def _of_initial(grad_qk: Tensor, log_decay: Tensor | None, shape: torch.Size, tables: list[Tensor]) -> Tensor:
    """The sums before the first token enter through it alone, s_0 = γ·s + z_0, so theirs is γ times its gradient."""
    starts, lengths = tables[:2]
    first = grad_qk[starts.clamp(max=len(grad_qk) - 1)].float().view(len(starts), 2, shape[1], shape[3])
    first = first.transpose(1, 2) * (lengths > 0)[:, None, None, None]  # (B, H, 2, p)
    return first if log_decay is None else first * log_decay.exp()[:, None, None]


class GrowingScore(Node):
    """(x, W_qk, b, W_e, W_r, log γ) → (scores, energies, qk) of the causal data-dependent mode."""

    operator = ops.GROWING_SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, w_e, w_r, log_decay, rows, grid, tables, ctx.single, ctx.whole = inputs
        scores, _, qk = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.lists = {8: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, _: Any) -> Gradients:
        x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *tables = ctx.saved_tensors
        grads = _present(ctx, grad_scores, grad_energy, qk)
        grad_x, grad_weight, grad_bias, grad_e, grad_r, grad_decay = ops.GROWING_SCORE_BACKWARD(
            x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *grads, list(tables), ctx.single, ctx.whole
        )
        grad_bias = grad_bias if ctx.needs_input_grad[2] else None
        grad_decay = None if log_decay is None else grad_decay
        return grad_x, grad_weight, grad_bias, grad_e, grad_r, grad_decay, None, None, None, None, None


class Mix(Node):
    """(qk, wx, None or wx of r, W_o, b_o, b) → (heads' outputs, energies). `Output` has the gradient of b_o."""

    operator = wide.MIX

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        qk, wx, other, score_weight, _, _, origin, kept, tables, ctx.single, ctx.whole, _ = inputs
        ctx.set_materialize_grads(False)
        again = [*origin, wx] if kept or not origin else origin
        ctx.save_for_backward(qk, score_weight, *again, *tables)
        ctx.origins, ctx.exact, ctx.apart = len(again), wx.dtype == torch.float32, other is not None
        ctx.lists = {6: len(origin), 8: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_each: Tensor | None, grad_energy: Tensor | None) -> Gradients:
        qk, score_weight, *rest = ctx.saved_tensors
        origin, tables = list(rest[: ctx.origins]), list(rest[ctx.origins :])
        grads = _of_outputs(qk, grad_each, grad_energy)
        grad_qk, grad_wx, grad_other, grad_score, grad_bias = wide.MIX_BACKWARD(
            qk, origin, score_weight, *grads, tables, ctx.single, ctx.whole, ctx.exact, spend=_spent()
        )
        grad_other = grad_other if ctx.apart else None
        grad_bias = grad_bias if ctx.needs_input_grad[5] else None
        return grad_qk, grad_wx, grad_other, grad_score, None, grad_bias, None, None, None, None, None, None


class RunningMix(Node):
    """As `Mix`, of the causal running sums: and log γ, the initial sums → and the carries, the final sums."""

    operator = wide.RUNNING_MIX

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        qk, wx, score_weight, _, _, log_decay, _, tables, ctx.single, ctx.whole, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qk, wx, score_weight, log_decay, output[2], *tables)
        ctx.lists = {7: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_each: Tensor | None, grad_energy: Tensor | None, *_: Any) -> Gradients:
        qk, wx, score_weight, log_decay, carries, *tables = ctx.saved_tensors
        grads = _of_outputs(qk, grad_each, grad_energy)
        spend = _spent() and not ctx.needs_input_grad[6]  # as in `RunningScore`
        grad_qk, grad_wx, grad_score, grad_bias, grad_decay = wide.RUNNING_MIX_BACKWARD(
            qk, wx, score_weight, log_decay, carries, *grads, list(tables), ctx.single, ctx.whole, spend=spend
        )
        grad_bias = grad_bias if ctx.needs_input_grad[4] else None
        grad_decay = None if log_decay is None else grad_decay
        grad_initial = _of_initial(grad_qk, log_decay, wx.shape, tables) if ctx.needs_input_grad[6] else None
        return grad_qk, grad_wx, grad_score, None, grad_bias, grad_decay, grad_initial, None, None, None, None


def _of_outputs(qk: Tensor, grad_each: Tensor | None, grad_energy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients as the operators take them: energies that nobody asked for need no zeros."""
    grad_each = qk.new_zeros(qk.shape[0], qk.shape[1] // 2) if grad_each is None else grad_each.contiguous()
    return grad_each, None if grad_energy is None else grad_energy.contiguous()
