"""The operators of heads whose rank is large against their width (`kernels/wide.py`), and their output map.

From q and k the heads' outputs come at once, without scores in between. What is kept for the way back is q and k, and
each head's output for the gradient of W_out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import landmarks, running_wide, wide_back
from ..kernels import wide as mixing
from ..kernels.config import stored_rank
from ..kernels.segments import segment_sum, sum_through, tall_sum
from .operator import Operator, Tables, floats, sequences_of, traced
from .score_operators import fake_sums, gradient_of_weights


def mix(
    qk: Tensor,
    wx: Tensor,
    other: Tensor | None,
    score_weight: Tensor,
    score_bias: Tensor | None,
    bias: Tensor | None,
    origin: list[Tensor],
    kept: bool,
    tables: Tables,
    single: bool,
    whole: bool,
    measured: bool,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs (rows, H·p) and, where measured, energies (B, H, 2, S).

    bias, origin and kept serve the way back alone: `mix_backward` has origin, followed by wx where it is kept.
    """
    seqs = sequences_of(tables, single)
    each, parts = mixing.mix_forward(qk, wx, other, score_weight, score_bias, seqs, whole, measured)
    return each, segment_sum(parts, seqs) if measured else parts


def _fake_mix(
    qk: Tensor, wx: Tensor, other: Any, score_weight: Tensor, score_bias: Any, bias: Any, origin: Any, kept: bool,
    tables: Tables, single: bool, whole: bool, measured: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    energy = floats(qk, tables[0].shape[0] if measured else 0, wx.shape[1], 2, wx.shape[4])
    return qk.new_empty(qk.shape[0], qk.shape[1] // 2), energy


def sides_again(origin: list[Tensor], exact: bool) -> tuple[Tensor, Tensor | None]:
    """wx, of both sides where it does not depend on the data, or of e and of r.

    origin: wx; or (x, rows, w_e, w_r) and, if it was kept, that of e.
    """
    if len(origin) == 1:
        return origin[0], None
    x, rows, w_e, w_r, *kept = origin
    dtype = torch.float32 if exact else x.dtype
    if kept:
        return kept[0], landmarks.landmark_side(x, rows, w_r, dtype)
    return landmarks.landmark_sides(x, rows, w_e, w_r, dtype)[:2]


def mix_backward(
    qk: Tensor,
    origin: list[Tensor],
    score_weight: Tensor,
    grad_each: Tensor,
    grad_energy: Tensor | None,
    tables: Tables,
    single: bool,
    whole: bool,
    exact: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qk, of wx (in two where it depends on the data), of the score map and of the projection's bias.

    Arguments as in `score_backward`; origin as `sides_again` takes it.
    """
    wx, other = sides_again(origin, exact)
    depends = other is not None
    spend_wx = depends and (spend or len(origin) == 4)  # rebuilt for this call, or read by nobody else
    grad_qk, grad_wx, grad_other, grad_score, grad_bias = wide_back.mix_backward(
        qk, wx, other, score_weight, grad_each, grad_energy, sequences_of(tables, single),
        depends, whole, spend, spend_wx, spend_other=depends,
    )  # fmt: skip
    return grad_qk, grad_wx, grad_wx.new_empty(0) if grad_other is None else grad_other, grad_score, grad_bias


def _fake_mix_backward(
    qk: Tensor, origin: list[Tensor], score_weight: Tensor, grad_each: Tensor, grad_energy: Tensor | None,
    tables: Tables, single: bool, whole: bool, exact: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    p, rank = score_weight.shape[0], score_weight.shape[1] // 2
    depends = len(origin) > 1
    grad_wx = gradient_of_weights(qk, origin, qk.shape[1] // (2 * p), stored_rank(rank), exact, 1 if depends else 2)
    grad_other = torch.empty_like(grad_wx) if depends else grad_wx.new_empty(0)
    return torch.empty_like(qk), grad_wx, grad_other, torch.empty_like(score_weight), qk.new_empty(qk.shape[1])


def running_mix(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    score_bias: Tensor | None,
    bias: Tensor | None,
    log_decay: Tensor | None,
    initial: Tensor | None,
    tables: Tables,
    single: bool,
    whole: bool,
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mix`, of the causal running sums; the chunks' carries for the way back, and the sums after the last token."""
    seqs = sequences_of(tables, single)
    final = floats(qk, tables[0].shape[0], wx.shape[1], 2, wx.shape[3])
    each, parts, carries = running_wide.running_mix_forward(
        qk, wx, score_weight, score_bias, log_decay, seqs, whole, measured, initial, final
    )
    return each, segment_sum(parts, seqs) if measured else parts, carries, final


def _fake_running_mix(
    qk: Tensor, wx: Tensor, score_weight: Tensor, score_bias: Any, bias: Any, log_decay: Any, initial: Any,
    tables: Tables, single: bool, whole: bool, measured: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    each, energy = _fake_mix(
        qk, wx, None, score_weight, score_bias, bias, None, False, tables, single, whole, measured
    )  # fmt: skip
    return each, energy, *fake_sums(qk, wx, initial, tables, single)


def running_mix_backward(
    qk: Tensor,
    wx: Tensor,
    score_weight: Tensor,
    log_decay: Tensor | None,
    carries: Tensor,
    grad_each: Tensor,
    grad_energy: Tensor | None,
    tables: Tables,
    single: bool,
    whole: bool,
    spend: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `mix_backward`, and the gradient of log γ."""
    grad_qk, grad_wx, grad_score, grad_bias, parts = running_wide.running_mix_backward(
        qk, wx, score_weight, log_decay, carries, grad_each, grad_energy, sequences_of(tables, single), whole, spend
    )
    heads = wx.shape[1]
    grad_decay = floats(qk, heads) if log_decay is None else parts.view(-1, heads, 2).sum((0, 2))
    return grad_qk, grad_wx, grad_score, grad_bias, grad_decay


def _fake_running_mix_backward(qk: Tensor, wx: Tensor, score_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    like = [torch.empty_like(t) for t in (qk, wx, score_weight)]
    return *like, qk.new_empty(qk.shape[1]), floats(qk, wx.shape[1])


def output(each: Tensor, score_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y from the heads' outputs. score_bias is in them already: it enters for its gradient alone."""
    return F.linear(each, weight, bias)


def _fake_output(each: Tensor, score_bias: Any, weight: Tensor, bias: Any) -> Tensor:
    return each.new_empty(each.shape[0], weight.shape[0])


def output_backward(
    grad_y: Tensor, each: Tensor, weight: Tensor, width: int, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the heads' outputs, of W_out and, where biased, of b_out and of b_o, which has `width` numbers.

    width: 0 where there is no b_o.
    Every token adds b_o in each head and W_out follows, so its gradient is W_outᵀ times that of b_out.
    """
    grad_each, grad_weight = grad_y @ weight, grad_y.mT @ each
    if not biased:
        return grad_each, grad_weight, None, None
    if traced(grad_y):  # a compiler's sums are as fast as the kernels', and it sees through them
        total = grad_y.sum(0, dtype=torch.float32)
        sums = (total[:, None] * weight).unflatten(1, (-1, width)).sum((0, 1)).to(weight.dtype) if width else None
        return grad_each, grad_weight, total.to(grad_y.dtype), sums
    total = tall_sum(grad_y)
    if not width:
        return grad_each, grad_weight, total.to(grad_y.dtype), None
    return grad_each, grad_weight, *sum_through(total, weight, width)


MIX = Operator(mix, _fake_mix)
MIX_BACKWARD = Operator(mix_backward, _fake_mix_backward)
RUNNING_MIX = Operator(running_mix, _fake_running_mix)
RUNNING_MIX_BACKWARD = Operator(running_mix_backward, _fake_running_mix_backward)
OUTPUT = Operator(output, _fake_output)
