"""The layer on fused kernels: a few autograd nodes, each of which keeps only what its way back needs.

    Project   x → q, k and the data-dependent weights W_{·|X}       keeps x
    Score     q, k, W_{·|X} → scores, energies                       keeps q, k; rebuilds W_{·|X} from x
    Combine   scores → y through the product of both output maps     keeps the scores
    Measure   energies → J                                           keeps the energies

Nothing of size N is stored twice, and no normalised row is stored at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import sequences
from .kernels.fold import fold, foldable, unfold
from .kernels.landmarks import finish_weights, landmark_weights, landmark_weights_backward, packed_weights
from .kernels.objective import objective_backward, objective_forward
from .kernels.running import running_backward, running_forward
from .kernels.scores import scores_backward, scores_forward
from .kernels.segments import column_sum, segment_sum
from .kernels.sequences import Sequences
from .layer import Attended, Energies, Objective, Weights
from .modes import Mode, State
from .reference import RunningState, Scores

once = torch.autograd.function.once_differentiable


class Project(torch.autograd.Function):
    """(x, W_qk, b, W_e, W_r) → (qk, wx, traces). The bias' gradient comes from `Score`, which has it at hand."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w_e: Tensor, w_r: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_e, w_r, rows)
        return F.linear(x, weight, bias), *landmark_weights(x, rows, w_e, w_r)

    @staticmethod
    @once
    def backward(ctx: Any, grad_qk: Tensor, grad_wx: Tensor, grad_trace: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, w_e, w_r, rows = ctx.saved_tensors
        grad_x = grad_qk @ weight
        grad_e, grad_r = landmark_weights_backward(x, rows, w_e, w_r, grad_wx, grad_trace, grad_x)
        grad_weight = grad_qk.mT @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, grad_e, grad_r, None


class Pack(torch.autograd.Function):
    """(W_e, W_r) → (wx, traces) where the weights do not depend on the data."""

    @staticmethod
    def forward(ctx: Any, w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w_e, w_r)
        return packed_weights(w_e, w_r)

    @staticmethod
    @once
    def backward(ctx: Any, grad_wx: Tensor, grad_trace: Tensor | None) -> tuple[Tensor | None, ...]:
        w_e, w_r = ctx.saved_tensors
        return finish_weights(grad_wx, w_e, w_r, grad_trace)


class Score(torch.autograd.Function):
    """(qk, wx, b) → (scores, energies). b is the projection's bias: it enters for its gradient alone."""

    @staticmethod
    def forward(
        ctx: Any,
        qk: Tensor,
        wx: Tensor,
        bias: Tensor | None,
        origin: tuple[Tensor, ...],
        seqs: Sequences,
        rank: int,
        whole: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scores, parts = scores_forward(qk, wx, seqs, rank, whole)
        # W_{·|X} is as large as a quarter of x when sequences are short: keep where it came from instead.
        ctx.save_for_backward(qk, *(origin or (wx,)))
        ctx.seqs, ctx.rank, ctx.whole = seqs, rank, whole
        return scores, segment_sum(parts, seqs)

    @staticmethod
    @once
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None) -> tuple[Tensor | None, ...]:
        qk, *origin = ctx.saved_tensors
        wx = origin[0] if len(origin) == 1 else landmark_weights(*origin)[0]
        grad_scores, grad_energy = _present(grad_scores, grad_energy, qk, wx, ctx.seqs)
        grad_qk, parts, bias_parts = scores_backward(qk, wx, grad_scores, grad_energy, ctx.seqs, ctx.rank, ctx.whole)
        grad_wx = parts if len(origin) == 1 else segment_sum(parts, ctx.seqs)
        grad_bias = column_sum(bias_parts, qk.dtype) if ctx.needs_input_grad[2] else None
        return grad_qk, grad_wx, grad_bias, None, None, None, None


class RunningScore(torch.autograd.Function):
    """(qk, wx, log γ, b) → (scores, energies) of the causal running sums."""

    @staticmethod
    def forward(
        ctx: Any,
        qk: Tensor,
        wx: Tensor,
        log_decay: Tensor | None,
        bias: Tensor | None,
        seqs: Sequences,
        rank: int,
        whole: bool,
        initial: Tensor | None,
        final: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        scores, parts, carries = running_forward(qk, wx, log_decay, seqs, rank, whole, initial, final)
        ctx.save_for_backward(qk, wx, log_decay, carries)
        ctx.seqs, ctx.rank, ctx.whole = seqs, rank, whole
        return scores, segment_sum(parts, seqs)

    @staticmethod
    @once
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None) -> tuple[Tensor | None, ...]:
        qk, wx, log_decay, carries = ctx.saved_tensors
        grad_scores, grad_energy = _present(grad_scores, grad_energy, qk, wx, ctx.seqs)
        grad_qk, grad_wx, bias_parts, decay_parts = running_backward(
            qk, wx, log_decay, carries, grad_scores, grad_energy, ctx.seqs, ctx.rank, ctx.whole
        )
        grad_decay = None if log_decay is None else decay_parts.sum((0, 2))
        grad_bias = column_sum(bias_parts, qk.dtype) if ctx.needs_input_grad[3] else None
        return grad_qk, grad_wx, grad_decay, grad_bias, None, None, None, None, None


def _present(
    grad_scores: Tensor | None, grad_energy: Tensor | None, qk: Tensor, wx: Tensor, seqs: Sequences
) -> tuple[Tensor, Tensor]:
    """Gradients that nobody asked for as zeros."""
    _, heads, _, _, stored = wx.shape
    if grad_scores is None:
        grad_scores = qk.new_zeros(qk.shape[0], heads, 2, stored)
    if grad_energy is None:
        grad_energy = torch.zeros(seqs.starts.shape[0], heads, 2, stored, dtype=torch.float32, device=qk.device)
    return grad_scores.contiguous(), grad_energy.contiguous()


class Combine(torch.autograd.Function):
    """scores (rows, H, 2, S) → y through the product of both output maps; nothing stands between the two."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        score_weight: Tensor,
        score_bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
    ) -> Tensor:
        product, bias = fold(out_weight, out_bias, score_weight, score_bias)
        ctx.save_for_backward(scores, product, score_weight, score_bias, out_weight, out_bias)
        needs_bias = score_bias is not None or out_bias is not None
        return F.linear(scores.view(scores.shape[0], -1), product, bias if needs_bias else None)

    @staticmethod
    @once
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        scores, product, score_weight, score_bias, out_weight, out_bias = ctx.saved_tensors
        grad_scores = (grad_y @ product).view_as(scores)
        grad_product = _product_in_float32(grad_y.mT, scores.view(scores.shape[0], -1))
        rank = score_weight.shape[1] // 2
        ones = scores.shape[3] > rank  # the scores carry a column of ones
        grad_bias = grad_product[:, rank].contiguous() if ones else grad_y.sum(0, dtype=torch.float32)
        grad_out, grad_score, grad_score_bias = unfold(grad_product, grad_bias, out_weight, score_weight, score_bias)
        return (
            grad_scores,
            grad_score,
            None if score_bias is None else grad_score_bias,
            grad_out,
            None if out_bias is None else grad_bias.to(out_bias.dtype),
        )


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without rounding the sums back to 16 bits, where torch can."""
    if a.is_cuda and a.dtype != torch.float32:
        try:
            return torch.mm(a, b, out_dtype=torch.float32)
        except (TypeError, RuntimeError):  # torch before 2.8
            pass
    return (a @ b).float()


class Measure(torch.autograd.Function):
    """(energies, √Λ, traces) → J."""

    @staticmethod
    def forward(
        ctx: Any, energy: Tensor, sqrt_lambda: Tensor, trace: Tensor, tokens: Tensor | int, summed: bool
    ) -> Tensor:
        ctx.save_for_backward(energy, sqrt_lambda)
        ctx.tokens, ctx.summed = tokens, summed
        return objective_forward(energy, sqrt_lambda, trace, tokens, summed)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        energy, sqrt_lambda = ctx.saved_tensors
        return *objective_backward(grad.contiguous(), energy, sqrt_lambda, ctx.tokens, ctx.summed), None, None


def combine(scores: Tensor, weights: Weights, rank: int) -> Tensor:
    """y = W_out concat_h(W_o [e; r] + b_o) + b_out. scores: (rows, H, 2, S) → (rows, d)."""
    rows, heads, _, stored = scores.shape
    _, _, _, _, score_weight, score_bias, out_weight, out_bias = weights
    p = score_weight.shape[0]
    if foldable(heads, p, rank):
        return Combine.apply(scores, score_weight, score_bias, out_weight, out_bias)  # type: ignore[no-any-return]
    wide = F.pad(score_weight.view(p, 2, rank), (0, stored - rank)).view(p, 2 * stored)
    each = F.linear(scores.view(rows * heads, 2 * stored), wide, score_bias)
    return F.linear(each.view(rows, heads * p), out_weight, out_bias)


def fused_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    need_scores: bool = False,
    need_state: bool = False,
) -> Attended:
    """The layer on the kernels; the arguments of `ops.primal.attend`."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            cast = Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
            return fused_attention(
                x.to(dtype), cast, mode, valid=valid, cu_seqlens=cu_seqlens, decay=decay, state=state,
                dropout=dropout, objective=objective, need_scores=need_scores, need_state=need_state,
            )  # fmt: skip
    rank, whole = weights.w_e.shape[-1], valid is None
    flat, seqs, rows, order = _lay_out(x, mode, valid, cu_seqlens)
    tokens = x.shape[1] if cu_seqlens is None and valid is None else seqs.lengths
    after = None
    if mode.data_dependent:
        qk, wx, trace = Project.apply(flat, weights.qk_weight, weights.qk_bias, weights.w_e, weights.w_r, rows)
        origin = tuple(t.detach() for t in (flat, rows, weights.w_e, weights.w_r))
        scores, energy = Score.apply(qk, wx, weights.qk_bias, origin, seqs, rank, whole)
    else:
        bias = None if weights.qk_bias is None else weights.qk_bias.detach()  # its gradient comes from the scores
        qk = F.linear(flat, weights.qk_weight, bias)
        wx, trace = Pack.apply(weights.w_e, weights.w_r)
        if mode.causal:
            log_decay = None if decay is None else decay.float().log()
            past = state if isinstance(state, RunningState) else None
            initial = None if past is None else torch.stack([past.query_sum, past.key_sum], dim=2)
            final = qk.new_empty(seqs.starts.shape[0], *wx.shape[1:4], dtype=torch.float32) if need_state else None
            scores, energy = RunningScore.apply(
                qk, wx, log_decay, weights.qk_bias, seqs, rank, whole, initial, final
            )  # fmt: skip
            after = None if final is None else _running_state(final, tokens, decay, past)
        else:
            scores, energy = Score.apply(qk, wx, weights.qk_bias, (), seqs, rank, whole)
    y = combine(F.dropout(scores, dropout) if dropout else scores, weights, rank).view(x.shape)
    if order is not None:
        y = _scatter_back(y, order, valid)
    return Attended(
        y,
        _measure(energy, trace, wx, tokens, rank, objective),
        _by_head(scores, x, order, rank) if need_scores else None,
        after,
    )


def _measure(
    energy: Tensor, trace: Tensor, wx: Tensor, tokens: Tensor | int, rank: int, objective: Objective | None
) -> Tensor | None:
    if objective is None:
        return None
    if objective.trace == "weights":
        return Measure.apply(energy, objective.sqrt_lambda, trace, tokens, objective.form == "sum")  # type: ignore[no-any-return]
    energies = Energies(energy[:, :, 0, :rank], energy[:, :, 1, :rank], tokens)
    return objective.of(energies, (wx[:, :, 0, :, :rank], wx[:, :, 1, :, :rank]))


def _lay_out(
    x: Tensor, mode: Mode, valid: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Sequences, Tensor, Tensor | None]:
    """Rows (tokens, d), where the sequences lie in them, the landmarks' rows, and how valid tokens were moved up."""
    order = None
    if cu_seqlens is not None:
        seqs = sequences.packed(cu_seqlens, x.shape[0])
    elif valid is None:
        seqs = sequences.uniform(x.shape[0], x.shape[1], x.device)
    else:
        # The valid tokens move to the front of their row, in their order: padding becomes a tail that nobody computes.
        order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        x = x.masked_fill(~valid[..., None], 0.0).gather(1, order[..., None].expand_as(x))
        seqs = sequences.padded(valid.sum(dim=1), x.shape[1])
    if not mode.data_dependent or mode.causal:
        rows = seqs.starts
    elif cu_seqlens is None and valid is None:
        rows = sequences.uniform_landmarks(x.shape[0], x.shape[1], mode.landmarks, x.device)
    else:
        rows = sequences.landmark_table(seqs, mode.landmarks)
    return x.reshape(-1, x.shape[-1]), seqs, rows, order


def _scatter_back(y: Tensor, order: Tensor, valid: Tensor | None) -> Tensor:
    assert valid is not None
    placed = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
    return placed.masked_fill(~valid[..., None], 0.0)


def _by_head(scores: Tensor, x: Tensor, order: Tensor | None, rank: int) -> Scores:
    """(rows, H, 2, S) → e, r of (B, H, N, s), or (H, total, s) when packed."""
    if order is not None:
        spread = scores.view(*x.shape[:2], -1)
        scores = torch.zeros_like(spread).scatter(1, order[..., None].expand_as(spread), spread).view_as(scores)
    each = scores.view(*x.shape[:-1], *scores.shape[1:])[..., :rank].movedim(-3, -4)  # (…, H, N, 2, s)
    return Scores(each[..., 0, :], each[..., 1, :])


def _running_state(
    final: Tensor, tokens: Tensor | int, decay: Tensor | None, past: RunningState | None
) -> RunningState:
    """The sums after the last token, and their weight: Σ_j γ^j over the tokens."""
    count = torch.as_tensor(tokens, device=final.device).expand(final.shape[0]).float()[:, None]  # (B, 1)
    before = torch.zeros_like(final[:, :, 0, 0]) if past is None else past.weight
    if decay is None:
        weight = before + count
    else:
        gamma = decay.float()[None]
        kept = gamma**count
        weight = before * kept + torch.where(gamma < 1, (1 - kept) / (1 - gamma).clamp(min=1e-30), count)
    return RunningState(final[:, :, 0], final[:, :, 1], weight)
