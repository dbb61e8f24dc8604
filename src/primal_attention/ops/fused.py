"""The layer on fused kernels: a few autograd nodes, each of which keeps only what its way back needs.

    Project   x → q, k and the data-dependent weights W_{·|X}       keeps x
    Score     q, k, W_{·|X} → scores, energies                       keeps q, k; rebuilds W_{·|X} from x
    Combine   scores → y through the product of both output maps     keeps the scores
    Measure   energies → J                                           keeps the energies

Nothing of size N is stored twice, and no normalised row is stored at all.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import library as ops
from .kernels import sequences
from .kernels.fold import foldable
from .kernels.sequences import Sequences
from .layer import Attended, Energies, Objective, Weights
from .modes import Mode, State
from .once import once
from .recorded import replayed, worthwhile
from .reference import RunningState, Scores
from .sampling import landmark_indices

if TYPE_CHECKING:
    from ..parallel.context import Stretch

Gradients = tuple[Tensor | None, ...]


class Node(torch.autograd.Function):
    """An operator with its way back: `remember` keeps what `backward` needs."""

    operator: ops.Operator

    def __init_subclass__(cls) -> None:
        backward, run, remember = cls.backward, cls.operator.run, cls.remember

        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            remember(ctx, args, output)
            return output

        def as_structured(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            """A registered operator wants a list of nothing where a list came in."""
            lists = getattr(ctx, "lists", {})
            return tuple([None] * lists[i] if i in lists else g for i, g in enumerate(backward(ctx, *grads)))

        cls.operator.registered.register_autograd(as_structured, setup_context=remember)
        # Not `setup_context` here: torch would look up the signature of `forward` anew at every call.
        cls.forward = staticmethod(forward)  # type: ignore[method-assign]
        cls.backward = staticmethod(once(backward))  # type: ignore[assignment]

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise NotImplementedError


def through(node: type[Node], name: str, *args: Any) -> Any:
    """Apply a node: itself in eager mode, by its registered name where the compiler looks on."""
    return getattr(torch.ops.primal, name)(*args) if torch.compiler.is_compiling() else node.apply(*args)


class Move(Node):
    """x (B, N, d) → its valid rows at the front, or at their places again: each is the other's way back."""

    operator = ops.MOVE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        to, back = ctx.saved_tensors
        return ops.MOVE(grad, back, to), None, None


class Project(Node):
    """(x, W_qk, b, W_e, W_r) → (qk, wx, traces). The bias' gradient comes from `Score`, which has it at hand."""

    operator = ops.PROJECT

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, w_e, w_r, rows = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_e, w_r, rows)
        ctx.heads = w_e.shape[0]

    @staticmethod
    def backward(ctx: Any, grad_qk: Tensor | None, grad_wx: Tensor | None, grad_trace: Tensor | None) -> Gradients:
        x, weight, w_e, w_r, rows = ctx.saved_tensors
        grad_qk = x.new_zeros(x.shape[0], weight.shape[0]) if grad_qk is None else grad_qk
        if grad_wx is None:
            stored = ops.stored_rank(w_e.shape[2])
            shape = (rows.shape[0], ctx.heads, 2, x.shape[1] // ctx.heads, stored)
            grad_wx = x.new_zeros(shape, dtype=torch.float32)
        grad_x, grad_weight, grad_e, grad_r = ops.PROJECT_BACKWARD(
            x, weight, w_e, w_r, rows, grad_qk.contiguous(), grad_wx.contiguous(), _dense(grad_trace)
        )
        return grad_x, grad_weight, None, grad_e, grad_r, None


class Pack(Node):
    """(W_e, W_r) → (wx, traces) where the weights do not depend on the data."""

    operator = ops.PACK

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.shape = output[0].shape

    @staticmethod
    def backward(ctx: Any, grad_wx: Tensor | None, grad_trace: Tensor | None) -> Gradients:
        w_e, w_r = ctx.saved_tensors
        grad_wx = w_e.new_zeros(ctx.shape, dtype=torch.float32) if grad_wx is None else grad_wx.contiguous()
        return ops.PACK_BACKWARD(grad_wx, w_e, w_r, _dense(grad_trace))  # type: ignore[no-any-return]


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


def _present(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients that nobody asked for, as zeros."""
    if grad_scores is None:
        grad_scores = like.new_zeros(ctx.shapes[0])
    if grad_energy is None:
        grad_energy = like.new_zeros(ctx.shapes[1], dtype=torch.float32)
    return grad_scores.contiguous(), grad_energy.contiguous()


def _spent() -> bool:
    """Whether this backward pass is the graph's last, so that what was kept for it may be written over."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and not keeps()


class Score(Node):
    """(qk, wx, b) → (scores, energies). b is the projection's bias: it enters for its gradient alone."""

    operator = ops.SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        qk, wx, _, origin, tables, ctx.single, ctx.rank, ctx.whole = inputs
        ctx.set_materialize_grads(False)
        # W_{·|X} is as large as a quarter of x when sequences are short: keep where it came from instead.
        ctx.save_for_backward(qk, *(origin or [wx]), *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.origins = len(origin) or 1
        ctx.lists = {3: len(origin), 4: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None) -> Gradients:
        qk, *rest = ctx.saved_tensors
        origin, tables = list(rest[: ctx.origins]), list(rest[ctx.origins :])
        grads = _present(ctx, grad_scores, grad_energy, qk)
        grad_qk, grad_wx, grad_bias = ops.SCORE_BACKWARD(
            qk, origin, *grads, tables, ctx.single, ctx.rank, ctx.whole, spend=_spent()
        )
        return grad_qk, grad_wx, grad_bias if ctx.needs_input_grad[2] else None, None, None, None, None, None


class RunningScore(Node):
    """(qk, wx, b, log γ, initial sums) → (scores, energies, carries, final sums) of the causal running sums."""

    operator = ops.RUNNING_SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        qk, wx, _, log_decay, _, tables, ctx.single, ctx.rank, ctx.whole = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qk, wx, log_decay, output[2], *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.lists = {5: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, *_: Any) -> Gradients:
        qk, wx, log_decay, carries, *tables = ctx.saved_tensors
        grads = _present(ctx, grad_scores, grad_energy, qk)
        grad_qk, grad_wx, grad_bias, grad_decay = ops.RUNNING_SCORE_BACKWARD(
            qk, wx, log_decay, carries, *grads, list(tables), ctx.single, ctx.rank, ctx.whole, spend=_spent()
        )
        grad_bias = grad_bias if ctx.needs_input_grad[2] else None
        grad_initial = _of_initial(grad_qk, log_decay, wx.shape, tables) if ctx.needs_input_grad[4] else None
        grad_decay = None if log_decay is None else grad_decay
        return grad_qk, grad_wx, grad_bias, grad_decay, grad_initial, None, None, None, None


def _of_initial(grad_qk: Tensor, log_decay: Tensor | None, shape: torch.Size, tables: list[Tensor]) -> Tensor:
    """The sums before the first token enter through it alone, s_0 = γ·s + z_0, so theirs is γ times its gradient."""
    starts, lengths = tables[:2]
    first = grad_qk[starts.clamp(max=len(grad_qk) - 1)].float().view(len(starts), 2, shape[1], shape[3])
    first = first.transpose(1, 2) * (lengths > 0)[:, None, None, None]  # (B, H, 2, p)
    return first if log_decay is None else first * log_decay.exp()[:, None, None]


class GrowingScore(Node):
    """(x, W_qk, b, W_e, W_r, log γ) → (scores, energies, qk) of the causal data-dependent mode."""

    operator = ops.GROWING_SCORE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, w_e, w_r, log_decay, rows, grid, tables, ctx.single, ctx.whole = inputs
        scores, _, qk = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *tables)
        ctx.shapes = [t.shape for t in output]
        ctx.lists = {8: len(tables)}

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor | None, grad_energy: Tensor | None, _: Any) -> Gradients:
        x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *tables = ctx.saved_tensors
        grads = _present(ctx, grad_scores, grad_energy, qk)
        grad_x, grad_weight, grad_bias, grad_e, grad_r, grad_decay = ops.GROWING_SCORE_BACKWARD(
            x, weight, w_e, w_r, log_decay, rows, grid, qk, scores, *grads, list(tables), ctx.single, ctx.whole
        )
        grad_bias = grad_bias if ctx.needs_input_grad[2] else None
        grad_decay = None if log_decay is None else grad_decay
        return grad_x, grad_weight, grad_bias, grad_e, grad_r, grad_decay, None, None, None, None, None


class Combine(Node):
    """scores (rows, H, 2, S) → y through the product of both output maps; nothing stands between the two."""

    operator = ops.COMBINE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, score_weight, score_bias, out_weight, out_bias = inputs
        ctx.save_for_backward(scores, score_weight, score_bias, out_weight)
        ctx.biases = (score_bias is not None, out_bias is not None)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Gradients:
        grads = ops.COMBINE_BACKWARD(grad_y.contiguous(), *ctx.saved_tensors)
        grad_scores, grad_score, grad_score_bias, grad_out, grad_out_bias = grads
        score_bias, out_bias = ctx.biases
        return (
            grad_scores,
            grad_score,
            grad_score_bias if score_bias else None,
            grad_out,
            grad_out_bias if out_bias else None,
        )


class Measure(Node):
    """(energies, √Λ, traces) → J."""

    operator = ops.MEASURE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        energy, sqrt_lambda, _, lengths, ctx.length, ctx.summed = inputs
        ctx.save_for_backward(energy, sqrt_lambda, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        energy, sqrt_lambda, lengths = ctx.saved_tensors
        grads = ops.MEASURE_BACKWARD(grad.contiguous(), energy, sqrt_lambda, lengths, ctx.length, ctx.summed)
        return *grads, None, None, None


def combine(scores: Tensor, weights: Weights, rank: int) -> Tensor:
    """y = W_out concat_h(W_o [e; r] + b_o) + b_out. scores: (rows, H, 2, S) → (rows, d)."""
    rows, heads, _, stored = scores.shape
    _, _, _, _, score_weight, score_bias, out_weight, out_bias = weights
    p = score_weight.shape[0]
    if foldable(heads, p, rank):
        return through(Combine, "combine", scores, score_weight, score_bias, out_weight, out_bias)  # type: ignore[no-any-return]
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
    stretch: Stretch | None = None,
) -> Attended:
    """The layer on the kernels; the arguments of `ops.primal.attend`.

    stretch: where these tokens stand if other ranks hold the rest of their sequences.
    """
    plain = valid is None and cu_seqlens is None and state is None and stretch is None
    if plain and not (dropout or need_scores or need_state or torch.compiler.is_compiling()) and worthwhile(x):
        casts = torch.is_autocast_enabled("cuda")
        cast_to = torch.get_autocast_dtype("cuda") if casts else x.dtype
        with torch.autocast("cuda", enabled=False) if casts else nullcontext():
            found = replayed(fused_attention, x, weights, mode, decay, objective, cast_to)
        if found is not None:
            return found
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            cast = Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
            return fused_attention(
                x.to(dtype), cast, mode, valid=valid, cu_seqlens=cu_seqlens, decay=decay, state=state,
                dropout=dropout, objective=objective, need_scores=need_scores, need_state=need_state, stretch=stretch,
            )  # fmt: skip
    if isinstance(state, RunningState) and x.shape[1] == 1 and valid is None and not (need_scores or objective):
        return _decode_one(x, weights, mode, decay, state)
    rank, whole = weights.w_e.shape[-1], valid is None
    flat, seqs, rows, order = _lay_out(x, mode, valid, cu_seqlens)
    tokens = x.shape[1] if cu_seqlens is None and valid is None else seqs.lengths
    where = (list(seqs[:-1]), seqs.single, rank, whole)
    log_decay = None if decay is None else decay.float().log()
    after = None
    if stretch is not None:
        scores, energy, wx, trace = _on_a_stretch(x, flat, seqs, weights, mode, decay, log_decay, stretch, whole)
        energy, tokens = stretch.sum(energy), stretch.total.expand(x.shape[0]).contiguous()
    elif mode.causal and mode.data_dependent:
        grid = landmark_indices(_given(mode.max_length), mode.landmarks, x.device)
        scores, energy, _ = through(
            GrowingScore, "growing_score", flat, weights.qk_weight, weights.qk_bias, weights.w_e, weights.w_r,
            log_decay, rows, grid, list(seqs[:-1]), seqs.single, whole,
        )  # fmt: skip
        wx, trace = through(Pack, "pack", weights.w_e, weights.w_r)
    elif mode.data_dependent:
        qk, wx, trace = through(
            Project, "project", flat, weights.qk_weight, _held(weights.qk_bias), weights.w_e, weights.w_r, rows
        )
        origin = [t.detach() for t in (flat, rows, weights.w_e, weights.w_r)]
        scores, energy = through(Score, "score", qk, wx, weights.qk_bias, origin, *where)
    else:
        qk = F.linear(flat, weights.qk_weight, _held(weights.qk_bias))
        wx, trace = through(Pack, "pack", weights.w_e, weights.w_r)
        if mode.causal:
            past = state if isinstance(state, RunningState) else None
            initial = None if past is None else torch.stack([past.query_sum, past.key_sum], dim=2).float()
            scores, energy, _, final = through(
                RunningScore, "running_score", qk, wx, weights.qk_bias, log_decay, initial, *where
            )
            after = _running_state(final, tokens, decay, past) if need_state else None
        else:
            scores, energy = through(Score, "score", qk, wx, weights.qk_bias, [], *where)
    y = combine(_drop(scores, dropout, rank) if dropout else scores, weights, rank).view(x.shape)
    if order is not None:
        y = order.back(y)
    return Attended(
        y,
        _measure(energy, trace, wx, tokens, rank, objective),
        _by_head(scores, x, order, rank) if need_scores else None,
        after,
    )


def _on_a_stretch(
    x: Tensor,
    flat: Tensor,
    seqs: Sequences,
    weights: Weights,
    mode: Mode,
    decay: Tensor | None,
    log_decay: Tensor | None,
    stretch: Stretch,
    whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, energies, projection weights and traces where other ranks hold the rest of the sequences.

    The kernels are the same: the landmarks' rows, or the sums before the first token, come from the other ranks.
    """
    rank, batch, d = weights.w_e.shape[-1], x.shape[0], x.shape[-1]
    where = (list(seqs[:-1]), seqs.single, rank, whole)
    if mode.data_dependent and mode.causal:
        grid = landmark_indices(_given(mode.max_length), mode.landmarks, x.device)
        # The rows of all ranks stand behind this rank's own, where the tables see only what the landmarks point at.
        both = torch.cat([flat, stretch.rows(x, grid[None]).view(-1, d)])
        reached = (grid < stretch.total[:, None]).expand(batch, -1)
        place = torch.arange(len(flat), len(both), device=x.device).view(batch, -1)
        tables = list(seqs._replace(starts=seqs.starts - stretch.before)[:-1])  # a token's place is its row − start
        scores, energy, _ = through(
            GrowingScore, "growing_score", both, weights.qk_weight, weights.qk_bias, weights.w_e, weights.w_r,
            log_decay, torch.where(reached, place, -1), grid, tables, seqs.single, False,
        )  # fmt: skip
        return scores[: len(flat)], energy, *through(Pack, "pack", weights.w_e, weights.w_r)
    qk = F.linear(flat, weights.qk_weight, _held(weights.qk_bias))
    if mode.data_dependent:
        rows = stretch.landmarks(x, mode.landmarks).view(-1, d)
        place = torch.arange(len(rows), device=x.device).view(batch, -1)
        _, wx, trace = through(Project, "project", rows, weights.qk_weight, None, weights.w_e, weights.w_r, place)
        origin = [t.detach() for t in (rows, place, weights.w_e, weights.w_r)]
        return *through(Score, "score", qk, wx, weights.qk_bias, origin, *where), wx, trace
    wx, trace = through(Pack, "pack", weights.w_e, weights.w_r)
    if not mode.causal:
        return *through(Score, "score", qk, wx, weights.qk_bias, [], *where), wx, trace
    q, k = qk.view(batch, -1, 2, mode.heads, d // mode.heads).transpose(1, 3).unbind(2)  # (B, H, N, p)
    valid = None if whole else torch.arange(x.shape[1], device=x.device) < seqs.lengths[:, None]
    past = stretch.past(q, k, decay, valid, weights.qk_bias)
    initial = torch.stack([past.query_sum, past.key_sum], dim=2).float()
    scores, energy, *_ = through(RunningScore, "running_score", qk, wx, weights.qk_bias, log_decay, initial, *where)
    return scores, energy, wx, trace


def _given(length: int | None) -> int:
    assert length is not None, "the causal data-dependent mode has a max_length"
    return length


def _drop(scores: Tensor, dropout: float, rank: int) -> Tensor:
    """Dropout on the scores; the column of ones beyond them, which carries the bias and its gradient, stays."""
    dropped = F.dropout(scores, dropout)
    if scores.shape[3] > rank:
        dropped[:, 0, 0, rank] = 1.0
    return dropped


def _held(bias: Tensor | None) -> Tensor | None:
    """The bias without its gradient, which comes from the scores."""
    return None if bias is None else bias.detach()


def _decode_one(x: Tensor, weights: Weights, mode: Mode, decay: Tensor | None, state: RunningState) -> Attended:
    """One token of a stream: its projection, one launch, and the two output maps."""
    qk = F.linear(x[:, 0], weights.qk_weight, weights.qk_bias)
    log_decay = None if decay is None else decay.float().log()
    queries, keys, held, _ = state
    # A state may be a slice of a pass's sums.
    past = queries.contiguous(), keys.contiguous(), held.contiguous()
    scores, query_sum, key_sum, weight = ops.DECODE(qk, *past, weights.w_e, weights.w_r, log_decay)
    each = F.linear(scores.flatten(2), weights.score_weight, weights.score_bias)  # (B, H, p)
    y = F.linear(each.flatten(1), weights.out_weight, weights.out_bias)
    return Attended(y[:, None], state=RunningState(query_sum, key_sum, weight))


def _measure(
    energy: Tensor, trace: Tensor, wx: Tensor, tokens: Tensor | int, rank: int, objective: Objective | None
) -> Tensor | None:
    if objective is None:
        return None
    if objective.trace == "weights":
        lengths, length = (tokens, 0) if isinstance(tokens, Tensor) else (None, tokens)
        summed = objective.form == "sum"
        return through(Measure, "measure", energy, objective.sqrt_lambda, trace, lengths, length, summed)  # type: ignore[no-any-return]
    energies = Energies(energy[:, :, 0, :rank], energy[:, :, 1, :rank], tokens)
    return objective.of(energies, (wx[:, :, 0, :, :rank], wx[:, :, 1, :, :rank]))


class Order(NamedTuple):
    """How valid tokens were moved to the front of their rows."""

    source: Tensor  # (B, N) the token that came to each row
    place: Tensor  # (B, N) the row of each token

    def front(self, x: Tensor) -> Tensor:
        return through(Move, "move", x, self.source, self.place)  # type: ignore[no-any-return]

    def back(self, x: Tensor) -> Tensor:
        return through(Move, "move", x, self.place, self.source)  # type: ignore[no-any-return]


def _lay_out(
    x: Tensor, mode: Mode, valid: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Sequences, Tensor, Order | None]:
    """Rows (tokens, d), where the sequences lie in them, the landmarks' rows, and how valid tokens were moved up."""
    order = None
    if cu_seqlens is not None:
        seqs = sequences.packed(cu_seqlens, x.shape[0])
    elif valid is None:
        seqs = sequences.uniform(x.shape[0], x.shape[1], x.device)
    else:
        # The valid tokens move to the front of their row, in their order: padding becomes a tail that nobody computes.
        source, place, lengths, ends = ops.COMPACT(valid)
        order = Order(source, place)
        x = order.front(x)
        seqs = sequences.padded(lengths, ends, x.shape[1])
    if not mode.data_dependent:
        rows = seqs.starts
    elif mode.causal:
        grid = landmark_indices(_given(mode.max_length), mode.landmarks, x.device)
        rows = torch.where(grid < seqs.lengths[:, None], seqs.starts[:, None] + grid, -1)
    elif cu_seqlens is None and valid is None:
        rows = sequences.uniform_landmarks(x.shape[0], x.shape[1], mode.landmarks, x.device)
    else:
        rows = sequences.landmark_table(seqs, mode.landmarks)
    return x.reshape(-1, x.shape[-1]), seqs, rows, order


def _by_head(scores: Tensor, x: Tensor, order: Order | None, rank: int) -> Scores:
    """(rows, H, 2, S) → e, r of (B, H, N, s), or (H, total, s) when packed."""
    if order is not None:
        scores = order.back(scores.view(*x.shape[:2], -1)).view_as(scores)
    each = scores.view(*x.shape[:-1], *scores.shape[1:])[..., :rank].movedim(-3, -4)  # (…, H, N, 2, s)
    return Scores(each[..., 0, :], each[..., 1, :])


def _running_state(
    final: Tensor, tokens: Tensor | int, decay: Tensor | None, past: RunningState | None
) -> RunningState:
    """The sums after the last token, and their weight: Σ_j γ^j over the tokens."""
    if isinstance(tokens, int):  # made on the device: a copy from the host would break a CUDA graph
        tokens = torch.full((final.shape[0],), tokens, device=final.device)
    count = tokens.float()[:, None]  # (B, 1)
    before = torch.zeros_like(final[:, :, 0, 0]) if past is None else past.weight
    if decay is None:
        weight = before + count
    else:
        gamma = decay.float()[None]
        kept = gamma**count
        weight = before * kept + torch.where(gamma < 1, (1 - kept) / (1 - gamma).clamp(min=1e-30), count)
    return RunningState(final[:, :, 0].contiguous(), final[:, :, 1].contiguous(), weight)
