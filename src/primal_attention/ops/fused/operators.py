"""The operators around the scores: rows moved, projections, output maps, the objective, a decoded token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import decode as decoding
from ..kernels import fold as folding
from ..kernels import landmarks, landmarks_back, objective
from ..kernels import rows as moving
from ..kernels.config import stored_rank
from ..kernels.segments import tall_sum
from ..kernels.sequences import CHUNK
from .operator import Operator, floats

WIDE_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)  # torch.mm with an output type


def _fake_compact(valid: Tensor) -> tuple[Tensor, ...]:
    batch, width = valid.shape
    index = [valid.new_empty((batch, width), dtype=torch.int32) for _ in range(2)]
    chunks = batch * (-(-width // CHUNK))
    return *index, valid.new_empty(batch, dtype=torch.int64), valid.new_empty(chunks, dtype=torch.int64)


def move(x: Tensor, to: Tensor, back: Tensor) -> Tensor:
    """x (B, N, d) by the index `to`; `back` serves the way back."""
    return moving.move_rows(x, to)


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    rows: Tensor,
    exact: bool,
    shortest: int,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k side by side, wx, and the traces. exact: wx in float32, not in the dtype in which kernels multiply it.

    shortest: tokens that every sequence is sure to have; for the way back, where rows that repeat cost more.
    apart: wx in two tensors, of e and of r; otherwise the second one is empty.
    """
    dtype = torch.float32 if exact else x.dtype
    if apart:
        return F.linear(x, weight, bias), *landmarks.landmark_sides(x, rows, w_e, w_r, dtype)
    wx, trace = landmarks.landmark_weights(x, rows, w_e, w_r, dtype)
    return F.linear(x, weight, bias), wx, wx.new_empty(0), trace


def _fake_project(
    x: Tensor, weight: Tensor, bias: Any, w_e: Tensor, w_r: Tensor, rows: Tensor, exact: bool, shortest: int,
    apart: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, _, rank = w_e.shape
    shape = (rows.shape[0], heads, 1 if apart else 2, x.shape[1] // heads, stored_rank(rank))
    wx = x.new_empty(shape, dtype=torch.float32 if exact else x.dtype)
    other = torch.empty_like(wx) if apart else wx.new_empty(0)
    return x.new_empty(x.shape[0], weight.shape[0]), wx, other, floats(x, heads)


def project_backward(
    x: Tensor,
    weight: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    rows: Tensor,
    grad_qk: Tensor,
    grad_wx: Tensor,
    grad_other: Tensor | None,
    grad_trace: Tensor | None,
    shortest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the projection, of w_e and of w_r. grad_other: where wx is apart."""
    grad_x = grad_qk @ weight
    landmarks_back.add_to_rows(rows, w_e, w_r, grad_wx, grad_x, shortest >= rows.shape[1], grad_other)
    grad_e, grad_r = landmarks_back.to_weights(x, rows, w_e, w_r, grad_wx, grad_trace, grad_other)
    return grad_x, grad_qk.mT @ x, grad_e, grad_r


def _fake_pack(w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    heads, p, rank = w_e.shape
    return floats(w_e, 1, heads, 2, p, stored_rank(rank)), floats(w_e, heads)


def _fake_decode(
    qk: Tensor, query_sum: Tensor, key_sum: Tensor, weight: Tensor, w_e: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    scores = qk.new_empty(*query_sum.shape[:2], 2, w_e.shape[2])
    return scores, torch.empty_like(query_sum), torch.empty_like(key_sum), torch.empty_like(weight)


def combine(
    scores: Tensor, score_weight: Tensor, score_bias: Tensor | None, out_weight: Tensor, out_bias: Tensor | None
) -> Tensor:
    """y through the product of the two output maps, which is formed for the call and not kept."""
    product, bias = folding.fold(out_weight, out_bias, score_weight, score_bias)
    shift = None if score_bias is None and out_bias is None else bias
    return F.linear(scores.flatten(1), product, shift)


def _fake_combine(scores: Tensor, score_weight: Tensor, score_bias: Any, out_weight: Tensor, out_bias: Any) -> Tensor:
    return scores.new_empty(scores.shape[0], out_weight.shape[0])


def combine_backward(
    grad_y: Tensor, scores: Tensor, score_weight: Tensor, score_bias: Tensor | None, out_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the scores, of W_o and b_o, of W_out and b_out."""
    product, _ = folding.fold(out_weight, None, score_weight, None)
    grad_scores = (grad_y @ product).view_as(scores)
    grad_product = _product_in_float32(grad_y.mT, scores.flatten(1))
    ones = scores.shape[3] > score_weight.shape[1] // 2  # the scores carry a column of ones
    grad_bias = None if ones else tall_sum(grad_y)
    grad_out, grad_score, grad_out_bias, grad_score_bias = folding.unfold(
        grad_product, grad_bias, out_weight, score_weight, score_bias
    )
    return grad_scores, grad_score, grad_score_bias, grad_out, grad_out_bias


def _fake_combine_backward(
    grad_y: Tensor, scores: Tensor, score_weight: Tensor, score_bias: Any, out_weight: Tensor
) -> tuple[Tensor, ...]:
    p, d = score_weight.shape[0], out_weight.shape[0]
    vectors = out_weight.new_empty(p), out_weight.new_empty(d)
    return (
        torch.empty_like(scores),
        torch.empty_like(score_weight),
        vectors[0],
        torch.empty_like(out_weight),
        vectors[1],
    )


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without rounding the sums back to 16 bits, where torch can."""
    if WIDE_PRODUCTS and a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def measure(
    energy: Tensor, sqrt_lambda: Tensor, trace: Tensor, lengths: Tensor | None, length: int, summed: bool
) -> Tensor:
    """J (B,); `lengths` where the sequences differ, else `length`."""
    return objective.objective_forward(energy, sqrt_lambda, trace, length if lengths is None else lengths, summed)


def _fake_measure(energy: Tensor, *rest: Any) -> Tensor:
    return floats(energy, energy.shape[0])


def measure_backward(
    grad: Tensor, energy: Tensor, sqrt_lambda: Tensor, lengths: Tensor | None, length: int, summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the energies, of √Λ and of the traces."""
    return objective.objective_backward(grad, energy, sqrt_lambda, length if lengths is None else lengths, summed)


def _fake_measure_backward(grad: Tensor, energy: Tensor, sqrt_lambda: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(energy), torch.empty_like(sqrt_lambda), floats(energy, energy.shape[1])


COMPACT = Operator(moving.compact, _fake_compact)
MOVE = Operator(move, lambda x, to, back: x.new_empty(x.shape))
PROJECT = Operator(project, _fake_project)
PROJECT_BACKWARD = Operator(
    project_backward,
    lambda x, weight, w_e, w_r, *rest: tuple(torch.empty_like(t) for t in (x, weight, w_e, w_r)),
)
PACK = Operator(landmarks.packed_weights, _fake_pack, "pack")
PACK_BACKWARD = Operator(
    landmarks_back.finish_weights,
    lambda parts, w_e, w_r, grad_trace: (torch.empty_like(w_e), torch.empty_like(w_r)),
    "pack_backward",
)
DECODE = Operator(decoding.decode, _fake_decode)
COMBINE = Operator(combine, _fake_combine)
COMBINE_BACKWARD = Operator(combine_backward, _fake_combine_backward)
MEASURE = Operator(measure, _fake_measure)
MEASURE_BACKWARD = Operator(measure_backward, _fake_measure_backward)
