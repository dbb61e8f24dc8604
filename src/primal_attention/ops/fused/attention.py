"""The layer on fused kernels: where the tokens lie, and which nodes they pass through.

    Project   x → q, k and the data-dependent weights W_{·|X}       keeps x
    Score     q, k, W_{·|X} → scores, energies                       keeps q, k; rebuilds W_{·|X} from x
    Combine   scores → y through the product of both output maps     keeps the scores
    Measure   energies → J                                           keeps the energies

or, where the rank is large against the head's width, instead of Score and Combine

    Mix       q, k, W_{·|X} → heads' outputs, energies               keeps q, k; rebuilds W_{·|X}, or half of it, from x
    Output    heads' outputs → y                                     keeps the heads' outputs

Nothing of size N is stored twice, and no normalised row is stored at all.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import sequences
from ..kernels.sequences import Sequences
from ..layer import Attended, Energies, Objective, Weights
from ..modes import Mode, State
from ..reference import RunningState, Scores
from ..sampling import landmark_indices
from . import operators as ops
from .cast import cast_weights
from .heads import Heads, held
from .nodes import Measure, Move, Pack, through
from .recorded import replayed, worthwhile

if TYPE_CHECKING:
    from ...parallel.context import Stretch


def fused_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    need_scores: bool = False,
    need_state: bool = False,
    stretch: Stretch | None = None,
) -> Attended:
    """The layer on the kernels; the arguments of `ops.primal.attend`.

    stretch: where these tokens stand if other ranks hold the rest of their sequences.
    """
    plain = valid is None and cu_seqlens is None and state is None and shift is None and stretch is None
    if plain and not (dropout or need_scores or need_state or torch.compiler.is_compiling()) and worthwhile(x):
        casts = torch.is_autocast_enabled("cuda")
        cast_to = torch.get_autocast_dtype("cuda") if casts else x.dtype
        with torch.autocast("cuda", enabled=False) if casts else nullcontext():
            replay = replayed(fused_attention, x, weights, mode, decay, objective, cast_to)
        if replay is not None:
            return replay
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            return fused_attention(
                x.to(dtype), cast_weights(weights, dtype), mode, valid=valid, cu_seqlens=cu_seqlens, decay=decay,
                state=state, shift=shift, dropout=dropout, objective=objective, need_scores=need_scores,
                need_state=need_state, stretch=stretch,
            )  # fmt: skip
    if isinstance(state, RunningState) and x.shape[1] == 1 and valid is None and not (need_scores or objective):
        return _decode_one(x, weights, mode, decay, state)
    rank, whole = weights.w_e.shape[-1], valid is None
    flat, seqs, rows, order = _lay_out(x, mode, valid, cu_seqlens, shift)
    tokens = x.shape[1] if cu_seqlens is None and valid is None else seqs.lengths
    measured, scored = objective is not None, bool(dropout) or need_scores
    heads = Heads.of(weights, mode, list(seqs[:-1]), seqs.single, whole, measured, scored)
    exact = objective is not None and objective.trace == "projections"
    log_decay = None if decay is None else decay.float().log()
    after = None
    if stretch is not None:
        found, energy, wx, trace = _on_a_stretch(x, flat, seqs, heads, mode, decay, log_decay, stretch, exact)
        energy = stretch.sum(energy) if measured else energy
        tokens = stretch.total.expand(x.shape[0]).contiguous()
    elif mode.causal and mode.data_dependent:
        grid = landmark_indices(_given(mode.max_length), mode.landmarks, x.device)
        found, energy = heads.grow(flat, log_decay, rows, grid)
        packed, trace = through(Pack, "pack", weights.w_e, weights.w_r)
        wx = [packed]
    elif mode.data_dependent:
        # Neighbours that move towards each other may meet.
        shortest = x.shape[1] if valid is None and cu_seqlens is None and shift is None else 0
        qk, wx, trace = heads.project(flat, rows, exact, shortest)
        found, energy = heads.attend(qk, wx, [t.detach() for t in (flat, rows, weights.w_e, weights.w_r)])
    else:
        qk = F.linear(flat, weights.qk_weight, held(weights.qk_bias))
        packed, trace = through(Pack, "pack", weights.w_e, weights.w_r)
        wx = [packed]
        if mode.causal:
            past = state if isinstance(state, RunningState) else None
            initial = None if past is None else torch.stack([past.query_sum, past.key_sum], dim=2).float()
            found, energy, final = heads.run(qk, packed, log_decay, initial)
            after = _running_state(final, tokens, decay, past) if need_state else None
        else:
            found, energy = heads.attend(qk, wx, [])
    y = heads.output(found, dropout).view(x.shape)
    if order is not None:
        y = order.back(y)
    return Attended(
        y,
        _measure(energy, trace, wx, tokens, rank, objective),
        _by_head(found, x, order, rank) if need_scores else None,
        after,
    )


def _on_a_stretch(
    x: Tensor,
    flat: Tensor,
    seqs: Sequences,
    heads: Heads,
    mode: Mode,
    decay: Tensor | None,
    log_decay: Tensor | None,
    stretch: Stretch,
    exact: bool,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Scores or outputs, energies, projection weights and traces where other ranks hold the rest of the sequences.

    The kernels are the same: the landmarks' rows, or the sums before the first token, come from the other ranks.
    """
    weights, batch, d = heads.weights, x.shape[0], x.shape[-1]
    if mode.data_dependent and mode.causal:
        grid = landmark_indices(_given(mode.max_length), mode.landmarks, x.device)
        # The rows of all ranks stand behind this rank's own, where the tables see only what the landmarks point at.
        both = torch.cat([flat, stretch.rows(x, grid[None]).view(-1, d)])
        reached = (grid < stretch.total[:, None]).expand(batch, -1)
        place = torch.arange(len(flat), len(both), device=x.device).view(batch, -1)
        tables = list(seqs._replace(starts=seqs.starts - stretch.before)[:-1])  # a token's place is its row − start
        beyond = heads._replace(tables=tables, whole=False)
        scores, energy = beyond.grow(both, log_decay, torch.where(reached, place, -1), grid)
        wx, trace = through(Pack, "pack", weights.w_e, weights.w_r)
        return scores[: len(flat)], energy, [wx], trace
    qk = F.linear(flat, weights.qk_weight, held(weights.qk_bias))
    if mode.data_dependent:
        rows = stretch.landmarks(x, mode.landmarks).view(-1, d)
        place = torch.arange(len(rows), device=x.device).view(batch, -1)
        _, sides, trace = heads.project(rows, place, exact, mode.landmarks, biased=False)
        origin = [t.detach() for t in (rows, place, weights.w_e, weights.w_r)]
        return *heads.attend(qk, sides, origin), sides, trace
    wx, trace = through(Pack, "pack", weights.w_e, weights.w_r)
    if not mode.causal:
        return *heads.attend(qk, [wx], []), [wx], trace
    q, k = qk.view(batch, -1, 2, mode.heads, d // mode.heads).transpose(1, 3).unbind(2)  # (B, H, N, p)
    valid = None if heads.whole else torch.arange(x.shape[1], device=x.device) < seqs.lengths[:, None]
    past = stretch.past(q, k, decay, valid, weights.qk_bias)
    initial = torch.stack([past.query_sum, past.key_sum], dim=2).float()
    found, energy, _ = heads.run(qk, wx, log_decay, initial)
    return found, energy, [wx], trace


def _given(length: int | None) -> int:
    assert length is not None, "the causal data-dependent mode has a max_length"
    return length


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
    energy: Tensor, trace: Tensor, wx: list[Tensor], tokens: Tensor | int, rank: int, objective: Objective | None
) -> Tensor | None:
    if objective is None:
        return None
    if objective.trace == "weights":
        lengths, length = (tokens, 0) if isinstance(tokens, Tensor) else (None, tokens)
        summed = objective.form == "sum"
        return through(Measure, "measure", energy, objective.sqrt_lambda, trace, lengths, length, summed)  # type: ignore[no-any-return]
    energies = Energies(energy[:, :, 0, :rank], energy[:, :, 1, :rank], tokens)
    # In one tensor both sides, or each in its own.
    e, r = (side for part in wx for side in part[..., :rank].unbind(2))
    return objective.of(energies, (e, r))


class Order(NamedTuple):
    """How valid tokens were moved to the front of their rows."""

    source: Tensor  # (B, N) the token that came to each row
    place: Tensor  # (B, N) the row of each token

    def front(self, x: Tensor) -> Tensor:
        return through(Move, "move", x, self.source, self.place)  # type: ignore[no-any-return]

    def back(self, x: Tensor) -> Tensor:
        return through(Move, "move", x, self.place, self.source)  # type: ignore[no-any-return]


def _lay_out(
    x: Tensor, mode: Mode, valid: Tensor | None, cu_seqlens: Tensor | None, shift: Tensor | None
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
    elif cu_seqlens is None and valid is None and shift is None:
        rows = sequences.uniform_landmarks(x.shape[0], x.shape[1], mode.landmarks, x.device)
    else:
        rows = sequences.landmark_table(seqs, mode.landmarks, shift)
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
