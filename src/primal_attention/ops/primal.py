"""The one entry point: a whole Primal-Attention layer as a function of its input and its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends, layout
from . import reference as eq
from .layer import Attended, Energies, Objective, Weights
from .modes import COSINE, FeatureMap, Mode, State, primal_scores
from .reference import Scores

if TYPE_CHECKING:
    from ..parallel.context import Context, Stretch


def attend(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    backend: str = "auto",
    need_scores: bool = False,
    need_state: bool = False,
    context: Context | None = None,
) -> Attended:
    """The layer on padded (B, N, d) input, `valid` (B, N) marking the tokens, or on packed (total, d) input.

    shift: how far the landmarks stand from their even places (`sampling.random_shift`); not causal.
    context: the ranks that hold the rest of the sequences. Of the paths only the fused one and the equations know it.
    """
    chosen = backends.choose(backend, x, weights.w_e.shape[-1], mode, feature_map, state, need_state)
    stretch = None if context is None else context.at(x, valid, shift)
    if stretch is not None and mode.max_length is not None:
        stretch.check_length(mode.max_length, x.shape[1])
    if chosen == "fused":
        from .fused import fused_attention

        with backends.current(x.device):
            return fused_attention(
                x, weights, mode, valid=valid, cu_seqlens=cu_seqlens, decay=decay, state=state, shift=shift,
                dropout=dropout, objective=objective, need_scores=need_scores, need_state=need_state, stretch=stretch,
            )  # fmt: skip
    if stretch is not None:
        return reference_attention(
            x, weights, mode, feature_map, valid=valid, decay=decay, dropout=dropout, objective=objective,
            stretch=stretch,
        )  # fmt: skip
    given: dict[str, Any] = {"decay": decay, "shift": shift, "dropout": dropout, "objective": objective}
    layer: Callable[..., Attended]
    if chosen == "lean":
        from .lean import lean_attention

        layer, given["need_scores"], given["need_state"] = lean_attention, need_scores, need_state
    else:
        layer, given["feature_map"] = (_compiled() if chosen == "compiled" else reference_attention), feature_map
    if cu_seqlens is None:
        return layer(x, weights, mode, valid=valid, state=state, **given)
    width = max(int(cu_seqlens.diff().max()), 1) if max_seqlen is None else max_seqlen
    rows, valid = layout.padded_positions(cu_seqlens, width)
    padded = x.new_zeros(*rows.shape, x.shape[-1]) if x.shape[0] == 0 else x[rows]
    result = layer(padded, weights, mode, valid=valid, **given)
    sequence, place = layout.packed_positions(cu_seqlens, x.shape[0])
    scores = result.scores
    packed = None if scores is None else Scores(*(s.transpose(1, 2)[sequence, place].transpose(0, 1) for s in scores))
    return result._replace(y=result.y[sequence, place], scores=packed)  # scores: (H, total, s)


def reference_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    stretch: Stretch | None = None,
) -> Attended:
    """The layer from the equations. x: (B, N, d); `valid` (B, N) marks the tokens, None when all are."""
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0.0)  # whatever stands in the padding, NaN included, ends here
    q, k = F.linear(x, weights.qk_weight, weights.qk_bias).chunk(2, dim=-1)
    scores, w_e_x, w_r_x, state = primal_scores(
        x, q, k, weights.w_e, weights.w_r, mode, feature_map,
        valid=valid, decay=decay, state=state, shift=shift, stretch=stretch,
    )  # fmt: skip
    j = None
    if objective is not None:
        energies = Energies(eq.energy(scores.e), eq.energy(scores.r), x.shape[1] if valid is None else valid.sum(dim=1))
        if stretch is not None:
            e, r = stretch.sum(torch.stack([energies.e, energies.r]))
            energies = Energies(e, r, stretch.total)
        traced = (weights.w_e, weights.w_r)
        if objective.trace == "projections" and w_e_x is not None and w_r_x is not None:
            traced = (w_e_x, w_r_x)
        j = objective.of(energies, traced)
    both = F.dropout(torch.cat(scores, dim=-1), dropout)  # (B, H, N, 2s)
    heads = F.linear(both, weights.score_weight.to(both.dtype), _cast(weights.score_bias, both.dtype))
    y = F.linear(heads.transpose(1, 2).flatten(2), weights.out_weight, weights.out_bias)
    if valid is not None:
        y = y.masked_fill(~valid[..., None], 0.0)
    return Attended(y, j, scores, state)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Attended]:
    """torch.compile of the equations, made on first use: importing the library must not wake the compiler."""
    return torch.compile(reference_attention, dynamic=True)
