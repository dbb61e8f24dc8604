"""YOSO: attention by the probability that two vectors share an LSH bucket,

    Y = normalise(E[B] V),   E[B]_ij = (1 - arccos(q_i·k_j)/π)^τ,   q, k and the rows of Y of unit length.

Zeng et al., "You Only Sample (Almost) Once: Linear Cost Self-Attention via Bernoulli Sampling", ICML 2021. This is
YOSO-E, the expectation: quadratic time in blocks of queries, without an N×N matrix. The gradient is the paper's:
∂E[B]/∂(q·k) replaced by its lower bound (τ/2) E[B], since the true one is infinite where q = k.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from ...ops.padding import Tokens
from .. import checks
from .base import AttentionTraits, BaselineAttention

BLOCK = 512  # queries whose collision probabilities are formed at a time


class YosoAttention(BaselineAttention):
    """Attention by the probability that the hashes of query and key collide.

    Args:
        bits: τ, bits of a hash.
    """

    traits = AttentionTraits("O(N²)", exact_gradient=False)
    order_matters = False

    def __init__(self, embed_dim: int, num_heads: int, *, bits: int = 9, **common: Any) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("bits", bits)
        self.bits = bits

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), tokens.zero_padding(v)
        return F.normalize(_Expectation.apply(q, k, v, self.bits), dim=-1)


def collision_probability(q: Tensor, k: Tensor, bits: int) -> Tensor:
    """(1 - arccos(q·k)/π)^τ for unit vectors, (…, N, M), in float32 at least."""
    cosine = (q @ k.mT).to(accumulation_dtype(q.dtype)).clamp(-1.0, 1.0)
    return (1 - torch.acos(cosine) / math.pi) ** bits


class _Expectation(torch.autograd.Function):
    """E[B] V by blocks of queries, recomputed in the backward pass; q, k and v are saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bits = bits
        blocks = [collision_probability(rows, k, bits).to(v.dtype) @ v for rows in q.split(BLOCK, dim=2)]
        return torch.cat(blocks, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows, grad_rows in zip(q.split(BLOCK, dim=2), grad.split(BLOCK, dim=2), strict=True):
            probability = collision_probability(rows, k, ctx.bits).to(v.dtype)
            slope = (ctx.bits / 2) * probability * (grad_rows @ v.mT)  # (B, H, block, N)
            grad_q.append(slope @ k)
            grad_k = grad_k + slope.mT @ rows
            grad_v = grad_v + probability.mT @ grad_rows
        return torch.cat(grad_q, dim=2), grad_k, grad_v, None
