"""Reformer: softmax attention among tokens whose shared query-key vectors hash alike,

    h(z) = argmax [R z; -R z];  sort by h, cut into chunks of C;  y_i = Σ_j softmax_j(q_i·k_j) v_j over i's chunk and
    the one before it, k = q/‖q‖, i itself only if there is no other key; rounds of hashing combined by their logsumexp.

Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", ICLR 2020. As in the authors' code, keys of length √p
cancel the softmax's 1/√p, chunks form a ring over all rounds, and pairs in the same chunk in several
rounds are not discounted. Causal: keys of later tokens are masked, but which earlier tokens share a chunk depends on
the number of later tokens with the same hash.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype, gaussian
from ...ops.padding import Tokens
from .. import checks
from .base import AttentionTraits, BaselineAttention
from .random_buffers import RandomBuffers

# Scores of masked keys, and of the token itself, which counts only if there is no other key.
HIDDEN, ITSELF = -1e9, -1e5
# Exponents of the largest number of buckets: 2^16 buckets of 64 tokens are two million tokens.
MAX_LOG_BUCKETS = 16


class ReformerAttention(RandomBuffers, BaselineAttention):
    """Softmax attention among tokens with equal hashes.

    Args:
        hashes: rounds of hashing.
        chunk: C, tokens per chunk; there are 2 L / C buckets, rounded down to a power of two.
        seed: seed of the random numbers.
        redraw_every: training forwards between two draws; by default every forward draws.
    """

    traits = AttentionTraits("O(N log N)", supports_causal=True, stochastic=True)
    drops_weights = True
    projections = 2
    coarse_rotations: Tensor
    fine_rotations: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hashes: int = 2,
        chunk: int = 64,
        seed: int | None = None,
        redraw_every: int | None = 1,
        **common: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("hashes", hashes)
        checks.positive("chunk", chunk)
        self.hashes, self.chunk = hashes, chunk
        # Few buckets: one hash. Many: two hashes, whose pairs are the buckets, so that the work stays far below N².
        self.log_single = max(1, (2 * chunk).bit_length() - 1)
        self.start_draws(seed, redraw_every)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (self.num_heads, self.head_dim, self.hashes)
        log_coarse = max(self.log_single, MAX_LOG_BUCKETS // 2)
        return {
            "coarse_rotations": gaussian(generator, *shape, 2 ** (log_coarse - 1)),
            "fine_rotations": gaussian(generator, *shape, 2 ** (MAX_LOG_BUCKETS - MAX_LOG_BUCKETS // 2 - 1)),
        }

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        self.count_forward()
        qk, v = self.project_in(x)  # (B, H, N, p)
        length = x.shape[1]
        lengths = tokens.lengths if tokens.lengths is not None else torch.full(x.shape[:1], length, device=x.device)
        if length <= self.chunk:  # one chunk: nothing to hash
            position = torch.arange(length, device=x.device).expand(*qk.shape[:2], length)
            return self._attend_chunks(qk, qk, v, position, position, lengths)[0]

        order = self.buckets(qk.detach(), lengths).argsort(dim=-1, stable=True)  # (B, H, R, N)
        # Slots after the end have position `length`, which is masked for all queries.
        position = F.pad(order, (0, -length % self.chunk), value=length).unflatten(-1, (-1, self.chunk))
        keys = torch.cat([self._previous_chunk(position, lengths, length), position], dim=-1)  # (B, H, R, n, 2C)
        y, weight = self._attend_chunks(_take(qk, position), _take(qk, keys), _take(v, keys), position, keys, lengths)

        undo = order.argsort(dim=-1)  # back from sorted to sequence order in each round
        y = y.flatten(3, 4).gather(3, undo.unsqueeze(-1).expand(*undo.shape, y.shape[-1]))  # (B, H, R, N, p)
        weight = weight.flatten(3, 4).gather(3, undo).softmax(dim=2).unsqueeze(-1)
        return (y * weight.to(y.dtype)).sum(dim=2)

    def buckets(self, z: Tensor, lengths: Tensor) -> Tensor:
        """The bucket of each token in each round, (B, H, R, N); slots after the end come after all buckets."""
        z = z.to(accumulation_dtype(z.dtype))
        longest = min(MAX_LOG_BUCKETS, (2 * -(-z.shape[2] // self.chunk)).bit_length() - 1)
        powers = 2 ** torch.arange(1, MAX_LOG_BUCKETS + 1, device=z.device)
        chunks = (lengths + self.chunk - 1) // self.chunk
        log_buckets = (2 * chunks[:, None] >= powers).sum(dim=1)  # the exponent by comparisons: exact
        is_single = log_buckets <= self.log_single
        log_coarse = torch.where(is_single, log_buckets, log_buckets // 2)
        widest = longest if longest <= self.log_single else max(self.log_single, longest // 2)
        bucket = _hash(z, self.coarse_rotations, widest, log_coarse)
        if longest > self.log_single:
            fine = _hash(z, self.fine_rotations, longest - longest // 2, (log_buckets - log_coarse))
            bucket = bucket + 2 ** log_coarse[:, None, None, None] * fine
        slot = torch.arange(z.shape[2], device=z.device)
        return bucket.masked_fill(slot >= lengths[:, None, None, None], 2**MAX_LOG_BUCKETS)

    def _previous_chunk(self, position: Tensor, lengths: Tensor, length: int) -> Tensor:
        """The chunk before each, (B, H, R, n, C); before the first of a round, the last of the round before."""
        last = (lengths - 1) // self.chunk  # the last chunk of each sequence
        index = last[:, None, None, None, None].expand(*position.shape[:3], 1, self.chunk)
        wrapped = position.gather(3, index).roll(1, dims=2)
        previous = torch.cat([wrapped, position[..., :-1, :]], dim=3)
        # A sequence of one chunk has no previous one.
        return previous.masked_fill((last == 0)[:, None, None, None, None], length)

    def _attend_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, q_position: Tensor, k_position: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs (…, C, p) and logsumexps (…, C) of chunks (…, C, p) of queries with their keys."""
        scores = (q @ F.normalize(k, dim=-1).mT).to(accumulation_dtype(q.dtype))
        hidden = k_position >= lengths.view(-1, *[1] * (k_position.ndim - 1))
        hidden = hidden.unsqueeze(-2)
        if self.causal:
            hidden = hidden | (k_position.unsqueeze(-2) > q_position.unsqueeze(-1))
        scores = scores.masked_fill(hidden, HIDDEN)
        scores = scores.masked_fill(k_position.unsqueeze(-2) == q_position.unsqueeze(-1), ITSELF)
        # Not exp(scores - logsumexp): next to ITSELF float32 is too coarse for weights that sum to 1.
        peak = scores.detach().amax(dim=-1, keepdim=True)
        weights = (scores - peak).exp()
        total = weights.sum(dim=-1, keepdim=True)
        weights = F.dropout(weights / total, self.weight_dropout)
        return weights.to(v.dtype) @ v, (peak + total.log()).squeeze(-1)


def _hash(z: Tensor, rotations: Tensor, log_widest: int, log_buckets: Tensor) -> Tensor:
    """argmax [R z; -R z] with 2^log_buckets rows, a number per sequence: (B, H, R, N)."""
    columns = 2**log_widest // 2
    half = (2**log_buckets // 2)[:, None, None, None]
    rotated = torch.einsum("bhnp,hprc->bhrnc", z, rotations[..., :columns].to(z.dtype))
    rotated = torch.cat([rotated, -rotated], dim=-1)
    column = torch.arange(columns, device=z.device).repeat(2)
    best = rotated.masked_fill(column >= half.unsqueeze(-1), -torch.inf).argmax(dim=-1)
    return torch.where(best >= columns, best - columns + half, best)


def _take(t: Tensor, position: Tensor) -> Tensor:
    """Rows of t (B, H, N, p) by position (B, H, R, n, C); positions after the end give any row."""
    index = position.flatten(2).clamp(max=t.shape[2] - 1)
    return t.gather(2, index.unsqueeze(-1).expand(*index.shape, t.shape[3])).unflatten(2, position.shape[2:])
