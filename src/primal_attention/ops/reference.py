"""Primal-Attention, equation by equation: any dtype, any device. Every fast path is tested against this file.

Per head, with X_h the head's columns of the layer's input, f(X) its landmarks and φ the feature map:

    q_i = W_q x_i,   k_i = W_k x_i                                                     `attention`
    W_{e|X} = f(X_h)ᵀ W_e,   W_{r|X} = f(X_h)ᵀ W_r                                     `projection_weights`
    e_i = W_{e|X}ᵀ φ(q_i),   r_i = W_{r|X}ᵀ φ(k_i)                                     `project`
    y_i = W_out concat_h(W_o [e_i; r_i] + b_o) + b_out                                 `output_projection`
    J = ½ mean_i ‖√Λ e_i‖² + ½ mean_i ‖√Λ r_i‖² − Tr(W_eᵀ W_r)                         `objective`

                 not causal                               causal
data-dependent   one W_{e|X} per sequence                 W_{e|X≤i} from the landmarks at positions ≤ i
data-independent W_e; with decay, q and k are replaced    W_e; q and k are replaced by running means,
                 by sums with weights γ^|i−j|             with decay by sums with weights γ^(i−j)

Shapes: B sequences, N tokens, H heads of width p, n landmarks, s = rank. `valid` is a (B, N) bool mask, None if all
tokens are valid; the valid tokens in their order are the sequence. Sums, states and J are at least float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .feature_maps import COSINE, FeatureMap, accumulation_dtype, disabled_autocast, normalise_features
from .landmarks import landmark_indices, position_of_rank, ragged_landmark_indices
from .types import Boundary, LandmarkState, Mode, Output, RunningState, Scores, State, Weights


def attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    qk: Tensor | None = None,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    boundary: Boundary | None = None,
    dropout: float = 0.0,
    trace: Literal["weights", "projections"] = "weights",
) -> Output:
    """Compute a layer.

    Args:
        x: (B, N, d).
        weights: parameters of the layer. Without `out_weight` the result has scores and no y.
        mode: the mode of the layer.
        feature_map: φ.
        qk: the projected queries and keys, (B, N, 2d), if the caller has computed them.
        valid: (B, N) bool, True at tokens.
        decay: γ of each head, (H,).
        state: the state before the first token (causal modes).
        shift: jitter of the landmarks (`landmarks.random_shift`).
        boundary: contributions of tokens outside x.
        dropout: rate of the dropout on the scores.
        trace: the weights under the trace of J.
    """
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0.0)  # zero the padding, including NaNs
    if qk is None:
        assert weights.qk_weight is not None
        qk = F.linear(x, weights.qk_weight, weights.qk_bias)
    q, k = (split_heads(z, mode.heads) for z in qk.chunk(2, dim=-1))
    w_e, w_r = weights.w_e.to(q.dtype), weights.w_r.to(q.dtype)
    boundary = boundary or Boundary()
    w_x: tuple[Tensor, Tensor] | None = None
    if mode.causal and mode.data_dependent:
        past = state if isinstance(state, LandmarkState) else None
        scores, state = causal_landmark_scores(
            split_heads(x, mode.heads), q, k, w_e, w_r, mode, feature_map, valid, decay, past, boundary
        )
    elif mode.data_dependent:
        phi_q, phi_k = token_features(q, k, feature_map, valid, boundary.feature_sum)
        if boundary.landmark_rows is None:
            rows = landmark_rows(split_heads(x, mode.heads), mode.landmarks, valid, shift)
        else:
            rows = split_heads(boundary.landmark_rows, mode.heads)
        w_x = projection_weights(rows.to(q.dtype), w_e), projection_weights(rows.to(q.dtype), w_r)
        scores = Scores(project(phi_q, w_x[0]), project(phi_k, w_x[1]))
    else:
        past_sums = state if isinstance(state, RunningState) else boundary.past
        phi_q, phi_k, state = sum_features(q, k, mode, feature_map, valid, decay, past_sums, boundary)
        scores = Scores(project(phi_q, w_e), project(phi_k, w_r))
    scores = Scores(*(zero_padding(s, valid) for s in scores))
    energy = torch.stack([score_energy(s) for s in scores], dim=2)
    traced = (weights.w_e, weights.w_r) if trace == "weights" or w_x is None else w_x
    y = None
    if weights.out_weight is not None:
        y = output_projection(scores, weights, dropout)
        y = y if valid is None else y.masked_fill(~valid[..., None], 0.0)
    return Output(y, energy, weight_trace(*traced), scores, state if mode.causal else None)


def output_projection(scores: Scores, weights: Weights, dropout: float = 0.0) -> Tensor:
    """y = W_out concat_h(W_o [e; r] + b_o) + b_out, (B, N, d)."""
    assert weights.score_weight is not None
    assert weights.out_weight is not None
    stacked = F.dropout(torch.cat(scores, dim=-1), dropout)  # (B, H, N, 2s)
    bias = None if weights.score_bias is None else weights.score_bias.to(stacked.dtype)
    heads = F.linear(stacked, weights.score_weight.to(stacked.dtype), bias)
    return F.linear(heads.transpose(1, 2).flatten(2), weights.out_weight, weights.out_bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H·p) → (B, H, N, p)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def zero_padding(t: Tensor, valid: Tensor | None) -> Tensor:
    """Zero the padding of t, (B, H, N, ·)."""
    return t if valid is None else t.masked_fill(~valid[:, None, :, None], 0.0)


# Landmarks and projection weights


def landmark_rows(x_h: Tensor, landmarks: int, valid: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """f(X_h), evenly spaced rows among the valid tokens, (B, H, N, p) → (B, H, n, p). Zero for an empty sequence."""
    if valid is None:
        return x_h[:, :, landmark_indices(x_h.shape[2], landmarks, x_h.device, shift)]
    lengths = valid.sum(dim=1)
    rows = position_of_rank(valid, ragged_landmark_indices(lengths, landmarks, shift))  # (B, n)
    picked = x_h.gather(2, rows[:, None, :, None].expand(-1, x_h.shape[1], -1, x_h.shape[3]))
    return picked * (lengths > 0)[:, None, None, None]


def projection_weights(rows: Tensor, w: Tensor) -> Tensor:
    """W_{·|X} = f(X)ᵀ W. rows: (B, H, n, p), w: (H, n, s) → (B, H, p, s)."""
    return rows.mT @ w


def project(phi: Tensor, w_x: Tensor) -> Tensor:
    """e_i = W_{e|X}ᵀ φ(x_i). phi: (B, H, N, p), w_x: (B, H, p, s) or (H, p, s) → (B, H, N, s)."""
    return phi @ w_x.to(phi.dtype)


# Features of the tokens


def token_features(
    q: Tensor, k: Tensor, feature_map: FeatureMap, valid: Tensor | None, feature_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) of each token; the softmax map is normalised by D̂ over the sequence."""
    phi_q, phi_k = feature_map.apply(q), feature_map.apply(k)
    if not feature_map.is_normalised:
        return phi_q, phi_k
    if feature_sum is None:
        feature_sum = zero_padding(phi_k, valid).to(accumulation_dtype(phi_k.dtype)).sum(dim=2, keepdim=True)
    return normalise_features(phi_q, phi_k, feature_sum)


def sum_features(
    q: Tensor,
    k: Tensor,
    mode: Mode,
    feature_map: FeatureMap,
    valid: Tensor | None,
    decay: Tensor | None,
    past: RunningState | None,
    boundary: Boundary,
) -> tuple[Tensor, Tensor, RunningState | None]:
    """φ of the weighted means of q and k in the data-independent modes, and the state after the last token.

    Causal: running means, or sums with weights γ^(i−j). Not causal: γ^|i−j|, and the tokens themselves without decay.
    """
    if not mode.causal and decay is None:
        return *token_features(q, k, feature_map, valid, boundary.feature_sum), None
    ones = torch.ones_like(q[..., :1], dtype=accumulation_dtype(q.dtype))
    start, end = (
        None if s is None else torch.cat([s.query_sum, s.key_sum, s.weight[..., None]], dim=-1)
        for s in (past, boundary.future)
    )
    z = torch.cat([q, k, ones], dim=-1)  # one scan for both sums and their weight
    sums = running_sum(z, decay, valid, start) if mode.causal else two_sided_sum(z, decay, valid, start, end)
    q_sum, k_sum, weight = sums.split([q.shape[-1], k.shape[-1], 1], dim=-1)
    # The cosine map does not depend on the divisor of the mean.
    divisor = 1.0 if feature_map.is_scale_free else weight.clamp(min=1.0)
    phi_q, phi_k = (feature_map.apply(z / divisor).to(q.dtype) for z in (q_sum, k_sum))
    feature_sum = None
    if feature_map.is_normalised:
        start = boundary.feature_sum if past is None or past.feature_sum is None else past.feature_sum
        if mode.causal:
            sums = running_sum(phi_k, decay, valid, start)
            phi_q, phi_k = normalise_features(phi_q, phi_k, sums)
            feature_sum = sums[:, :, -1].clone()
        else:
            phi_q, phi_k = token_features(phi_q, phi_k, FeatureMap(lambda z: z, True), valid, start)
    if not mode.causal:
        return phi_q, phi_k, None
    # Clone: a view of the last row would keep the sums of all tokens alive.
    state = RunningState(q_sum[:, :, -1].clone(), k_sum[:, :, -1].clone(), weight[:, :, -1, 0].clone(), feature_sum)
    return phi_q, phi_k, state


# Running sums


def running_sum(
    z: Tensor, decay: Tensor | None = None, valid: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """s_i = γ s_{i−1} + z_i over the valid tokens, in at least float32. Padding repeats the sum before it.

    z: (B, H, N, p), decay γ: (H,), start: (B, H, p).
    """
    s = zero_padding(z.to(accumulation_dtype(z.dtype)), valid)
    if decay is None:
        s = s.cumsum(dim=2)
        return s if start is None else s + start[:, :, None]
    a = decay.to(s.dtype)[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
    if valid is not None:
        a = torch.where(valid[:, None, :, None], a, 1.0)
    s, a = linear_recurrence(s, a)
    # The product with zero keeps γ in the graph of a sequence of one token; DDP expects a gradient.
    return s + a * (0.0 if start is None else start[:, :, None])


def two_sided_sum(
    z: Tensor, decay: Tensor | None, valid: Tensor | None, start: Tensor | None, end: Tensor | None
) -> Tensor:
    """s_i = Σ_j γ^|i−j| z_j over the valid tokens. start, end: (B, H, p), the sums before and after the tokens."""
    terms = zero_padding(z.to(accumulation_dtype(z.dtype)), valid)
    forward = running_sum(z, decay, valid, start)
    backward = running_sum(z.flip(2), decay, None if valid is None else valid.flip(1), end).flip(2)
    return forward + backward - terms


CHUNK, MAX_LEVELS = 64, 4  # six rounds of doubling solve a chunk; traced graphs nest chunks: 64⁴ is 16 million tokens
CHECKS_BOUNDS = torch.__version__ >= "2.8"  # traced code can ask for bounds of a symbolic size


def linear_recurrence(s: Tensor, a: Tensor, level: int = 1) -> tuple[Tensor, Tensor]:
    """y_i = a_i y_{i−1} + s_i along dim 2, and the products a_1⋯a_i. s: (B, H, N, p), a: (B, H, N, 1).

    Doubling solves each chunk: after k rounds y_i holds the last 2^k terms of its chunk. The ends of the chunks form a
    shorter recurrence. Only earlier terms are read, so a NaN cannot propagate to earlier tokens. Under torch.compile
    no branch depends on N, so that one graph serves all lengths.
    """
    n, is_tracing = s.shape[2], torch.compiler.is_compiling()
    if isinstance(n, int) and n == 1:  # not a symbol of torch.export, whose graph serves all lengths
        return s, a
    is_known = torch.fx.experimental.symbolic_shapes.statically_known_true if is_tracing else bool
    is_single_chunk = (CHECKS_BOUNDS or not is_tracing) and is_known(n <= CHUNK)  # without a guard on n
    # Tracing specialises sizes of one: where their number is unknown, it has a chunk more than needed.
    chunks = (n + CHUNK - 1 + (CHUNK if is_tracing and not is_single_chunk else 0)) // CHUNK
    spare = (0, 0, 0, chunks * CHUNK - n)
    s = F.pad(s, spare).unflatten(2, (chunks, CHUNK))  # (B, H, M, C, p)
    a = F.pad(a, spare, value=1.0).unflatten(2, (chunks, CHUNK))
    shift = 1
    while shift < CHUNK:
        s = torch.cat([s[..., :shift, :], s[..., shift:, :] + a[..., shift:, :] * s[..., :-shift, :]], dim=3)
        a = torch.cat([a[..., :shift, :], a[..., shift:, :] * a[..., :-shift, :]], dim=3)
        shift *= 2
    if not is_single_chunk and (level < MAX_LEVELS or not is_tracing):
        ends, factors = linear_recurrence(s[..., -1, :], a[..., -1, :], level + 1)
        s = s + a * F.pad(ends, (0, 0, 1, 0))[:, :, :-1, None]
        a = a * F.pad(factors, (0, 0, 1, 0), value=1.0)[:, :, :-1, None]
    rest = (0, 0, 0, n - chunks * CHUNK)  # a negative padding: a slice would compare n with the number of rows
    return F.pad(s.flatten(2, 3), rest), F.pad(a.flatten(2, 3), rest)


# Causal and data-dependent


def causal_landmark_scores(
    x_h: Tensor,
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    mode: Mode,
    feature_map: FeatureMap,
    valid: Tensor | None,
    decay: Tensor | None,
    past: LandmarkState | None,
    boundary: Boundary,
) -> tuple[Scores, LandmarkState]:
    """e_i = W_{e|X≤i}ᵀ φ(q_i), W_{e|X≤i} = Σ_{j: g_j ≤ i} γ^(i−g_j) x_{g_j} W_e[j]ᵀ, without forming W_{e|X≤i}.

    g is the landmark grid over `max_length`. Equals ((φ(q) f(X)ᵀ) ⊙ [g_j ≤ i] γ^(i−g_j)) W_e: the landmarks are n keys
    whose values are the rows of W_e.
    """
    assert mode.max_length is not None
    grid = landmark_indices(mode.max_length, mode.landmarks, q.device)  # (n,)
    count = torch.ones(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device) if valid is None else valid.long()
    position = count.cumsum(dim=1) - 1  # (B, N); a padded token has the position of its predecessor
    offset = past.position if past is not None else boundary.offset
    if offset is not None:
        position = position + offset[:, None]
    phi_q, phi_k = feature_map.apply(q), feature_map.apply(k)
    feature_sum = past.feature_sum if past is not None else boundary.feature_sum
    if feature_map.is_normalised:
        sums = running_sum(phi_k, decay, valid, feature_sum)
        phi_q, phi_k = normalise_features(phi_q, phi_k, sums)
        feature_sum = sums[:, :, -1].clone()
    if boundary.landmark_rows is None:
        rows, has_landmark = _grid_rows(x_h.to(q.dtype), grid, position, valid)  # (B, H, n, p), (B, n)
    else:
        assert boundary.has_landmark is not None
        rows, has_landmark = split_heads(boundary.landmark_rows, mode.heads).to(q.dtype), boundary.has_landmark
    is_visible = (grid[None, None] <= position[..., None]) & has_landmark[:, None]  # (B, N, n)
    dtype = accumulation_dtype(q.dtype)

    def decay_power(age: Tensor, like: torch.dtype) -> Tensor | float:  # γ^age, age: (B, 1, …)
        return 1.0 if decay is None else (decay.to(dtype)[None, :, None, None].log() * age.clamp(min=0)).exp().to(like)

    weight = decay_power((position[..., None] - grid)[:, None], q.dtype)  # (B, H, N, n)
    e, r = (
        ((phi @ rows.mT) * weight).masked_fill(~is_visible[:, None], 0.0) @ w.to(phi.dtype)
        for phi, w in ((phi_q, w_e), (phi_k, w_r))
    )
    # The projection weights after the last token.
    last = position[:, -1:]
    decayed_rows = rows.to(dtype) * decay_power((last - grid)[:, None, :, None], dtype)  # (B, H, n, p)
    with disabled_autocast(rows.device):
        w_e_x, w_r_x = (projection_weights(decayed_rows, w.to(dtype)) for w in (w_e, w_r))
    steps = x_h.shape[2]
    if past is not None:
        factor = decay_power((position - past.position[:, None] + 1)[:, None, :, None], q.dtype)
        e, r = e + factor * project(phi_q, past.w_e_x), r + factor * project(phi_k, past.w_r_x)
        factor = decay_power((last - past.position[:, None] + 1)[:, None, :, None], dtype)
        w_e_x, w_r_x, steps = w_e_x + factor * past.w_e_x, w_r_x + factor * past.w_r_x, steps + past.steps
    return Scores(e, r), LandmarkState(w_e_x, w_r_x, last[:, 0] + 1, steps, feature_sum)


def _grid_rows(x_h: Tensor, grid: Tensor, position: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of x_h on the landmark grid, zero elsewhere, and the grid points that x_h contains."""
    first = position[:, :1] if valid is None else position[:, :1] - valid[:, :1].long() + 1
    rank = grid[None] - first  # (B, n), index among the valid tokens of x_h
    count = torch.full_like(rank[:, :1], x_h.shape[2]) if valid is None else valid.sum(dim=1, keepdim=True)
    has_landmark = (rank >= 0) & (rank < count)
    rank = rank.clamp(min=0).minimum((count - 1).clamp(min=0))
    rows = rank if valid is None else position_of_rank(valid, rank)
    picked = x_h.gather(2, rows[:, None, :, None].expand(-1, x_h.shape[1], -1, x_h.shape[3]))
    return picked.masked_fill(~has_landmark[:, None, :, None], 0.0), has_landmark


# Objective


def score_energy(scores: Tensor) -> Tensor:
    """Σ_i e_i² per direction in at least float32, (B, H, N, s) → (B, H, s)."""
    return scores.to(accumulation_dtype(scores.dtype)).square().sum(dim=2)


def weight_trace(w_e: Tensor, w_r: Tensor) -> Tensor:
    """Tr(W_eᵀ W_r) per head in at least float32: (H, n, s) → (1, H), (B, H, p, s) → (B, H)."""
    dtype = accumulation_dtype(w_e.dtype)
    trace = (w_e.to(dtype) * w_r.to(dtype)).sum(dim=(-2, -1))
    return trace[None] if trace.ndim == 1 else trace


def objective(
    energy: Tensor, trace: Tensor, sqrt_lambda: Tensor, tokens: Tensor | int, form: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """J_b = ½ Σ_i ‖√Λ e_i‖² + ½ Σ_i ‖√Λ r_i‖² − Tr(W_eᵀ W_r), averaged over the heads: (B,), in at least float32.

    form "mean" averages the energies over the tokens, as in training (Λ is learned and absorbs the scale); form "sum"
    is the paper's J. energy: (B, H, 2, s), trace: (B or 1, H), tokens: (B,) or one number.
    """
    scale = sqrt_lambda.to(accumulation_dtype(sqrt_lambda.dtype)).square() * (0.5 / sqrt_lambda.shape[0])
    half = (energy * scale[:, None]).sum(dim=(1, 2, 3))
    if form == "mean":
        half = half / (max(tokens, 1) if isinstance(tokens, int) else tokens.clamp(min=1))
    return half - trace.mean(dim=1)


# Kernel


def kernel_factors(
    x: Tensor,
    qk: Tensor,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """φ′_q, φ′_k with K = φ′_q φ′_kᵀ (Theorem 3.2): φ′ = f(X) φ if data-dependent, else φ."""
    q, k = (split_heads(z, mode.heads) for z in qk.chunk(2, dim=-1))
    if not mode.data_dependent:
        phi_q, phi_k, _ = sum_features(q, k, mode, feature_map, valid, decay, None, Boundary())
    else:
        x_h = split_heads(x, mode.heads).to(q.dtype)
        if mode.causal:
            # With the identity as W, the scores are the similarities to the landmarks.
            eye = torch.eye(mode.landmarks, dtype=q.dtype, device=q.device).expand(mode.heads, -1, -1)
            (phi_q, phi_k), _ = causal_landmark_scores(
                x_h, q, k, eye, eye, mode, feature_map, valid, decay, None, Boundary()
            )
        else:
            rows = landmark_rows(x_h, mode.landmarks, valid)
            phi_q, phi_k = (phi @ rows.mT for phi in token_features(q, k, feature_map, valid))
    return zero_padding(phi_q, valid), zero_padding(phi_k, valid)
