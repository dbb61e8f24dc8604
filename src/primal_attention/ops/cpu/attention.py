"""The layer in few passes over memory: one autograd node with a hand-written backward pass.

Blocks of tokens stay in the cache from x to y and, in the backward pass, from dy to dx:

    z = W_qk x + b,    e = (z_q W_{e|X}) / ‖z_q‖,    r = (z_k W_{r|X}) / ‖z_k‖,    y = W_out concat_h(W_o [e; r])

Saved for backward are x, z (its running sums if causal), the scores and 1/‖z‖. The backward pass recomputes the
projection weights from x. Everything between the large products is computed in the accumulation dtype. The node cannot
be differentiated twice. Forward and backward of a layer with 8,192 tokens in sequences of 1,024 (d 512, H 8) take
263 ms on two threads, by the equations 331 ms, by the authors' implementation 330 ms and by SDPA 698 ms
(`results/bench/attention-cpu.json`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from ..feature_maps import accumulation_dtype
from ..types import Mode, Output, RunningState, Scores, State, Weights
from .output import OutputGradients, OutputMap, accumulate_column_sums, accumulate_linear, linear_into
from .scores import ProjectionWeights, decay_factors, landmark_positions, project, project_backward, running_sum_

BLOCK_SIZE = 3 * 2**20  # numbers in z and the scores of a block: large products that stay in the cache


def cpu_attention(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    *,
    qk: Tensor | None = None,
    valid: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    dropout: float = 0.0,
    trace: Literal["weights", "projections"] = "weights",
    need_scores: bool = False,
    need_state: bool = False,
) -> Output:
    """Compute a layer with the arguments of `reference.attention`; qk must be None, the feature map is the cosine.

    The causal data-dependent mode is not supported. Scores and state are None unless requested.
    """
    assert qk is None
    plain_weights, device = weights, x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weights = x.to(dtype), Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
    past = state if isinstance(state, RunningState) else None
    start = None if past is None else torch.cat([past.query_sum, past.key_sum], dim=1)  # (B, 2H, p)
    inputs = (x.contiguous(), decay, start, *weights)
    has_backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    with _no_autocast(device):
        positions = landmark_positions(x, valid, mode.landmarks, shift) if mode.data_dependent else None
        call = Call(mode, dropout, need_scores, need_state, has_backward)
        y, energy, scores, sums = Layer.apply(call, valid, positions, *inputs)
        if trace == "weights" or not mode.data_dependent:
            traced = reference.weight_trace(plain_weights.w_e, plain_weights.w_r)
        else:
            tokens = x if valid is None else x.masked_fill(~valid[..., None], 0.0)
            rows = reference.landmark_rows(reference.split_heads(tokens, mode.heads), mode.landmarks, valid, shift)
            sides = (reference.projection_weights(rows, w) for w in (weights.w_e, weights.w_r))
            traced = reference.weight_trace(*sides)
        final = None
        if sums is not None:
            ones = sums.new_ones(1).expand(x.shape[0], mode.heads, x.shape[1], 1)
            weight = reference.running_sum(ones, decay, valid, None if past is None else past.weight[..., None])
            query_sum, key_sum = sums.chunk(2, dim=1)
            final = RunningState(query_sum, key_sum, weight[:, :, -1, 0].clone())
    return Output(y, energy, traced, None if scores is None else Scores(*scores.mT.unbind(1)), final)


class Call(NamedTuple):
    """Arguments of a pass that are not tensors."""

    mode: Mode
    dropout: float
    need_scores: bool
    need_state: bool
    has_backward: bool


class Inputs(NamedTuple):
    """Tensor arguments of `Layer` besides the weights."""

    valid: Tensor | None
    positions: Tensor | None  # of the landmarks
    x: Tensor
    decay: Tensor | None
    start: Tensor | None  # running sums before the first token, (B, 2H, p)


class SavedBlock(NamedTuple):
    """Tensors of a block that are saved for backward."""

    z: Tensor  # (rows, 2d); its running sums if causal
    inverse: Tensor  # 1/‖z‖, (g, 2H, m)
    scores: Tensor  # (g, 2, H, s, m)
    dropped: Tensor | None  # bool, like the scores

    def drop(self, values: Tensor, rate: float) -> Tensor:
        """Apply the dropout mask to the scores or to their gradient."""
        if self.dropped is None:
            return values
        return values.masked_fill(self.dropped, 0.0).mul_(DROPOUT_LEVELS / (DROPOUT_LEVELS - _dropout_level(rate)))


class Layer(torch.autograd.Function):
    """(x, γ, initial sums, weights) → (y, energies, scores, final sums); the last two are None unless requested."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        valid: Tensor | None,
        positions: Tensor | None,
        x: Tensor,
        decay: Tensor | None,
        start: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        weights = Weights(*parameters)  # type: ignore[arg-type]
        assert weights.qk_weight is not None
        (batch, length, d), heads, rank = x.shape, call.mode.heads, weights.w_e.shape[2]
        dtype = accumulation_dtype(x.dtype)
        projection = ProjectionWeights(x, positions, valid, weights.w_e, weights.w_r)
        output = OutputMap(weights, heads)
        factors = None if decay is None else decay_factors(decay, valid, batch, length, dtype)

        energy = x.new_zeros(batch, 2, heads, rank, dtype=dtype)
        all_scores = x.new_empty(batch, 2, heads, rank, length) if call.need_scores else None
        sums = x.new_empty(batch, 2 * heads, d // heads, dtype=dtype) if call.need_state else None
        y = torch.empty_like(x)
        saved: list[Tensor | None] = []
        carry = None
        for block in split_blocks(batch, length, 2 * (d + heads * rank)):
            padding = block.padding(valid)
            z = F.linear(block.rows_of(x, padding), weights.qk_weight, weights.qk_bias)
            if call.mode.causal:
                z = z.to(dtype)
                if padding is not None:
                    z.masked_fill_(padding, 0.0)
                if block.n0 == 0:
                    carry = None if start is None else start[block.sequences]
                tokens = z.view(*block.shape, 2 * heads, -1)
                carry = running_sum_(tokens, None if factors is None else block.of(factors), carry)
                if sums is not None:
                    sums[block.sequences] = carry
            # If all sequences share the weights, all rows form one sequence.
            g, m = (1, z.shape[0]) if positions is None else block.shape
            scores, inverse = project(z.view(g, m, 2 * heads, -1).to(dtype), projection.of(block.sequences))
            scores = scores.to(x.dtype)
            by_sequence = block.by_sequence(scores)
            if padding is not None:
                by_sequence.masked_fill_(padding.view(-1, 1, 1, 1, block.shape[1]), 0.0)
            energy[block.sequences].add_(by_sequence.to(dtype).square().sum(-1))
            if all_scores is not None:
                block.scores_of(all_scores).copy_(by_sequence)
            dropped = draw_dropout_mask(scores.shape, call.dropout, x.device) if call.dropout else None
            tensors = SavedBlock(z, inverse, scores, dropped)
            rows = block.rows_of(y)
            output.forward(tensors.drop(scores, call.dropout), rows)
            if padding is not None:
                rows.masked_fill_(padding, 0.0)
            if call.has_backward:
                saved.extend(tensors)
        if call.has_backward:
            ctx.call = call
            ctx.save_for_backward(valid, positions, x, decay, start, *parameters, *saved)
        return y, energy.transpose(1, 2), all_scores, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a fast path cannot be differentiated twice: build the layer with backend='reference'")
        saved = ctx.saved_tensors  # activation checkpointing allows one access
        with _no_autocast(saved[2].device.type):
            backward = _Backward(ctx.call, saved, ctx.needs_input_grad[3:], grads)
            return None, None, None, *backward.run()


class _Backward:
    """The backward pass of `Layer`: accumulates the gradients block by block, in reverse order if causal."""

    def __init__(self, call: Call, saved: Sequence[Any], needs: Sequence[bool], grads: Sequence[Tensor | None]) -> None:
        fields = len(Inputs._fields)
        first = fields + len(Weights._fields)
        self.call, self.needs, self.inputs = call, needs, Inputs(*saved[:fields])
        self.weights = weights = Weights(*saved[fields:first])
        self.saved = [SavedBlock(*saved[i : i + 4]) for i in range(first, len(saved), 4)]
        self.x = x = self.inputs.x
        self.heads, self.dtype = call.mode.heads, accumulation_dtype(x.dtype)
        batch, length, _ = x.shape
        self.projection = ProjectionWeights(x, self.inputs.positions, self.inputs.valid, weights.w_e, weights.w_r)
        self.output = OutputMap(weights, self.heads)
        self.factors = self.next_factors = None
        if self.inputs.decay is not None:
            self.factors = decay_factors(self.inputs.decay, self.inputs.valid, batch, length, self.dtype)
            # The factor from token i + 1 to token i. The gradient of the final sums enters without one.
            self.next_factors = torch.cat([self.factors[:, 1:], torch.ones_like(self.factors[:, :1])], dim=1)

        grad_y, grad_energy, self.grad_scores, self.grad_sums = grads
        self.grad_y = None if grad_y is None else grad_y.contiguous()
        self.grad_square = None if grad_energy is None else 2 * grad_energy.transpose(1, 2)[..., None]
        self.carry: Tensor | None = None  # gradient of the running sums after the block

        needs_x, self.needs_decay, needs_start, self.needs_qk, self.needs_qk_bias, *_ = needs
        self.needs_output = any(needs[7:])
        self.grad_x = torch.empty_like(x) if needs_x else None
        self.grad_qk: Tensor | None = None
        self.grad_qk_bias: Tensor | None = None
        self.grad_w_x = torch.zeros_like(self.projection.w_x, memory_format=torch.contiguous_format)
        self.grad_decay = self.grad_w_x.new_zeros(2 * self.heads)
        self.grad_start = torch.zeros_like(self.inputs.start) if needs_start else None  # type: ignore[arg-type]

    def run(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, γ, the initial sums and the weights."""
        (batch, length, d), rank = self.x.shape, self.weights.w_e.shape[2]
        blocks = list(enumerate(split_blocks(batch, length, 2 * (d + self.heads * rank))))
        for i, block in reversed(blocks) if self.call.mode.causal else blocks:
            self._add_block(block, self.saved[i], self.saved[i - 1].z if block.n0 else None)
        grad_e, grad_r = self.projection.backward(self.grad_w_x, self.grad_x)
        output = self.output.gradients() if self.needs_output else OutputGradients()
        grads = (
            self.grad_x, self.grad_decay.view(2, -1).sum(0), self.grad_start, self.grad_qk, self.grad_qk_bias, grad_e,
            grad_r, *output,
        )  # fmt: skip
        return tuple(grad if need else None for grad, need in zip(grads, self.needs, strict=True))

    def _add_block(self, block: Block, saved: SavedBlock, previous_sums: Tensor | None) -> None:
        padding, sequences = block.padding(self.inputs.valid), block.sequences
        (g, channels, m), z = saved.inverse.shape, saved.z
        rows = z.view(g, m, channels, -1).to(self.dtype)
        grad = self._score_gradient(block, padding, saved)
        grad_rows, grad_w_x = project_backward(grad, rows, self.projection.of(sequences), saved.inverse, saved.scores)
        (self.grad_w_x if self.inputs.positions is None else self.grad_w_x[sequences]).add_(grad_w_x)
        grad_z = grad_rows.view(z.shape)
        if self.call.mode.causal:
            self._sum_backward(grad_z.view(*block.shape, channels, -1), z, previous_sums, block)
            if padding is not None:
                grad_z.masked_fill_(padding, 0.0)
        rounded = grad_z.to(self.x.dtype)
        if self.grad_x is not None:
            assert self.weights.qk_weight is not None
            linear_into(block.rows_of(self.grad_x), rounded, self.weights.qk_weight.t())
        if self.needs_qk:
            self.grad_qk = accumulate_linear(self.grad_qk, rounded.t(), block.rows_of(self.x, padding).t())
        if self.needs_qk_bias:
            self.grad_qk_bias = accumulate_column_sums(self.grad_qk_bias, grad_z)

    def _score_gradient(self, block: Block, padding: Tensor | None, saved: SavedBlock) -> Tensor:
        """Return the gradient of the scores, (g, 2, H, s, m), in the accumulation dtype."""
        scores, rate = saved.scores, self.call.dropout
        if self.grad_y is None:
            grad = torch.zeros_like(scores, dtype=self.dtype)
        else:
            rows = block.rows_of(self.grad_y, padding)
            grad = self.output.backward(rows, saved.drop(scores, rate), self.needs_output)
            grad = saved.drop(grad.to(self.dtype), rate)
        by_sequence = block.by_sequence(grad)
        if self.grad_square is not None:
            by_sequence.addcmul_(block.by_sequence(scores).to(self.dtype), self.grad_square[block.sequences])
        if self.grad_scores is not None:
            by_sequence.add_(block.scores_of(self.grad_scores))
        if padding is not None:
            by_sequence.masked_fill_(padding.view(-1, 1, 1, 1, block.shape[1]), 0.0)
        return grad

    def _sum_backward(self, grad: Tensor, sums: Tensor, previous_sums: Tensor | None, block: Block) -> None:
        """Replace the gradient of the running sums, (B, N, 2H, p), by that of their terms."""
        if block.n1 == self.x.shape[1]:
            self.carry = None if self.grad_sums is None else self.grad_sums[block.sequences]
        factors = None if self.next_factors is None else block.of(self.next_factors)
        self.carry = running_sum_(grad, factors, self.carry, reverse=True)
        if block.n0 == 0 and self.grad_start is not None:
            factor = 1.0 if self.factors is None else self.factors[block.sequences, 0]
            self.grad_start[block.sequences] = factor * self.carry
        if not self.needs_decay:
            return
        inner = torch.zeros_like(grad[..., 0])  # ⟨ds_i, s_{i−1}⟩
        inner[:, 1:] = (grad[:, 1:] * sums.view(grad.shape)[:, :-1]).sum(-1)
        if previous_sums is not None:
            inner[:, 0] = (grad[:, 0] * previous_sums[-1].view(grad.shape[2:])).sum(-1)
        elif self.inputs.start is not None:
            inner[:, 0] = (grad[:, 0] * self.inputs.start[block.sequences]).sum(-1)
        if self.inputs.valid is not None:
            inner *= block.of(self.inputs.valid)[..., None]
        self.grad_decay += inner.sum((0, 1))


class Block(NamedTuple):
    """Tokens n0…n1 of the sequences b0…b1: adjacent rows among all tokens."""

    b0: int
    b1: int
    n0: int
    n1: int
    length: int  # of the sequences

    @property
    def shape(self) -> tuple[int, int]:
        return self.b1 - self.b0, self.n1 - self.n0

    @property
    def sequences(self) -> slice:
        return slice(self.b0, self.b1)

    def of(self, per_token: Tensor) -> Tensor:
        """Return the block's part of a (B, N, …) tensor."""
        return per_token[self.b0 : self.b1, self.n0 : self.n1]

    def scores_of(self, per_score: Tensor) -> Tensor:
        """Return the block's part of a (B, 2, H, s, N) tensor."""
        return per_score[self.b0 : self.b1, ..., self.n0 : self.n1]

    def rows_of(self, per_token: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the block's rows of a (B, N, d) tensor. Zero the padding so that NaNs there cannot propagate."""
        first, last = self.b0 * self.length + self.n0, (self.b1 - 1) * self.length + self.n1
        rows = per_token.view(-1, per_token.shape[2])[first:last]
        return rows if padding is None else rows.masked_fill(padding, 0.0)

    def padding(self, valid: Tensor | None) -> Tensor | None:
        """Return True at padding, (rows, 1)."""
        return None if valid is None else ~self.of(valid).reshape(-1, 1)

    def by_sequence(self, scores: Tensor) -> Tensor:
        """Return a view of the block's scores as (b, 2, H, s, n), also if its rows form one sequence."""
        b, n = self.shape
        return scores if scores.shape[0] == b else scores[0].unflatten(-1, (b, n)).permute(3, 0, 1, 2, 4)


def split_blocks(batch: int, length: int, width: int) -> Iterator[Block]:
    """Yield even parts of one long sequence, or several short sequences. width: numbers per token in z and scores."""
    tokens = max(BLOCK_SIZE // width, 64)
    parts = -(-length // tokens)
    step = -(-length // parts)
    group = tokens // length if parts == 1 else 1
    for b0 in range(0, batch, group):
        for n0 in range(0, length, step):
            yield Block(b0, min(b0 + group, batch), n0, min(n0 + step, length), length)


DROPOUT_LEVELS = 2**16  # the rate is rounded to a multiple of 1 / DROPOUT_LEVELS


def _dropout_level(rate: float) -> int:
    return min(round(rate * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)


def draw_dropout_mask(shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
    """Return a bool mask that is True with probability `rate`. Four numbers share one random int64."""
    count = prod(shape)
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] < _dropout_level(rate) - DROPOUT_LEVELS // 2).view(shape)


def _no_autocast(device: str) -> Any:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
