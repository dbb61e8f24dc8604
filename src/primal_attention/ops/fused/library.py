"""The kernels as PyTorch operators `primal::…`: with shapes that the compiler can follow, and with their gradients.

Eager code calls the same functions without going through the dispatcher, which costs as much host time as a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import decode as decoding
from ..kernels import fold as folding
from ..kernels import growing, landmarks, objective, running
from ..kernels import rows as moving
from ..kernels import scores as scoring
from ..kernels.config import stored_rank
from ..kernels.segments import column_sum, segment_sum, tall_sum
from ..kernels.sequences import CHUNK, Sequences

WIDE_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)  # torch.mm with an output type

Tables = list[Tensor]  # the tensors of `Sequences`, in their order


def sequences_of(tables: Tables, single: bool) -> Sequences:
    return Sequences(*tables, single)  # type: ignore[arg-type, call-arg]


def floats(like: Tensor, *shape: Any) -> Tensor:
    """Unwritten float32."""
    return like.new_empty(shape, dtype=torch.float32)


class Operator:
    """A kernel by name: `run` in eager mode, the registered operator where somebody traces."""

    def __init__(self, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.run = run
        self.registered = torch.library.custom_op(f"primal::{run.__name__}", run, mutates_args=())
        self.registered.register_fake(fake)

    def __call__(self, *args: Any, **eager: Any) -> Any:
        """`eager`: what only the eager function may be told, because a registered operator changes no argument."""
        traced = torch.compiler.is_compiling() or type(args[0]) not in (Tensor, torch.nn.Parameter)
        return self.registered(*args) if traced else self.run(*args, **eager)


def compact(valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the valid tokens move to the front; see `kernels.rows`."""
    return moving.compact(valid)


def _fake_compact(valid: Tensor) -> tuple[Tensor, ...]:
    batch, width = valid.shape
    index = [valid.new_empty((batch, width), dtype=torch.int32) for _ in range(2)]
    chunks = batch * (-(-width // CHUNK))
    return *index, valid.new_empty(batch, dtype=torch.int64), valid.new_empty(chunks, dtype=torch.int64)


def move(x: Tensor, to: Tensor, back: Tensor) -> Tensor:
    """x (B, N, d) by the index `to`; `back` serves the way back."""
    return moving.move_rows(x, to)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, w_e: Tensor, w_r: Tensor, rows: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k side by side, wx, and the traces. exact: wx in float32, not in the dtype in which kernels multiply it."""
    wx, trace = landmarks.landmark_weights(x, rows, w_e, w_r, torch.float32 if exact else x.dtype)
    return F.linear(x, weight, bias), wx, trace


def _fake_project(
    x: Tensor, weight: Tensor, bias: Any, w_e: Tensor, w_r: Tensor, rows: Tensor, exact: bool
) -> tuple[Tensor, ...]:
    heads, _, rank = w_e.shape
    shape = (rows.shape[0], heads, 2, x.shape[1] // heads, stored_rank(rank))
    wx = x.new_empty(shape, dtype=torch.float32 if exact else x.dtype)
    return x.new_empty(x.shape[0], weight.shape[0]), wx, floats(x, heads)


def project_backward(
    x: Tensor,
    weight: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    rows: Tensor,
    grad_qk: Tensor,
    grad_wx: Tensor,
    grad_trace: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the projection, of w_e and of w_r."""
    grad_x = grad_qk @ weight
    grad_e, grad_r = landmarks.landmark_weights_backward(x, rows, w_e, w_r, grad_wx, grad_trace, grad_x)
    return grad_x, grad_qk.mT @ x, grad_e, grad_r


def pack(w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    """wx of weights that do not depend on the data, and the traces."""
    return landmarks.packed_weights(w_e, w_r)


def _fake_pack(w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    heads, p, rank = w_e.shape
    return floats(w_e, 1, heads, 2, p, stored_rank(rank)), floats(w_e, heads)


def pack_backward(grad_wx: Tensor, w_e: Tensor, w_r: Tensor, grad_trace: Tensor | None) -> tuple[Tensor, Tensor]:
    return landmarks.finish_weights(grad_wx, w_e, w_r, grad_trace)


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
    """wx, from itself or from (x, rows, w_e, w_r), and whether it depends on the data."""
    if len(origin) == 1:
        return origin[0], False
    x, rows, w_e, w_r = origin
    return landmarks.landmark_weights(x, rows, w_e, w_r, torch.float32 if exact else x.dtype)[0], True


def gradient_of_weights(qk: Tensor, origin: list[Tensor], heads: int, stored: int, exact: bool) -> Tensor:
    """Unwritten, in the shape and dtype of wx."""
    depends = len(origin) > 1
    shape = (origin[1].shape[0] if depends else 1, heads, 2, qk.shape[1] // (2 * heads), stored)
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
    heads, _, p = wx.shape[1:4]
    scores, energy = _fake_score(qk, wx, bias, None, tables, single, rank, whole)
    return scores, energy, floats(qk, tables[4].shape[0], heads, 2, p), floats(qk, tables[0].shape[0], heads, 2, p)


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
    grad_e, grad_r = landmarks.finish_weights(parts, w_e, w_r, None)
    grad_decay = floats(qk, w_e.shape[0]) if log_decay is None else decay_parts.sum((0, 2))
    return grad_x, grad_qk.mT @ x, column_sum(bias_parts, qk.dtype), grad_e, grad_r, grad_decay


def _fake_growing_score_backward(x: Tensor, weight: Tensor, w_e: Tensor, w_r: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    like = [torch.empty_like(t) for t in (x, weight, w_e, w_r)]
    return like[0], like[1], x.new_empty(weight.shape[0]), like[2], like[3], floats(x, w_e.shape[0])


def decode(
    qk: Tensor,
    query_sum: Tensor,
    key_sum: Tensor,
    weight: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of one token each, and the state after it; it has no way back."""
    return decoding.decode(qk, query_sum, key_sum, weight, w_e, w_r, log_decay)


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


COMPACT = Operator(compact, _fake_compact)
MOVE = Operator(move, lambda x, to, back: x.new_empty(x.shape))
PROJECT = Operator(project, _fake_project)
PROJECT_BACKWARD = Operator(
    project_backward,
    lambda x, weight, w_e, w_r, *rest: tuple(torch.empty_like(t) for t in (x, weight, w_e, w_r)),
)
PACK = Operator(pack, _fake_pack)
PACK_BACKWARD = Operator(
    pack_backward, lambda grad_wx, w_e, w_r, grad_trace: (torch.empty_like(w_e), torch.empty_like(w_r))
)
SCORE = Operator(score, _fake_score)
SCORE_BACKWARD = Operator(score_backward, _fake_score_backward)
RUNNING_SCORE = Operator(running_score, _fake_running_score)
RUNNING_SCORE_BACKWARD = Operator(running_score_backward, _fake_running_score_backward)
GROWING_SCORE = Operator(growing_score, _fake_growing_score)
GROWING_SCORE_BACKWARD = Operator(growing_score_backward, _fake_growing_score_backward)
DECODE = Operator(decode, _fake_decode)
COMBINE = Operator(combine, _fake_combine)
COMBINE_BACKWARD = Operator(combine_backward, _fake_combine_backward)
MEASURE = Operator(measure, _fake_measure)
MEASURE_BACKWARD = Operator(measure_backward, _fake_measure_backward)
