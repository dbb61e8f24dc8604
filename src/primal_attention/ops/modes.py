"""The four modes of Primal-Attention, composed of the equations in `reference.py`.

                 not causal                          causal
data-dependent   one W_{e|X} per sequence            W_{e|X≤i} from the landmarks at positions ≤ i
not              W_e itself                          W_e itself, on running means of q and k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import feature_maps
from . import reference as eq
from .reference import LandmarkState, Phi, RunningState, Scores
from .sampling import landmark_indices

if TYPE_CHECKING:
    from ..parallel.context import Stretch


@dataclass(frozen=True)
class FeatureMap:
    """φ, and what the modes must know about it."""

    apply: Phi
    normalised: bool = False  # divide both maps by √D̂ (Remark 4.1)
    scale_free: bool = False  # φ(c·z) = φ(z): a running sum serves as well as a running mean


COSINE = FeatureMap(feature_maps.cosine, scale_free=True)


@dataclass(frozen=True)
class Mode:
    """Which of the four, and the sizes that parameters do not show."""

    heads: int
    landmarks: int
    data_dependent: bool = True
    causal: bool = False
    max_length: int | None = None


State = RunningState | LandmarkState


class Projected(NamedTuple):
    """What a pass over the tokens gives: scores, the projection weights if there is one set, and the state after it."""

    scores: Scores
    w_e_x: Tensor | None
    w_r_x: Tensor | None
    state: State | None


def primal_scores(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    stretch: Stretch | None = None,
) -> Projected:
    """Scores of all tokens. x, q, k: (B, N, H·p), padding already zero; w_e, w_r: (H, n or p, s).

    shift: of the landmarks, not causal; see `reference.landmark_rows`.
    stretch: where these tokens stand if other ranks hold the rest of their sequences.
    """
    q, k = eq.split_heads(q, mode.heads), eq.split_heads(k, mode.heads)
    x_h = eq.split_heads(x, mode.heads) if mode.data_dependent else None
    w_e, w_r = w_e.to(q.dtype), w_r.to(q.dtype)
    if not mode.causal:
        projected = _whole_sequence(x_h, q, k, w_e, w_r, mode, feature_map, valid, shift, stretch)
    elif x_h is None:
        projected = _running_means(q, k, w_e, w_r, feature_map, valid, decay, state, stretch)
    else:
        projected = _growing_weights(x_h, q, k, w_e, w_r, mode, feature_map, valid, decay, state, stretch)
    if valid is None:
        return projected
    keep = valid[:, None, :, None]
    return projected._replace(scores=Scores(*(s.masked_fill(~keep, 0.0) for s in projected.scores)))


def _whole_sequence(
    x_h: Tensor | None,
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    mode: Mode,
    fm: FeatureMap,
    valid: Tensor | None,
    shift: Tensor | None,
    stretch: Stretch | None,
) -> Projected:
    phi_q, phi_k = whole_features(q, k, fm, valid, stretch)
    if x_h is not None:
        if stretch is None:
            rows = eq.landmark_rows(x_h, mode.landmarks, valid, shift).to(q.dtype)
        else:
            rows = eq.split_heads(stretch.landmarks(eq.merge_heads(x_h), mode.landmarks), mode.heads).to(q.dtype)
        w_e, w_r = eq.projection_weights(rows, w_e), eq.projection_weights(rows, w_r)
    return Projected(Scores(eq.project(phi_q, w_e), eq.project(phi_k, w_r)), w_e, w_r, None)


def whole_features(
    q: Tensor, k: Tensor, fm: FeatureMap, valid: Tensor | None, stretch: Stretch | None = None
) -> tuple[Tensor, Tensor]:
    """φ_q and φ_k of all tokens, not causal."""
    phi_q, phi_k = fm.apply(q), fm.apply(k)
    if not fm.normalised:
        return phi_q, phi_k
    sums = eq.feature_sum(phi_k, valid)
    return feature_maps.normalise_both(phi_q, phi_k, sums if stretch is None else stretch.sum(sums))


def _running_means(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    fm: FeatureMap,
    valid: Tensor | None,
    decay: Tensor | None,
    state: State | None,
    stretch: Stretch | None,
) -> Projected:
    phi_q, phi_k, state = running_features(q, k, fm, valid, decay, state, stretch)
    return Projected(Scores(eq.project(phi_q, w_e), eq.project(phi_k, w_r)), w_e, w_r, state)


def running_features(
    q: Tensor,
    k: Tensor,
    fm: FeatureMap,
    valid: Tensor | None,
    decay: Tensor | None,
    state: State | None,
    stretch: Stretch | None = None,
) -> tuple[Tensor, Tensor, RunningState]:
    """φ of the running means of q and k, and the state after the last token."""
    if stretch is not None:
        state = stretch.past(q, k, decay, valid)
    q_past, k_past, weight_past, feature_past = state if isinstance(state, RunningState) else (None,) * 4
    q_sum = eq.running_sum(q, decay, valid, q_past)
    k_sum = eq.running_sum(k, decay, valid, k_past)
    weight = eq.running_weight(q, decay, valid, weight_past)
    if fm.scale_free:
        # The cosine map does not see the divisor of the mean, so the sum is enough, as long as it stays wide: half
        # precision cannot hold it.
        phi_q, phi_k = fm.apply(q_sum).to(q.dtype), fm.apply(k_sum).to(k.dtype)
    else:
        divisor = weight.clamp(min=1.0)
        phi_q, phi_k = fm.apply(q_sum / divisor).to(q.dtype), fm.apply(k_sum / divisor).to(k.dtype)
    feature_sum = None
    if fm.normalised:
        if stretch is not None:
            feature_past = stretch.past_sum(phi_k, decay, valid)
        sums = eq.running_sum(phi_k, decay, valid, feature_past)
        phi_q, phi_k = feature_maps.normalise_both(phi_q, phi_k, sums)
        feature_sum = sums[:, :, -1].clone()
    # Copies: a view of the last row would keep the sums of the whole context alive.
    after = RunningState(q_sum[:, :, -1].clone(), k_sum[:, :, -1].clone(), weight[:, :, -1, 0].clone(), feature_sum)
    return phi_q, phi_k, after


def _growing_weights(
    x_h: Tensor,
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    mode: Mode,
    fm: FeatureMap,
    valid: Tensor | None,
    decay: Tensor | None,
    state: State | None,
    stretch: Stretch | None = None,
) -> Projected:
    past = state if isinstance(state, LandmarkState) else None
    assert mode.max_length is not None
    grid = landmark_indices(mode.max_length, mode.landmarks, q.device)
    position = positions(q, valid, past)  # (B, N)
    phi_q, phi_k = fm.apply(q), fm.apply(k)
    feature_sum = past.feature_sum if past else None
    if fm.normalised:
        if stretch is not None:
            feature_sum = stretch.past_sum(phi_k, decay, valid)
        sums = eq.running_sum(phi_k, decay, valid, feature_sum)
        phi_q, phi_k = feature_maps.normalise_both(phi_q, phi_k, sums)
        feature_sum = sums[:, :, -1].clone()
    x_h = x_h.to(q.dtype)
    if stretch is not None:
        # Every rank has the landmarks of all: no state is handed on.
        rows = eq.split_heads(stretch.rows(eq.merge_heads(x_h), grid[None]), mode.heads)
        position, present = position + stretch.before[:, None], grid < stretch.total[:, None]
        e, r = (
            eq.scores_of_landmarks(phi, rows, present, w, grid, position, decay)
            for phi, w in ((phi_q, w_e), (phi_k, w_r))
        )
        return Projected(Scores(e, r), None, None, None)
    e = eq.causal_landmark_scores(phi_q, x_h, w_e, grid, position, decay, valid)
    r = eq.causal_landmark_scores(phi_k, x_h, w_r, grid, position, decay, valid)
    if past is not None:
        age = (position - past.position[:, None] + 1)[:, None, :, None]  # tokens since the state was taken
        fade = 1.0 if decay is None else (decay.to(past.w_e_x.dtype)[None, :, None, None].log() * age).exp().to(q.dtype)
        e = e + fade * eq.project(phi_q, past.w_e_x)
        r = r + fade * eq.project(phi_k, past.w_r_x)
    return Projected(Scores(e, r), None, None, _grown(x_h, w_e, w_r, grid, position, valid, decay, past, feature_sum))


def positions(q: Tensor, valid: Tensor | None, past: LandmarkState | None) -> Tensor:
    """Each token's place in its sequence, (B, N); a padded token has its predecessor's."""
    count = torch.ones(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device) if valid is None else valid.long()
    place = count.cumsum(dim=1) - 1
    return place if past is None else place + past.position[:, None]


def _grown(
    x_h: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    grid: Tensor,
    position: Tensor,
    valid: Tensor | None,
    decay: Tensor | None,
    past: LandmarkState | None,
    feature_sum: Tensor | None,
) -> LandmarkState:
    """W_{e|X}, W_{r|X} after the last token."""
    dtype = eq.wide(x_h.dtype)
    rows, _ = eq.causal_landmark_rows(x_h, grid, position, valid)
    rows = rows.to(dtype)
    last = position[:, -1:]
    if decay is not None:
        rows = rows * eq.landmark_decay(decay, grid, last, dtype).transpose(2, 3)  # (B, H, n, 1)
    with torch.autocast(rows.device.type, enabled=False):  # the state stays wide
        w_e_x, w_r_x = eq.projection_weights(rows, w_e.to(dtype)), eq.projection_weights(rows, w_r.to(dtype))
    if past is not None:
        age = (last[:, 0] - past.position + 1)[:, None, None, None]
        fade = 1.0 if decay is None else (decay.to(dtype)[None, :, None, None].log() * age).exp()
        w_e_x, w_r_x = w_e_x + fade * past.w_e_x, w_r_x + fade * past.w_r_x
    steps = x_h.shape[2] + (past.steps if past is not None else 0)
    return LandmarkState(w_e_x, w_r_x, last[:, 0] + 1, steps, feature_sum)


def kernel_factors(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """φ′_q, φ′_k with K = φ′_q φ′_kᵀ (Theorem 3.2): φ′ = f(X) φ when data-dependent, φ itself when not."""
    q, k = eq.split_heads(q, mode.heads), eq.split_heads(k, mode.heads)
    if not mode.data_dependent:
        if mode.causal:
            phi_q, phi_k, _ = running_features(q, k, feature_map, valid, decay, None)
        else:
            phi_q, phi_k = whole_features(q, k, feature_map, valid)
    else:
        x_h = eq.split_heads(x, mode.heads).to(q.dtype)
        if mode.causal:
            # One-hot values turn the causal scores into the masked similarities to the landmarks themselves.
            one_hot = torch.eye(mode.landmarks, dtype=q.dtype, device=q.device).expand(mode.heads, -1, -1)
            scores, *_ = _growing_weights(x_h, q, k, one_hot, one_hot, mode, feature_map, valid, decay, None)
            phi_q, phi_k = scores
        else:
            rows = eq.landmark_rows(x_h, mode.landmarks, valid)
            phi_q, phi_k = (phi @ rows.mT for phi in whole_features(q, k, feature_map, valid))
    if valid is None:
        return phi_q, phi_k
    keep = valid[:, None, :, None]
    return phi_q.masked_fill(~keep, 0.0), phi_k.masked_fill(~keep, 0.0)
