"""A pass over the layer through the compiled library, as one autograd node.

The library knows sequences that follow one another in the rows of one matrix. Of padded input the valid tokens are
taken out first, so that nothing is computed for padding and nothing that stands there can matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layer import Weights
from ...modes import Mode
from ...once import once
from ...sampling import ragged_landmark_indices
from ..output import folding_pays
from ..plan import Plan
from .library import Library, Sizes, library


def fitting(
    x: Tensor,
    weights: Weights,
    sqrt_lambda: Tensor | None,
    mode: Mode,
    valid: Tensor | None,
    shift: Tensor | None,
    dropout: float,
) -> Library | str:
    """The library that can serve this call, or why there is none."""
    if mode.causal:
        return "the causal modes are PyTorch's"
    if dropout or shift is not None:
        return "what is random is PyTorch's"
    if torch.compiler.is_compiling():
        return "compiled code cannot call it"
    for tensor in (x, *weights, sqrt_lambda):
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_cpu:
            return "it takes plain tensors on a CPU"
        if tensor.dtype != x.dtype:
            return f"it takes one type of numbers (x has {x.dtype}, a weight {tensor.dtype})"
    if x.numel() == 0 or (valid is not None and not valid.any()):
        return "there is no token"
    return library(x.dtype)


class Sequences(NamedTuple):
    """Where the sequences and their landmarks stand among the rows."""

    starts: Tensor  # (B + 1,)
    places: Tensor | None  # (B, n)

    @classmethod
    def of(cls, x: Tensor, lengths: Tensor | None, mode: Mode) -> Sequences:
        """x: (B, N, d), or with their lengths (T, d): so much tells both ways, and nothing else has to be kept."""
        count = mode.landmarks if mode.data_dependent else 0
        return _even(x.shape[0], x.shape[1], count) if lengths is None else _laid_out(lengths, count)


def _laid_out(lengths: Tensor, landmarks: int) -> Sequences:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=starts[1:])
    if landmarks == 0:
        return Sequences(starts, None)
    return Sequences(starts, (ragged_landmark_indices(lengths, landmarks) + starts[:-1, None]).contiguous())


@lru_cache(maxsize=64)
def _even(batch: int, length: int, landmarks: int) -> Sequences:
    with torch.inference_mode(False):
        return _laid_out(torch.full((batch,), length), landmarks)


class NativeLayer(torch.autograd.Function):
    """(x, √Λ, weights) → (y, J, scores as rows (T, 2Hs)); None for what is not asked for.

    x: (B, N, d), or the rows (T, d) of sequences with these lengths, (B,).
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, lib: Library, lengths: Tensor | None, x: Tensor, sqrt_lambda: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        sizes = _sizes(plan, lengths, x, parameters)
        heads, rank = sizes.heads, sizes.rank
        kept, y = x.new_empty(lib.kept(sizes)), torch.empty_like(x)
        j = None if sqrt_lambda is None else x.new_empty(sizes.sequences)
        rows = x.new_empty(sizes.tokens, 2 * heads * rank) if plan.scores else None
        given = _given(plan, lengths, x, sqrt_lambda, kept, parameters)
        lib.run(sizes, False, y=y, objective=j, score_rows=rows, **given)
        if plan.keep:
            ctx.plan, ctx.lib, ctx.sizes = plan, lib, sizes
            ctx.save_for_backward(lengths, x, sqrt_lambda, kept, *parameters)
        return y, j, rows

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_j: Tensor | None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        lengths, x, sqrt_lambda, kept, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        need_x, _, need_qk, need_qk_bias, _, _, *need_output = needs
        # All gradients of a map come together: its weight's, its bias'.
        like = [None if p is None else torch.empty_like(p) for p in parameters]
        w_qk, b_qk, w_e, w_r, w_o, b_o, w_out, b_out = like
        grads = {
            "grad_x": torch.empty_like(x) if need_x else None,
            "grad_w_e": w_e,
            "grad_w_r": w_r,
            "grad_sqrt_lambda": None if grad_j is None else torch.empty_like(sqrt_lambda),
        }
        d, p = x.shape[-1], parameters[4].shape[0]
        if need_qk or need_qk_bias:
            grads |= {"grad_w_qk": w_qk, "grad_b_qk": _or_empty(b_qk, x, 2 * d)}
        learns = any(need_output) and grad_y is not None
        if learns:
            grads |= {
                "grad_w_o": w_o,
                "grad_b_o": _or_empty(b_o, x, p),
                "grad_w_out": w_out,
                "grad_b_out": _or_empty(b_out, x, d),
            }
        incoming = {
            "grad_y": None if grad_y is None else grad_y.contiguous(),
            "grad_objective": None if grad_j is None else grad_j.contiguous(),
            "grad_scores": None if grad_scores is None else grad_scores.contiguous(),
        }
        given = _given(ctx.plan, lengths, x, sqrt_lambda, kept, parameters)
        ctx.lib.run(ctx.sizes, True, **given, **incoming, **grads)
        found = (grads["grad_x"], grads["grad_sqrt_lambda"], *like[:4], *(like[4:] if learns else [None] * 4))
        return None, None, None, *(grad if need else None for grad, need in zip(found, needs, strict=True))


def _or_empty(bias: Tensor | None, x: Tensor, size: int) -> Tensor:
    """A gradient is written where there is no bias, too."""
    return x.new_empty(size) if bias is None else bias


def _sizes(plan: Plan, lengths: Tensor | None, x: Tensor, parameters: Sequence[Tensor | None]) -> Sizes:
    weights = Weights(*parameters)  # type: ignore[arg-type]
    mode, d = plan.mode, x.shape[-1]
    tokens = x.numel() // d
    return Sizes(
        (x if lengths is None else lengths).shape[0], tokens, d, mode.heads, weights.w_e.shape[2],
        mode.landmarks if mode.data_dependent else 0, torch.get_num_threads(),
        folding_pays(weights, mode.heads, tokens), plan.form == "mean", plan.trace == "projections",
    )  # fmt: skip


def _given(
    plan: Plan, lengths: Tensor | None, x: Tensor, sqrt_lambda: Tensor | None, kept: Tensor,
    parameters: Sequence[Tensor | None],
) -> dict[str, Tensor | None]:  # fmt: skip
    """What both directions are given."""
    starts, places = Sequences.of(x, lengths, plan.mode)
    w_qk, b_qk, w_e, w_r, w_o, b_o, w_out, b_out = parameters
    return {
        "starts": starts, "places": places, "x": x, "sqrt_lambda": sqrt_lambda, "kept": kept, "w_qk": w_qk,
        "b_qk": b_qk, "w_e": w_e, "w_r": w_r, "w_o": w_o, "b_o": b_o, "w_out": w_out, "b_out": b_out,
    }  # fmt: skip


def native_attention(
    lib: Library, x: Tensor, weights: Weights, plan: Plan, sqrt_lambda: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y like x, J (B,), and the scores (B, H, N, 2, s) where the plan asks for them. x: (B, N, d)."""
    batch, length, d = x.shape
    lengths = rows = None
    tokens = x.contiguous()
    if valid is not None:
        lengths, rows = valid.sum(dim=1), valid.reshape(-1).nonzero()[:, 0]
        tokens = x.reshape(-1, d).index_select(0, rows)
    given = (None if w is None else w.contiguous() for w in (sqrt_lambda, *weights))
    y, j, scores = NativeLayer.apply(plan, lib, lengths, tokens, *given)
    if rows is not None:
        y = _spread(y, rows, batch * length).view(x.shape)
        scores = None if scores is None else _spread(scores, rows, batch * length)
    if scores is not None:
        scores = scores.view(batch, length, plan.mode.heads, 2, -1).transpose(1, 2)
    return y, j, scores


def _spread(tokens: Tensor, rows: Tensor, count: int) -> Tensor:
    """Back among the padding, which is zero."""
    return tokens.new_zeros(count, tokens.shape[1]).index_copy(0, rows, tokens)
