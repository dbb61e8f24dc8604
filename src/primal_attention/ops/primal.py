"""The one entry point: a whole Primal-Attention layer as a function of its input and its weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import layout
from . import reference as eq
from .modes import COSINE, FeatureMap, Mode, State, primal_scores
from .reference import Scores


class Weights(NamedTuple):
    """The layer's parameters, by the names of `PrimalAttention`."""

    qk_weight: Tensor  # (2d, d), rows [W_q; W_k]
    qk_bias: Tensor | None
    w_e: Tensor  # (H, n, s), or (H, p, s) when not data-dependent
    w_r: Tensor
    score_weight: Tensor  # (p, 2s), shared by the heads
    score_bias: Tensor | None
    out_weight: Tensor  # (d, d)
    out_bias: Tensor | None


class Energies(NamedTuple):
    """What the objective needs of a pass: Σ_i e², Σ_i r² per direction, and the number of tokens they hold."""

    e: Tensor  # (B, H, s)
    r: Tensor  # (B, H, s)
    tokens: Tensor | int


class Attended(NamedTuple):
    """The result of a layer."""

    y: Tensor  # (B, N, d)
    energies: Energies | None
    scores: Scores | None
    projections: tuple[Tensor, Tensor] | None  # W_{e|X}, W_{r|X} where there is one set for the sequence
    state: State | None


def reference_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    dropout: float = 0.0,
) -> Attended:
    """The layer from the equations. x: (B, N, d); `valid` (B, N) marks the tokens, None when all are."""
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0.0)  # whatever stands in the padding, NaN included, ends here
    q, k = F.linear(x, weights.qk_weight, weights.qk_bias).chunk(2, dim=-1)
    scores, w_e_x, w_r_x, state = primal_scores(
        x, q, k, weights.w_e, weights.w_r, mode, feature_map, valid=valid, decay=decay, state=state
    )
    tokens: Tensor | int = x.shape[1] if valid is None else valid.sum(dim=1)
    energies = Energies(eq.energy(scores.e), eq.energy(scores.r), tokens)
    both = F.dropout(torch.cat(scores, dim=-1), dropout)  # (B, H, N, 2s)
    heads = F.linear(both, weights.score_weight.to(both.dtype), _cast(weights.score_bias, both.dtype))
    y = F.linear(heads.transpose(1, 2).flatten(2), weights.out_weight, weights.out_bias)
    if valid is not None:
        y = y.masked_fill(~valid[..., None], 0.0)
    projections = None if w_e_x is None or w_r_x is None else (w_e_x, w_r_x)
    return Attended(y, energies, scores, projections, state)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


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
    dropout: float = 0.0,
    backend: str = "auto",
    need_scores: bool = False,
    need_state: bool = False,
    need_energies: bool = True,
) -> Attended:
    """The layer on padded (B, N, d) or packed (total, d) input."""
    if cu_seqlens is None:
        return reference_attention(
            x, weights, mode, feature_map, valid=valid, decay=decay, state=state, dropout=dropout
        )
    return _packed_reference(x, weights, mode, feature_map, cu_seqlens, max_seqlen, decay, dropout)


def _packed_reference(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    decay: Tensor | None,
    dropout: float,
) -> Attended:
    """Lay packed sequences out as padded ones, and the result back."""
    width = max(int(cu_seqlens.diff().max()), 1) if max_seqlen is None else max_seqlen
    rows, valid = layout.padded_positions(cu_seqlens, width)
    padded = x.new_zeros(*rows.shape, x.shape[-1]) if x.shape[0] == 0 else x[rows]
    result = reference_attention(padded, weights, mode, feature_map, valid=valid, decay=decay, dropout=dropout)
    sequence, place = layout.packed_positions(cu_seqlens, x.shape[0])
    scores = result.scores
    packed = None if scores is None else Scores(*(s.transpose(1, 2)[sequence, place].transpose(0, 1) for s in scores))
    return result._replace(y=result.y[sequence, place], scores=packed)  # scores: (H, total, s)
