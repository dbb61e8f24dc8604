"""A layer on the fused kernels: lay out the tokens, compute the scores of the mode, apply the output projection."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import Boundary, Mode, Output, RunningState, Scores, State, Weights
from .bidirectional import BidirectionalScores
from .causal_landmarks import CausalLandmarkScores, landmark_grid
from .causal_sum import CausalSumScores, TwoSidedSum
from .common import (
    PermuteRows,
    compact,
    landmark_table,
    operation,
    packed_sequences,
    stored_rank,
    uniform_landmark_table,
    uniform_sequences,
)
from .decode import decode
from .output import output_projection


def fused_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    qk: Tensor | None = None,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    boundary: Boundary | None = None,
    dropout: float = 0.0,
    trace: Literal["weights", "projections"] = "weights",
    need_scores: bool = False,
    need_state: bool = False,
) -> Output:
    """Compute a layer by the kernels; the arguments of `ops.primal.attend`."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    qk = None if qk is None else qk.to(dtype)
    log_decay = None if decay is None else decay.float().log()
    if isinstance(state, RunningState) and x.shape[1] == 1 and valid is None and weights.out_weight is not None:
        return _decode_one_token(x, weights, qk, log_decay, state)
    boundary, rank = boundary or Boundary(), weights.w_e.shape[2]
    order: tuple[Tensor, Tensor] | None = None
    tokens: Tensor | int = x.shape[1]
    if cu_seqlens is not None:
        sequences = packed_sequences(cu_seqlens, x.shape[0])
        tokens = sequences.lengths
    elif valid is None:
        sequences = uniform_sequences(x.shape[0], x.shape[1], x.device)
    else:
        source, place, sequences = compact(valid)
        order, tokens = (source, place), sequences.lengths
        x = operation(PermuteRows)(x, source, place)
        qk = None if qk is None else operation(PermuteRows)(qk, source, place)
    flat = x.reshape(-1, x.shape[-1])
    z = None if qk is None else qk.reshape(-1, qk.shape[-1])
    projection = (flat, weights.qk_weight, weights.qk_bias, z)
    is_uniform = cu_seqlens is None and valid is None
    layout = (is_uniform, sequences.is_single_chunk, *sequences[:-1])
    final_state, total_trace = None, None
    if mode.causal and mode.data_dependent:
        assert mode.max_length is not None
        grid, marks_before = landmark_grid(mode.max_length, mode.landmarks, x.device)
        first = sequences.starts[:, None] + grid
        initial, offset = None, None
        if boundary.offset is None:
            rows = torch.where(grid < sequences.lengths[:, None], first, -1)
        else:
            initial = _landmarks_before(boundary, grid, weights, log_decay, dtype)
            offset = boundary.offset.expand(x.shape[0]).contiguous()
            local = grid - offset[:, None]
            rows = torch.where((local >= 0) & (local < sequences.lengths[:, None]), first - offset[:, None], -1)
        scores, energy, total_trace = operation(CausalLandmarkScores)(
            *projection, weights.w_e, weights.w_r, log_decay, initial, rows, grid, marks_before, offset, dtype, *layout
        )
    elif mode.data_dependent or (not mode.causal and decay is None):
        rows, origin, min_length = None, None, 0
        if mode.data_dependent and boundary.landmark_rows is not None:
            origin = boundary.landmark_rows.reshape(-1, x.shape[-1])
            rows = torch.arange(len(origin), device=x.device).view(-1, mode.landmarks)
            min_length = mode.landmarks
        elif mode.data_dependent and is_uniform and shift is None:
            rows = uniform_landmark_table(x.shape[0], x.shape[1], mode.landmarks, x.device)
            min_length = x.shape[1]
        elif mode.data_dependent:
            rows = landmark_table(sequences, mode.landmarks, shift)
        needs_weights = trace == "projections" and rows is not None
        scores, energy, total_trace, wx = operation(BidirectionalScores)(
            *projection, origin, weights.w_e, weights.w_r, rows, dtype, needs_weights, min_length, *layout
        )
        if needs_weights:
            total_trace = (wx[:, :, 0] * wx[:, :, 1]).sum((2, 3))  # (B, H)
    else:
        if mode.causal:
            past = state if isinstance(state, RunningState) else boundary.past
            initial = None if past is None else torch.stack([past.query_sum, past.key_sum], dim=2).float()
            scores, energy, total_trace, final = operation(CausalSumScores)(
                *projection, weights.w_e, weights.w_r, log_decay, initial, dtype, *layout
            )
            final_state = _running_state(final, tokens, decay, past) if need_state else None
        else:
            if z is None:
                assert weights.qk_weight is not None
                z = F.linear(flat, weights.qk_weight, weights.qk_bias).to(dtype)
            edges = [
                None if s is None else torch.stack([s.query_sum, s.key_sum], dim=2).float()
                for s in (boundary.past, boundary.future)
            ]
            sums = operation(TwoSidedSum)(z, log_decay, *edges, weights.w_e.shape[0], *layout)
            scores, energy, total_trace, _ = operation(BidirectionalScores)(
                None, None, None, sums, None, weights.w_e, weights.w_r, None, dtype, False, 0, *layout
            )
    y = None
    if weights.out_weight is not None:
        y = output_projection(scores, weights, dropout).view(x.shape)
        y = y if order is None else operation(PermuteRows)(y, *reversed(order))
    by_head = _split_scores(scores, x, order, rank) if need_scores or y is None else None
    return Output(y, energy, total_trace, by_head, final_state, is_fused=True)


def _landmarks_before(
    boundary: Boundary, grid: Tensor, weights: Weights, log_decay: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """W before the first token from the landmarks of earlier shards, (B, H, 2, p, S) float32."""
    assert boundary.landmark_rows is not None
    assert boundary.has_landmark is not None
    assert boundary.offset is not None
    heads, _, rank = weights.w_e.shape
    rows = boundary.landmark_rows.to(dtype).float().unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, n, p)
    age = boundary.offset[:, None] - 1 - grid  # (B or 1, n)
    weight = ((age >= 0) & boundary.has_landmark).float()[:, None]
    if log_decay is not None:
        weight = weight * (log_decay[:, None] * age.clamp(min=0)[:, None]).exp()  # (B or 1, H, n)
    w = torch.stack([weights.w_e, weights.w_r], dim=1).to(dtype).float()  # (H, 2, n, s)
    with torch.autocast(rows.device.type, enabled=False):
        state = (rows * weight[..., None]).mT[:, :, None] @ w
    return F.pad(state, (0, stored_rank(rank) - rank)).contiguous()


def _split_scores(scores: Tensor, x: Tensor, order: tuple[Tensor, Tensor] | None, rank: int) -> Scores:
    """(rows, H, 2, S) → e, r of (B, H, N, s), or (H, total, s) if packed."""
    each = scores[..., :rank].reshape(*x.shape[:-1], -1)
    if order is not None:
        each = operation(PermuteRows)(each, *reversed(order))
    each = each.view(*x.shape[:-1], scores.shape[1], 2, rank).movedim(-3, -4)  # (…, H, N, 2, s)
    return Scores(each[..., 0, :], each[..., 1, :])


def _decode_one_token(
    x: Tensor, weights: Weights, qk: Tensor | None, log_decay: Tensor | None, state: RunningState
) -> Output:
    """One token of each stream."""
    assert weights.out_weight is not None
    assert weights.score_weight is not None
    if qk is None:
        assert weights.qk_weight is not None
        qk = F.linear(x, weights.qk_weight, weights.qk_bias)
    scores, query_sum, key_sum, weight = decode(qk[:, 0], *state[:3], weights.w_e, weights.w_r, log_decay)
    heads = F.linear(scores.flatten(2), weights.score_weight, weights.score_bias)  # (B, H, p)
    y = F.linear(heads.flatten(1), weights.out_weight, weights.out_bias)
    return Output(
        y[:, None], scores=Scores(*scores[:, :, :, None].unbind(2)), state=RunningState(query_sum, key_sum, weight)
    )


def _running_state(
    final: Tensor, tokens: Tensor | int, decay: Tensor | None, past: RunningState | None
) -> RunningState:
    """The sums after the last token, and their weight Σ_j γ^j over the tokens."""
    if isinstance(tokens, int):  # on the device: a copy from the host would break CUDA-graph capture
        tokens = torch.full((final.shape[0],), tokens, device=final.device)
    count = tokens.float()[:, None]  # (B, 1)
    past_weight = torch.zeros_like(final[:, :, 0, 0]) if past is None else past.weight
    if decay is None:
        weight = past_weight + count
    else:
        gamma = decay.float()[None]
        power = gamma**count
        weight = past_weight * power + torch.where(gamma < 1, (1 - power) / (1 - gamma).clamp(min=1e-30), count)
    return RunningState(final[:, :, 0].contiguous(), final[:, :, 1].contiguous(), weight)
