"""The operators of the scores, one pair for each way to form them; heads of a large rank have theirs in `wide.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import growing, landmarks, landmarks_back, running
from ..kernels import scores as scoring
from ..kernels.config import stored_rank
from ..kernels.segments import column_sum, segment_sum
from .operator import Operator, Tables, floats, sequences_of


def score(
    qk: Tensor,
    wx: Tensor,
    bias: Tensor | None,
    origin: list[Tensor],
    tables: Tables,
    single: bool,
    rank: int,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Scores (rows, H, 2, S) and energies (B, H, 2, S). bias and origin serve the way back alone."""
    seqs = sequences_of(tables, single)
    scores, parts = scoring.scores_forward(qk, wx, seqs, rank, whole)
    return scores, segment_sum(parts, seqs)


def _fake_score(
    qk: Tensor, wx: Tensor, bias: Any, origin: Any, tables: Tables, single: bool, rank: int, whole: bool
) -> tuple[Tensor, Tensor]:
    shape = (wx.shape[1], 2, wx.shape[4])
    return qk.new_empty(qk.shape[0], *shape), floats(qk, tables[0].shape[0], *shape)


def weights_again(origin: list[Tensor], exact: bool) -> tuple[Tensor, bool]:
    """wx and whether it depends on the data. origin: wx, or (x, rows, w_e, w_r) if it does."""
    if len(origin) == 1:
        return origin[0], False
    x, rows, w_e, w_r = origin
    return landmarks.landmark_weights(x, rows, w_e, w_r, torch.float32 if exact else x.dtype)[0], True


def gradient_of_weights(
    qk: Tensor, origin: list[Tensor], heads: int, stored: int, exact: bool, sides: int = 2
) -> Tensor:
    """Unwritten, in the shape and dtype of wx."""
    depends = len(origin) > 1
    shape = (origin[1].shape[0] if depends else 1, heads, sides, qk.shape[1] // (2 * heads), stored)
    return qk.new_empty(shape, dtype=qk.dtype if depends and not exact else torch.float32)


def score_backward(
    qk: Tensor,
    origin: list[Tensor],
    grad_scores: Tensor,
    grad_energy: Tensor,
    tables: Tables,
    single: bool,
    rank: int,
    whole: bool,
    exact: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qk, of wx and of the projection's bias. origin: wx, or (x, rows, w_e, w_r) to rebuild it.

    spend: nobody reads qk again, so its gradient may take its place.
    """
    seqs = sequences_of(tables, single)
    wx, depends = weights_again(origin, exact)
    grad_qk, parts, bias_parts = scoring.scores_backward(
        qk, wx, grad_scores, grad_energy, seqs, rank, depends, whole, spend
    )
    grad_wx = segment_sum(parts, seqs, wx.dtype) if depends else parts.sum(0, keepdim=True)
    return grad_qk, grad_wx, column_sum(bias_parts, qk.dtype)


def _fake_score_backward(
    qk: Tensor, origin: list[Tensor], grad_scores: Tensor, grad_energy: Tensor, tables: Tables, single: bool, rank: int,
    whole: bool, exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, heads, _, stored = grad_scores.shape
    return torch.empty_like(qk), gradient_of_weights(qk, origin, heads, stored, exact), qk.new_empty(qk.shape[1])


def running_score(
    qk: Tensor,
    wx: Tensor,
    bias: Tensor | None,
    log_decay: Tensor | None,
    initial: Tensor | None,
    tables: Tables,
    single: bool,
    rank: int,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal scores and energies, the chunks' carries for the way back, and the sums after the last token."""
    seqs = sequences_of(tables, single)
    final = floats(qk, tables[0].shape[0], wx.shape[1], 2, wx.shape[3])
    scores, parts, carries = running.running_forward(qk, wx, log_decay, seqs, rank, whole, initial, final)
    return scores, segment_sum(parts, seqs), carries, final


def _fake_running_score(
    qk: Tensor,
    wx: Tensor,
    bias: Any,
    log_decay: Any,
    initial: Any,
    tables: Tables,
    single: bool,
    rank: int,
    whole: bool,
) -> tuple[Tensor, ...]:
    scores, energy = _fake_score(qk, wx, bias, None, tables, single, rank, whole)
    return scores, energy, *fake_sums(qk, wx, initial, tables, single)


def fake_sums(qk: Tensor, wx: Tensor, initial: Any, tables: Tables, single: bool) -> tuple[Tensor, Tensor]:
    """The carries, none where nothing stands before any chunk (`Plan.forward_carries`), and the final sums."""
    heads, _, p = wx.shape[1:4]
    chunks = 0 if single and initial is None else tables[4].shape[0]
    return floats(qk, chunks, heads, 2, p), floats(qk, tables[0].shape[0], heads, 2, p)


def running_score_backward(
    qk: Tensor,
    wx: Tensor,
    log_decay: Tensor | None,
    carries: Tensor,
    grad_scores: Tensor,
    grad_energy: Tensor,
    tables: Tables,
    single: bool,
    rank: int,
    whole: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qk, of wx, of the projection's bias and of log γ. spend: as in `score_backward`."""
    grad_qk, grad_wx, bias_parts, decay_parts = running.running_backward(
        qk, wx, log_decay, carries, grad_scores, grad_energy, sequences_of(tables, single), rank, whole, spend
    )
    grad_decay = floats(qk, wx.shape[1]) if log_decay is None else decay_parts.sum((0, 2))
    return grad_qk, grad_wx.sum(0, keepdim=True), column_sum(bias_parts, qk.dtype), grad_decay


def _fake_running_score_backward(qk: Tensor, wx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(qk), torch.empty_like(wx), qk.new_empty(qk.shape[1]), floats(qk, wx.shape[1])


def growing_score(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
    rows: Tensor,
    grid: Tensor,
    tables: Tables,
    single: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal data-dependent mode from x on: scores, energies, and q and k for the way back."""
    seqs = sequences_of(tables, single)
    qk = F.linear(x, weight, bias)
    scores, parts = growing.growing_forward(qk, x, rows, grid, w_e, w_r, log_decay, seqs, whole)
    return scores, segment_sum(parts, seqs), qk


def _fake_growing_score(
    x: Tensor, weight: Tensor, bias: Any, w_e: Tensor, w_r: Tensor, log_decay: Any, rows: Tensor, grid: Tensor,
    tables: Tables, single: bool, whole: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads, _, rank = w_e.shape
    shape = (heads, 2, stored_rank(rank))
    qk = x.new_empty(x.shape[0], weight.shape[0])
    return x.new_empty(x.shape[0], *shape), floats(x, tables[0].shape[0], *shape), qk


def growing_score_backward(
    x: Tensor,
    weight: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
    rows: Tensor,
    grid: Tensor,
    qk: Tensor,
    scores: Tensor,
    grad_scores: Tensor,
    grad_energy: Tensor,
    tables: Tables,
    single: bool,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the projection and its bias, of w_e and w_r, and of log γ."""
    seqs = sequences_of(tables, single)
    grad_qk, bias_parts, decay_parts, grad_rows, parts = growing.growing_backward(
        qk, x, rows, grid, w_e, w_r, log_decay, scores, grad_scores, grad_energy, seqs, whole
    )
    grad_x = grad_qk @ weight
    growing.add_rows(grad_rows, rows, grad_x, seqs)
    grad_e, grad_r = landmarks_back.finish_weights(parts, w_e, w_r, None)
    grad_decay = floats(qk, w_e.shape[0]) if log_decay is None else decay_parts.sum((0, 2))
    return grad_x, grad_qk.mT @ x, column_sum(bias_parts, qk.dtype), grad_e, grad_r, grad_decay


def _fake_growing_score_backward(x: Tensor, weight: Tensor, w_e: Tensor, w_r: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    like = [torch.empty_like(t) for t in (x, weight, w_e, w_r)]
    return like[0], like[1], x.new_empty(weight.shape[0]), like[2], like[3], floats(x, w_e.shape[0])


SCORE = Operator(score, _fake_score)
SCORE_BACKWARD = Operator(score_backward, _fake_score_backward)
RUNNING_SCORE = Operator(running_score, _fake_running_score)
RUNNING_SCORE_BACKWARD = Operator(running_score_backward, _fake_running_score_backward)
GROWING_SCORE = Operator(growing_score, _fake_growing_score)
GROWING_SCORE_BACKWARD = Operator(growing_score_backward, _fake_growing_score_backward)
