"""The layer in few passes over memory, for CPUs: one autograd node whose way back is written out.

The tokens go through in blocks that stay in the cache, from x to y and, on the way back, from dy to dx:

    z = W_qk x + b,    e = (z_q W_{e|X}) / ‖z_q‖,    r = (z_k W_{r|X}) / ‖z_k‖,    y = W_out concat_h(W_o [e; r])

No normalised row is ever stored, since the division commutes with the projection. What stays for the way back is x, z
(its running sums in the causal mode), the scores and 1/‖z‖; the projection weights are built again from x. With g = de,

    dz = (g W_{e|X}ᵀ − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X} = zᵀ (g / ‖z‖).

All between the large products is computed in at least float32. The gradients cannot be differentiated once more: that
takes the equations (backend="reference").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import reference as eq
from .feature_maps import EPS
from .layer import Attended, Objective, Weights
from .lean_output import add_column_sums, add_product, linear, output_map
from .lean_scan import backward_factors, decay_factors, scan_
from .modes import Mode, State
from .once import once
from .reference import RunningState, Scores
from .sampling import landmark_indices, ragged_landmark_indices, token_of_rank

BLOCK = 2**20  # numbers in z of a block: enough for fast products, few enough to stay in the cache
LANES = 8  # products run faster when the scores of a head and side fill whole vectors


class Block(NamedTuple):
    """Tokens n0…n1 of the sequences b0…b1, and where they stand among the rows of all tokens."""

    b0: int
    b1: int
    n0: int
    n1: int
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.b1 - self.b0, self.n1 - self.n0

    @property
    def sequences(self) -> slice:
        return slice(self.b0, self.b1)

    def of(self, per_token: Tensor) -> Tensor:
        """This block's part of a (B, N, …) tensor."""
        return per_token[self.b0 : self.b1, self.n0 : self.n1]


def most_rows(d: int) -> int:
    return max(BLOCK // (2 * d), 64)


def blocks(batch: int, length: int, d: int) -> Iterator[Block]:
    """Even pieces of one long sequence, or several short sequences at once: adjacent rows either way."""
    pieces = -(-length // most_rows(d))
    step = -(-length // pieces)
    group = most_rows(d) // length if pieces == 1 else 1
    for b0 in range(0, batch, group):
        b1 = min(b0 + group, batch)
        for n0 in range(0, length, step):
            n1 = min(n0 + step, length)
            yield Block(b0, b1, n0, n1, slice(b0 * length + n0, (b1 - 1) * length + n1))


@dataclass(frozen=True)
class Plan:
    """What a pass is asked for, besides its tensors."""

    mode: Mode
    dropout: float = 0.0
    form: Literal["mean", "sum"] = "mean"
    trace: Literal["weights", "projections"] = "weights"
    scores: bool = False
    final: bool = False
    keep: bool = True  # there will be a way back


@lru_cache(maxsize=64)
def _even_places(length: int, count: int) -> Tensor:
    with torch.inference_mode(False):
        return landmark_indices(length, count)[None]


class Landmarks(NamedTuple):
    """f(X): the landmarks of each sequence among the rows of all tokens."""

    places: Tensor  # (B, n)
    empty: Tensor | None = None  # (B,): sequences that have none; their places mean nothing

    @classmethod
    def of(cls, x: Tensor, valid: Tensor | None, count: int) -> Landmarks:
        batch, length, _ = x.shape
        if valid is None and batch == 1 and type(x) is Tensor and x.device.type == "cpu":
            return cls(_even_places(length, count))
        offset = torch.arange(batch, device=x.device)[:, None] * length
        if valid is None:
            return cls(landmark_indices(length, count, x.device) + offset)
        lengths = valid.sum(dim=1)
        return cls(token_of_rank(valid, ragged_landmark_indices(lengths, count)) + offset, lengths == 0)

    def rows(self, x: Tensor, heads: int) -> Tensor:
        """f(X_h) of all sequences side by side: (H, n, B·p), wide."""
        rows = x.view(-1, x.shape[2]).index_select(0, self.places.view(-1)).to(eq.wide(x.dtype))
        rows = rows.view(*self.places.shape, heads, x.shape[2] // heads)
        if self.empty is not None:
            rows.masked_fill_(self.empty[:, None, None, None], 0.0)
        return rows.permute(2, 1, 0, 3).flatten(2)

    def add_into(self, grad_x: Tensor, grad: Tensor) -> None:
        """Bring the gradient of `rows` to x."""
        batch, _, d = grad_x.shape
        heads, count, _ = grad.shape
        rows = grad.view(heads, count, batch, d // heads).permute(2, 1, 0, 3)
        if self.empty is not None:
            rows = rows.masked_fill(self.empty[:, None, None, None], 0.0)
        rows = rows.reshape(batch * count, d).to(grad_x.dtype)
        grad_x.view(-1, d).index_add_(0, self.places.view(-1), rows)


class Projections:
    """W_{e|X} and W_{r|X} of each sequence, or W_e and W_r themselves where they do not depend on the data; wide."""

    def __init__(self, x: Tensor, landmarks: Landmarks | None, w_e: Tensor, w_r: Tensor) -> None:
        heads, _, self.rank = w_e.shape
        batch = 1 if landmarks is None else x.shape[0]
        stored, wide = self.rank + -self.rank % LANES, eq.wide(x.dtype)
        # Transposed, and with rows of zeros beyond the rank.
        self.w_x = x.new_zeros(batch, 2, heads, stored, x.shape[2] // heads, dtype=wide)  # (B or 1, 2, H, S, p)
        self.landmarks = landmarks
        if landmarks is None:
            self.w_x[0, 0, :, : self.rank], self.w_x[0, 1, :, : self.rank] = w_e.mT, w_r.mT
            return
        self.rows = landmarks.rows(x, heads)
        self.w = torch.cat([w_e, w_r], dim=2).to(wide)  # (H, n, 2s)
        both = torch.bmm(self.w.mT, self.rows)  # (H, 2s, B·p)
        self.w_x[:, :, :, : self.rank] = both.view(heads, 2, self.rank, batch, self.w_x.shape[4]).permute(3, 1, 0, 2, 4)

    def of(self, block: Block) -> Tensor:
        return self.w_x if self.landmarks is None else self.w_x[block.sequences]

    def backward(self, grad: Tensor, grad_x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of W_e and W_r; those of the landmarks are added into grad_x. grad: (B or 1, 2, H, s, p)."""
        if self.landmarks is None:
            return grad[0, 0].mT, grad[0, 1].mT
        grad = grad.permute(2, 1, 3, 0, 4).flatten(3).flatten(1, 2)  # (H, 2s, B·p)
        if grad_x is not None:
            self.landmarks.add_into(grad_x, torch.bmm(self.w, grad))
        both = torch.bmm(self.rows, grad.mT)  # (H, n, 2s)
        return both[..., : self.rank], both[..., self.rank :]


def project(z: Tensor, w_x: Tensor, inverse: Tensor, scores: Tensor) -> None:
    """The scores of a block, and 1/‖z‖.

    z: (B, N, 2H, p), w_x: (B, 2, H, S, p), inverse: (B, N, 2H), scores: (B, N, H, 2, s); the last two are written.
    """
    b, n, heads, _, rank = scores.shape
    torch.linalg.vector_norm(z, dim=-1, out=inverse).clamp_(min=EPS).reciprocal_()
    raw = torch.bmm(_by_channel(z), w_x.flatten(0, 2).mT).view(b, 2, heads, n, -1)
    # The scaling brings the scores of a token together at the same time.
    raw = raw.permute(0, 3, 2, 1, 4)[..., :rank]
    torch.mul(raw, inverse.view(b, n, 2, heads, 1).transpose(2, 3), out=scores)


def project_backward(grad: Tensor, z: Tensor, w_x: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of z and of w_x, (B, 2, H, s, p), from that of the scores; all wide. Shapes as in `project`."""
    b, n, heads, _, rank = scores.shape
    along = (grad * scores).sum(-1).transpose(2, 3).reshape(b, n, 2 * heads)
    along.mul_(inverse).mul_(inverse)
    along.masked_fill_(inverse >= 1 / EPS, 0.0)  # where ‖z‖ is below its floor the divisor is a constant
    scaled = grad.new_empty(b, 2, heads, n, rank)
    torch.mul(grad.permute(0, 3, 2, 1, 4), inverse.view(b, n, 2, heads, 1).permute(0, 2, 3, 1, 4), out=scaled)
    scaled = scaled.view(-1, n, rank)
    grad_w_x = torch.bmm(scaled.mT, _by_channel(z)).view(b, 2, heads, rank, -1)
    through = torch.bmm(scaled, w_x[..., :rank, :].flatten(0, 2)).view(b, 2 * heads, n, -1).transpose(1, 2)
    return torch.addcmul(through, z, along[..., None], value=-1, out=torch.empty_like(z)), grad_w_x


def _by_channel(z: Tensor) -> Tensor:
    """(B, N, 2H, p) → (B·2H, N, p), without a copy where B = 1."""
    return z.transpose(1, 2).flatten(0, 1)


class Layer(torch.autograd.Function):
    """(x, γ, starting sums, √Λ, weights) → (y, J, scores, final sums); None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        valid: Tensor | None,
        places: Tensor | None,
        empty: Tensor | None,
        x: Tensor,
        decay: Tensor | None,
        start: Tensor | None,
        sqrt_lambda: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        weights = Weights(*parameters)  # type: ignore[arg-type]
        (batch, length, d), heads, rank = x.shape, plan.mode.heads, weights.w_e.shape[2]
        rows, wide = batch * length, eq.wide(x.dtype)
        landmarks = None if places is None else Landmarks(places, empty)
        projections = Projections(x, landmarks, weights.w_e, weights.w_r)
        out = output_map(weights, heads, rows)

        # Without a way back, every block uses the same few rows.
        kept = rows if plan.keep else min(rows, most_rows(d))
        z_all = x.new_empty(kept, 2 * d, dtype=wide if plan.mode.causal else x.dtype)
        inverse_all = x.new_empty(kept, 2 * heads, dtype=wide)
        scores_all = x.new_empty(rows if plan.scores else kept, heads, 2, rank)
        y = torch.empty_like(x)
        energy = None if sqrt_lambda is None else x.new_zeros(batch, heads, 2, rank, dtype=wide)
        final = x.new_empty(batch, 2 * heads, d // heads, dtype=wide) if plan.final else None
        dropped = torch.rand(rows, heads, 2, rank, device=x.device) < plan.dropout if plan.dropout else None
        factors = None if decay is None else decay_factors(decay, valid, batch, length, wide)
        carry = None
        for block in blocks(*x.shape):
            here = block.rows if plan.keep else slice(block.rows.stop - block.rows.start)
            gap = _gap(valid, block)
            z = linear(_rows(x, block, gap), weights.qk_weight, weights.qk_bias, z_all[here])
            if plan.mode.causal:
                if gap is not None:
                    z.masked_fill_(gap, 0.0)
                if block.n0 == 0:
                    carry = None if start is None else start[block.sequences]
                tokens = z.view(*block.shape, 2 * heads, -1)
                carry = scan_(tokens, None if factors is None else block.of(factors), carry)
                if final is not None:
                    final[block.sequences] = carry
            scores = scores_all[block.rows if plan.scores else here]
            project(*_grouped(block, z, projections, inverse_all[here], scores))
            if gap is not None:
                scores.masked_fill_(gap[..., None, None], 0.0)
            if energy is not None:
                energy[block.sequences].add_(scores.view(*block.shape, heads, 2, rank).to(wide).square().sum(1))
            y_b = y.view(rows, d)[block.rows]
            out.forward(_thinned(scores, dropped, block, plan.dropout).view(-1, heads * 2 * rank), y_b)
            if gap is not None:
                y_b.masked_fill_(gap, 0.0)
        j = None
        if energy is not None:
            assert sqrt_lambda is not None
            energy = energy.sum(2)  # Λ weighs e and r alike
            j = (energy * sqrt_lambda.to(wide).square()).sum((1, 2)).mul_(_scale(plan, valid, length, wide))
            j -= _trace(plan, projections.w_x, weights) / heads
        if plan.keep:
            ctx.plan = plan
            ctx.save_for_backward(
                valid, places, empty, x, decay, start, sqrt_lambda, energy, z_all, inverse_all, scores_all, dropped,
                *parameters,
            )  # fmt: skip
        return y, j, scores_all.view(batch, length, heads, 2, rank) if plan.scores else None, final

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        back = WayBack(ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[4:], *grads)
        order = list(blocks(*back.x.shape))
        for block in reversed(order) if back.plan.mode.causal else order:
            back.take(block)
        return None, None, None, None, *back.gradients()


class WayBack:
    """The gradients of a pass, gathered block by block; the causal mode goes from the last block to the first."""

    def __init__(
        self,
        plan: Plan,
        saved: tuple[Any, ...],
        needs: tuple[bool, ...],
        grad_y: Tensor | None,
        grad_j: Tensor | None,
        grad_scores: Tensor | None,
        grad_final: Tensor | None,
    ) -> None:
        self.plan, self.needs = plan, needs
        self.valid, places, empty, self.x, decay, self.start, self.sqrt_lambda, self.energy = saved[:8]
        self.z, self.inverse, self.scores, self.dropped = saved[8:12]
        self.weights = weights = Weights(*saved[12:])
        self.wide, self.heads = eq.wide(self.x.dtype), plan.mode.heads
        batch, length, _ = self.x.shape
        landmarks = None if places is None else Landmarks(places, empty)
        self.projections = Projections(self.x, landmarks, weights.w_e, weights.w_r)
        self.out = output_map(weights, self.heads, batch * length)
        self.factors = self.backwards = None
        if decay is not None:
            self.factors = decay_factors(decay, self.valid, batch, length, self.wide)
            self.backwards = backward_factors(self.factors)

        self.grad_y = None if grad_y is None else grad_y.contiguous()
        self.grad_j, self.grad_scores, self.grad_final = grad_j, grad_scores, grad_final
        if grad_j is not None:
            self.grad_energy = (grad_j * _scale(plan, self.valid, length, self.wide))[
                :, None, None
            ]  # of Λ-weighted energies
            twice_lambda = 2 * self.sqrt_lambda.to(self.wide).square() * self.grad_energy  # (B, H, s)
            # Laid out like the scores of a token: broadcasting over the sides would cost the inner loop its vectors.
            self.twice_lambda = twice_lambda[:, None, :, None].expand(-1, 1, -1, 2, -1).contiguous()
        self.carry: Tensor | None = None  # the gradient that the next block sends to this one

        need_x, self.need_decay, need_start, _, self.need_qk, self.need_qk_bias, *_ = needs
        self.learns_output = any(needs[8:])
        self.grad_x = torch.empty_like(self.x) if need_x else None
        self.grad_qk: Tensor | None = None
        self.grad_qk_bias: Tensor | None = None
        w_x = self.projections.w_x[..., : weights.w_e.shape[2], :]
        self.grad_w_x = torch.zeros_like(w_x, memory_format=torch.contiguous_format)
        self.grad_decay = None if decay is None else w_x.new_zeros(2 * self.heads)
        self.grad_start = torch.zeros_like(self.start) if need_start else None

    def take(self, block: Block) -> None:
        gap, z, scores = _gap(self.valid, block), self.z[block.rows], self.scores[block.rows]
        grad = self._of_scores(block, gap, scores)
        grouped = _grouped(block, z, self.projections, self.inverse[block.rows], scores)
        grad_z, grad_w_x = project_backward(grad.view(grouped[3].shape), *grouped)
        (self.grad_w_x if self.projections.landmarks is None else self.grad_w_x[block.sequences]).add_(grad_w_x)
        if self.plan.mode.causal:
            self._through_the_sums(grad_z.view(*block.shape, 2 * self.heads, -1), z, block)
        grad_z = grad_z.view(z.shape)
        if self.plan.mode.causal and gap is not None:
            grad_z.masked_fill_(gap, 0.0)
        narrow = grad_z.to(self.x.dtype)
        if self.grad_x is not None:
            torch.mm(narrow, self.weights.qk_weight, out=self.grad_x.view(-1, self.x.shape[2])[block.rows])
        if self.need_qk:
            self.grad_qk = add_product(self.grad_qk, narrow.t(), _rows(self.x, block, gap))
        if self.need_qk_bias:
            self.grad_qk_bias = add_column_sums(self.grad_qk_bias, grad_z)

    def _of_scores(self, block: Block, gap: Tensor | None, scores: Tensor) -> Tensor:
        """The gradient of the scores from all that they went into, (rows, H, 2, s), wide."""
        if self.grad_y is None:
            grad = torch.zeros_like(scores, dtype=self.wide)
        else:
            seen = _thinned(scores, self.dropped, block, self.plan.dropout).view(scores.shape[0], -1)
            grad = self.out.backward(_rows(self.grad_y, block, gap), seen, self.learns_output).view(scores.shape)
            grad = _thinned(grad.to(self.wide), self.dropped, block, self.plan.dropout)
        by_sequence = grad.view(*block.shape, *scores.shape[1:])
        if self.grad_j is not None:
            by_sequence.addcmul_(scores.view(by_sequence.shape).to(self.wide), self.twice_lambda[block.sequences])
        if self.grad_scores is not None:
            by_sequence.add_(block.of(self.grad_scores))
        return grad if gap is None else grad.masked_fill_(gap[..., None, None], 0.0)

    def _through_the_sums(self, grad: Tensor, sums: Tensor, block: Block) -> None:
        """Turn the gradient of the running sums, (B, N, 2H, p), into that of what they sum."""
        if block.n1 == self.x.shape[1]:
            self.carry = None if self.grad_final is None else self.grad_final[block.sequences]
        self.carry = scan_(grad, None if self.backwards is None else block.of(self.backwards), self.carry, reverse=True)
        if block.n0 == 0 and self.grad_start is not None:
            fade = 1.0 if self.factors is None else self.factors[block.sequences, 0]
            self.grad_start[block.sequences] = fade * self.carry
        if self.grad_decay is None or not self.need_decay:
            return
        met = torch.zeros_like(grad[..., 0])  # ⟨ds_i, s_{i−1}⟩
        met[:, 1:] = (grad[:, 1:] * sums.view(grad.shape)[:, :-1]).sum(-1)
        if block.n0:
            met[:, 0] = (grad[:, 0] * self.z[block.rows.start - 1].view(grad.shape[2:])).sum(-1)
        elif self.start is not None:
            met[:, 0] = (grad[:, 0] * self.start[block.sequences]).sum(-1)
        if self.valid is not None:
            met *= block.of(self.valid)[..., None]
        self.grad_decay += met.sum((0, 1))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """In the order of the inputs of `Layer`, from x on; what is wider than its input, autograd makes narrow."""
        w_e, w_r = self.weights.w_e.to(self.wide), self.weights.w_r.to(self.wide)
        grad_lambda = through_trace = None
        if self.grad_j is not None:
            grad_lambda = 2 * self.sqrt_lambda.to(self.wide) * (self.energy * self.grad_energy).sum(0)
            through_trace = self.grad_j / -self.heads  # (B,)
            if self.plan.trace == "projections":
                self._through_projected_trace(through_trace)
        grad_e, grad_r = self.projections.backward(self.grad_w_x, self.grad_x)
        if through_trace is not None and self.plan.trace == "weights":
            total = through_trace.sum()
            grad_e, grad_r = torch.addcmul(grad_e, w_r, total), torch.addcmul(grad_r, w_e, total)
        output = self.out.gradients() if self.learns_output and self.grad_y is not None else (None,) * 4
        grad_decay = None if self.grad_decay is None else self.grad_decay.view(2, -1).sum(0)
        found = (
            self.grad_x, grad_decay, self.grad_start, grad_lambda, self.grad_qk, self.grad_qk_bias, grad_e, grad_r,
            *output,
        )  # fmt: skip
        return tuple(grad if need else None for grad, need in zip(found, self.needs, strict=True))

    def _through_projected_trace(self, grad: Tensor) -> None:
        """Tr(W_{e|X}ᵀ W_{r|X}): each side's gradient is the other side."""
        sides = self.projections.w_x[..., : self.weights.w_e.shape[2], :].flip(1)
        if self.projections.landmarks is None:
            grad = grad.sum(0, keepdim=True)
        self.grad_w_x.addcmul_(sides, grad[:, None, None, None, None])


def _scale(plan: Plan, valid: Tensor | None, length: int, dtype: torch.dtype) -> Tensor | float:
    """What makes J's first two terms of the summed energies: (B,) or one number."""
    half = 0.5 / plan.mode.heads
    if plan.form == "sum":
        return half
    return half / length if valid is None else half / valid.sum(dim=1).clamp(min=1).to(dtype)


def _trace(plan: Plan, w_x: Tensor, weights: Weights) -> Tensor:
    """Σ_h of the trace under J, one number or (B,)."""
    if plan.trace == "projections":
        return (w_x[:, 0] * w_x[:, 1]).sum((1, 2, 3))
    return (weights.w_e.to(w_x.dtype) * weights.w_r.to(w_x.dtype)).sum()


def _gap(valid: Tensor | None, block: Block) -> Tensor | None:
    """True at the block's padding, (rows, 1)."""
    return None if valid is None else ~block.of(valid).reshape(-1, 1)


def _rows(per_token: Tensor, block: Block, gap: Tensor | None) -> Tensor:
    """The block's rows of a (B, N, d) tensor. Whatever stands in the padding, NaN included, ends here."""
    rows = per_token.view(-1, per_token.shape[2])[block.rows]
    return rows if gap is None else rows.masked_fill(gap, 0.0)


def _grouped(
    block: Block, z: Tensor, projections: Projections, inverse: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands of `project`: by sequence where each has its own weights, else all rows as one sequence."""
    w_x, channels = projections.of(block), inverse.shape[1]
    b, n = (1, z.shape[0]) if projections.landmarks is None else block.shape
    return (
        z.view(b, n, channels, -1).to(w_x.dtype),
        w_x,
        inverse.view(b, n, channels),
        scores.view(b, n, *scores.shape[1:]),
    )


def _thinned(scores: Tensor, dropped: Tensor | None, block: Block, rate: float) -> Tensor:
    """Dropout, which is its own way back."""
    if dropped is None:
        return scores
    return scores.masked_fill(dropped[block.rows], 0.0).mul_(1 / (1 - rate))


def lean_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    dropout: float = 0.0,
    objective: Objective | None = None,
    need_scores: bool = False,
    need_state: bool = False,
) -> Attended:
    """The layer of `ops.primal.reference_attention` with the cosine map, but for the causal data-dependent mode."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            cast = Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
            return lean_attention(
                x.to(dtype), cast, mode, valid=valid, decay=decay, state=state, dropout=dropout,
                objective=objective, need_scores=need_scores, need_state=need_state,
            )  # fmt: skip
    past = state if isinstance(state, RunningState) else None
    start = None if past is None else torch.cat([past.query_sum, past.key_sum], dim=1)  # (B, 2H, p)
    sqrt_lambda, form, trace = (None, "mean", "weights") if objective is None else objective
    places, empty = Landmarks.of(x, valid, mode.landmarks) if mode.data_dependent else (None, None)
    given = (x.contiguous(), decay, start, sqrt_lambda, *weights)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    plan = Plan(mode, dropout, form, trace, need_scores, need_state, keep)  # type: ignore[arg-type]
    y, j, scores, final = Layer.apply(plan, valid, places, empty, *given)
    return Attended(
        y,
        j,
        None if scores is None else Scores(*scores.transpose(1, 2).unbind(3)),  # (B, H, N, s) each
        None if final is None else _state_after(x, final, mode, valid, decay, past),
    )


def _state_after(
    x: Tensor, final: Tensor, mode: Mode, valid: Tensor | None, decay: Tensor | None, past: RunningState | None
) -> RunningState:
    query_sum, key_sum = final.chunk(2, dim=1)
    one_each = x.new_empty(1).expand(x.shape[0], mode.heads, x.shape[1], 1)
    weight = eq.running_weight(one_each, decay, valid, None if past is None else past.weight)
    return RunningState(query_sum, key_sum, weight[:, :, -1, 0])
