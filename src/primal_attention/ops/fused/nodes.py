"""Operators with their way back: a few autograd nodes, each of which keeps only what its way back needs.

Here those around the scores; `score_nodes.py` has the scores themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..once import once
from . import operators as ops
from . import wide
from .operator import Operator

Gradients = tuple[Tensor | None, ...]


class Node(torch.autograd.Function):
    """An operator with its way back: `remember` keeps what `backward` needs."""

    operator: Operator

    def __init_subclass__(cls) -> None:
        backward, run, remember = cls.backward, cls.operator.run, cls.remember

        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            remember(ctx, args, output)
            return output

        def as_structured(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            """A registered operator wants a list of nothing where a list came in."""
            lists = getattr(ctx, "lists", {})
            return tuple([None] * lists[i] if i in lists else g for i, g in enumerate(backward(ctx, *grads)))

        cls.operator.registered.register_autograd(as_structured, setup_context=remember)
        # Not `setup_context` here: torch would look up the signature of `forward` anew at every call.
        cls.forward = staticmethod(forward)  # type: ignore[method-assign]
        cls.backward = staticmethod(once(backward))  # type: ignore[assignment]

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise NotImplementedError


def through(node: type[Node], name: str, *args: Any) -> Any:
    """Apply a node: itself in eager mode, by its registered name where the compiler looks on."""
    return getattr(torch.ops.primal, name)(*args) if torch.compiler.is_compiling() else node.apply(*args)


class Move(Node):
    """x (B, N, d) → its valid rows at the front, or at their places again: each is the other's way back."""

    operator = ops.MOVE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        to, back = ctx.saved_tensors
        return ops.MOVE(grad, back, to), None, None


class Project(Node):
    """(x, W_qk, b, W_e, W_r) → (qk, wx, nothing or wx of r, traces). `Score` and `Mix` have the bias' gradient."""

    operator = ops.PROJECT

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, w_e, w_r, rows, _, ctx.shortest, ctx.apart = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_e, w_r, rows)
        ctx.like = output[1].shape, output[1].dtype

    @staticmethod
    def backward(ctx: Any, grad_qk: Tensor | None, *grads: Tensor | None) -> Gradients:
        x, weight, w_e, w_r, rows = ctx.saved_tensors
        grad_qk = x.new_zeros(x.shape[0], weight.shape[0]) if grad_qk is None else grad_qk
        *of_wx, grad_trace = grads
        shape, dtype = ctx.like
        of_wx = [x.new_zeros(shape, dtype=dtype) if g is None else g.contiguous() for g in of_wx[: 1 + ctx.apart]]
        grad_x, grad_weight, grad_e, grad_r = ops.PROJECT_BACKWARD(
            x, weight, w_e, w_r, rows, grad_qk.contiguous(), of_wx[0], of_wx[1] if ctx.apart else None,
            _dense(grad_trace), ctx.shortest,
        )  # fmt: skip
        return grad_x, grad_weight, None, grad_e, grad_r, None, None, None, None


class Pack(Node):
    """(W_e, W_r) → (wx, traces) where the weights do not depend on the data."""

    operator = ops.PACK

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.shape = output[0].shape

    @staticmethod
    def backward(ctx: Any, grad_wx: Tensor | None, grad_trace: Tensor | None) -> Gradients:
        w_e, w_r = ctx.saved_tensors
        grad_wx = w_e.new_zeros(ctx.shape, dtype=torch.float32) if grad_wx is None else grad_wx.contiguous()
        return ops.PACK_BACKWARD(grad_wx, w_e, w_r, _dense(grad_trace))  # type: ignore[no-any-return]


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


class Combine(Node):
    """scores (rows, H, 2, S) → y through the product of both output maps; nothing stands between the two."""

    operator = ops.COMBINE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, score_weight, score_bias, out_weight, out_bias = inputs
        ctx.save_for_backward(scores, score_weight, score_bias, out_weight)
        ctx.biases = (score_bias is not None, out_bias is not None)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Gradients:
        grads = ops.COMBINE_BACKWARD(grad_y.contiguous(), *ctx.saved_tensors)
        grad_scores, grad_score, grad_score_bias, grad_out, grad_out_bias = grads
        score_bias, out_bias = ctx.biases
        return (
            grad_scores,
            grad_score,
            grad_score_bias if score_bias else None,
            grad_out,
            grad_out_bias if out_bias else None,
        )


class Output(Node):
    """(heads' outputs, b_o, W_out, b_out) → y. b_o is in the outputs already: it enters for its gradient alone."""

    operator = wide.OUTPUT

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        each, score_bias, weight, bias = inputs
        ctx.save_for_backward(each, weight)
        ctx.width = 0 if score_bias is None else len(score_bias)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Gradients:
        each, weight = ctx.saved_tensors
        wanted = (ctx.width and ctx.needs_input_grad[1]) or (ctx.biased and ctx.needs_input_grad[3])
        grad_each, grad_weight, grad_bias, grad_score_bias = wide.output_backward(
            grad_y.contiguous(), each, weight, ctx.width, bool(wanted)
        )
        return (
            grad_each,
            grad_score_bias if ctx.width and ctx.needs_input_grad[1] else None,
            grad_weight,
            grad_bias if ctx.biased and ctx.needs_input_grad[3] else None,
        )


class Measure(Node):
    """(energies, √Λ, traces) → J."""

    operator = ops.MEASURE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        energy, sqrt_lambda, _, lengths, ctx.length, ctx.summed = inputs
        ctx.save_for_backward(energy, sqrt_lambda, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        energy, sqrt_lambda, lengths = ctx.saved_tensors
        grads = ops.MEASURE_BACKWARD(grad.contiguous(), energy, sqrt_lambda, lengths, ctx.length, ctx.summed)
        return *grads, None, None, None
