"""A pass over the layer through the compiled library, as one autograd node.

The library knows sequences that follow one another in the rows of one matrix. Of padded input the valid tokens are
taken out first, so that nothing is computed for padding and nothing that stands there can matter.
"""

from __future__ import annotations

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
from .library import Library, Pass, library


def unfit(
    x: Tensor, weights: Weights, sqrt_lambda: Tensor | None, mode: Mode, valid: Tensor | None, dropout: float
) -> str | None:
    """Why the library cannot serve this call, or None."""
    if mode.causal:
        return "the causal modes are PyTorch's"
    if dropout:
        return "dropout is PyTorch's"
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
    found = library(x.dtype)
    return found if isinstance(found, str) else None


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
        weights = Weights(*parameters)  # type: ignore[arg-type]
        sequences = Sequences.of(x, lengths, plan.mode)
        given = _pass(plan, sequences, x, sqrt_lambda, weights)
        kept, y = x.new_empty(lib.kept(given)), torch.empty_like(x)
        j = None if sqrt_lambda is None else x.new_empty(given.sequences)
        rows = x.new_empty(given.tokens, 2 * given.heads * given.rank) if plan.scores else None
        given.hold(kept=kept, y=y, objective=j, score_rows=rows)
        lib.run(given, back=False)
        if plan.keep:
            ctx.plan, ctx.lib = plan, lib
            ctx.save_for_backward(lengths, x, sqrt_lambda, kept, *parameters)
        return y, j, rows

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_j: Tensor | None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        lengths, x, sqrt_lambda, kept, *parameters = ctx.saved_tensors
        needs, weights = ctx.needs_input_grad[3:], Weights(*parameters)
        need_x, _, need_qk, need_qk_bias, _, _, *need_output = needs
        # All gradients of a map come together: its weight's, its bias'.
        like = [None if p is None else torch.empty_like(p) for p in parameters]
        found = Weights(*like)  # type: ignore[arg-type]
        d = x.shape[-1]
        grads: dict[str, Tensor | None] = {
            "grad_x": torch.empty_like(x) if need_x else None,
            "grad_w_e": found.w_e,
            "grad_w_r": found.w_r,
            "grad_sqrt_lambda": None if grad_j is None else torch.empty_like(sqrt_lambda),
        }
        if need_qk or need_qk_bias:
            grads |= {"grad_w_qk": found.qk_weight, "grad_b_qk": _or_empty(found.qk_bias, x, 2 * d)}
        learns = any(need_output) and grad_y is not None
        if learns:
            grads |= {
                "grad_w_o": found.score_weight,
                "grad_b_o": _or_empty(found.score_bias, x, weights.score_weight.shape[0]),
                "grad_w_out": found.out_weight,
                "grad_b_out": _or_empty(found.out_bias, x, d),
            }
        incoming = {
            "grad_y": None if grad_y is None else grad_y.contiguous(),
            "grad_objective": None if grad_j is None else grad_j.contiguous(),
            "grad_scores": None if grad_scores is None else grad_scores.contiguous(),
        }
        sequences = Sequences.of(x, lengths, ctx.plan.mode)
        given = _pass(ctx.plan, sequences, x, sqrt_lambda, weights)
        given.hold(kept=kept, **incoming, **grads)
        ctx.lib.run(given, back=True)
        output = found[4:] if learns else (None,) * 4
        result = (grads["grad_x"], grads["grad_sqrt_lambda"], *found[:4], *output)
        return None, None, None, *(grad if need else None for grad, need in zip(result, needs, strict=True))


def _or_empty(bias: Tensor | None, x: Tensor, size: int) -> Tensor:
    """A gradient is written where there is no bias, too."""
    return x.new_empty(size) if bias is None else bias


def _pass(plan: Plan, sequences: Sequences, x: Tensor, sqrt_lambda: Tensor | None, weights: Weights) -> Pass:
    (starts, places), heads, rank, d = sequences, plan.mode.heads, weights.w_e.shape[2], x.shape[-1]
    tokens = x.numel() // d
    given = Pass(
        starts.shape[0] - 1, tokens, d, heads, rank, 0 if places is None else places.shape[1], torch.get_num_threads(),
        folding_pays(weights, heads, tokens), plan.form == "mean", plan.trace == "projections",
    )  # fmt: skip
    given.hold(
        starts=starts, places=places, x=x, sqrt_lambda=sqrt_lambda, w_qk=weights.qk_weight, b_qk=weights.qk_bias,
        w_e=weights.w_e, w_r=weights.w_r, w_o=weights.score_weight, b_o=weights.score_bias, w_out=weights.out_weight,
        b_out=weights.out_bias,
    )  # fmt: skip
    return given


def native_attention(
    x: Tensor, weights: Weights, plan: Plan, sqrt_lambda: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y like x, J (B,), and the scores (B, H, N, 2, s) where the plan asks for them. x: (B, N, d)."""
    lib = library(x.dtype)
    if isinstance(lib, str):  # it was there a moment ago: only the environment can have changed
        raise RuntimeError(f"the lean path's library is gone: {lib}")
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
