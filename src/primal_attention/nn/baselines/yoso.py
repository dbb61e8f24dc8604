"""YOSO: attention by the probability that two vectors share an LSH bucket,

    Y = normalise(E[B] V),   E[B]_ij = (1 - arccos(q_i·k_j)/π)^τ,   q, k and the rows of Y of unit length.

Zeng et al., "You Only Sample (Almost) Once: Linear Cost Self-Attention via Bernoulli Sampling", ICML 2021. YOSO-E is
the expectation (quadratic time, computed in blocks of queries: no N×N matrix is formed); "sampled" estimates it with
hashes of τ bits in linear time. The gradient of both is the paper's: ∂E[B]/∂(q·k) replaced by its lower bound
(τ/2) E[B], since the true one is infinite where q = k.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from .. import checks
from ..padding import Tokens
from .base import AttentionTraits, BaselineAttention
from .random_buffers import RandomBuffers, gaussian

BLOCK = 512  # queries whose collision probabilities are formed at a time
COLUMNS = 8  # value columns whose products with the keys are summed at a time in the sampled backward pass


class YosoAttention(RandomBuffers, BaselineAttention):
    """Attention by the probability that the hashes of query and key collide.

    Args:
        estimator: "expectation" (YOSO-E), or "sampled": new hashes in every training forward, fixed ones in eval.
        bits: τ, bits of a hash.
        hashes: of the sampled estimator.
        seed: of the random numbers.
        redraw_every: drawn again every so many training forwards. The expectation draws nothing.
    """

    name = "yoso"
    traits = AttentionTraits("O(N²), sampled O(N)", stochastic=True, exact_gradient=False)
    order_matters = False
    planes: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        estimator: str = "expectation",
        bits: int = 9,
        hashes: int = 32,
        seed: int | None = None,
        redraw_every: int | None = 1,
        **common: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.one_of("estimator", estimator, ("expectation", "sampled"))
        checks.positive("bits", bits)
        checks.positive("hashes", hashes)
        self.estimator, self.bits, self.hashes = estimator, bits, hashes
        self.start_draws(seed, redraw_every)
        if estimator == "sampled":
            self.redraw()

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"planes": gaussian(generator, self.num_heads, self.hashes, self.head_dim, self.bits)}

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        q, k, v = F.normalize(q, dim=-1), F.normalize(k, dim=-1), tokens.zero_padding(v)
        if self.estimator == "sampled":
            self.count_forward()
            y = _Sampled.apply(q, k, v, hash_codes(q, self.planes), hash_codes(k, self.planes), self.bits)
        else:
            y = _Expectation.apply(q, k, v, self.bits)
        return F.normalize(y, dim=-1)


def collision_probability(q: Tensor, k: Tensor, bits: int) -> Tensor:
    """(1 - arccos(q·k)/π)^τ for unit vectors, (…, N, M), in float32 at least."""
    cosine = (q @ k.mT).to(accumulation_dtype(q.dtype)).clamp(-1.0, 1.0)
    return (1 - torch.acos(cosine) / math.pi) ** bits


def hash_codes(z: Tensor, planes: Tensor) -> Tensor:
    """The side of τ random planes on which z lies, as one number per hash: (B, H, N, p) → (B, H, m, N)."""
    bits = planes.shape[-1]
    side = torch.einsum("bhnp,hmpt->bhmnt", z.detach(), planes.to(z.dtype)) > 0
    return (side * 2 ** torch.arange(bits, device=z.device)).sum(-1)


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


class _Sampled(torch.autograd.Function):
    """B V averaged over the hashes, by a table of summed values per hash."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_code: Tensor, k_code: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(q, k, v, q_code, k_code)
        ctx.bits = bits
        hashes = q_code.shape[2]
        y = torch.zeros_like(v)
        for i in range(hashes):
            y = y + _meet(q_code[:, :, i], k_code[:, :, i], v, bits)
        return y / hashes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, q_code, k_code = ctx.saved_tensors
        hashes = q_code.shape[2]
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(hashes):
            code_q, code_k = q_code[:, :, i], k_code[:, :, i]
            grad_v = grad_v + _meet(code_k, code_q, grad, ctx.bits)
            grad_q = grad_q + _meet_weighted(code_q, grad, code_k, v, k, ctx.bits)
            grad_k = grad_k + _meet_weighted(code_k, v, code_q, grad, q, ctx.bits)
        slope = ctx.bits / 2 / hashes
        return slope * grad_q, slope * grad_k, grad_v / hashes, None, None, None


def _meet(to_code: Tensor, from_code: Tensor, values: Tensor, bits: int) -> Tensor:
    """Σ_j [code_i = code_j] values_j: one table row per code, filled and looked up."""
    table = values.new_zeros(*values.shape[:2], 2**bits, values.shape[3])
    table = table.scatter_add(2, from_code.unsqueeze(-1).expand_as(values), values)
    return table.gather(2, to_code.unsqueeze(-1).expand(*to_code.shape, values.shape[3]))


def _meet_weighted(
    to_code: Tensor, to_weight: Tensor, from_code: Tensor, from_weight: Tensor, values: Tensor, bits: int
) -> Tensor:
    """Σ_j [code_i = code_j] (to_weight_i·from_weight_j) values_j, a few weight columns at a time."""
    y = torch.zeros_like(values)
    for a, b in zip(to_weight.split(COLUMNS, -1), from_weight.split(COLUMNS, -1), strict=True):
        products = (b.unsqueeze(-1) * values.unsqueeze(-2)).flatten(3)  # (B, H, N, columns·p)
        met = _meet(to_code, from_code, products, bits).unflatten(3, (a.shape[-1], -1))
        y = y + (a.unsqueeze(-1) * met).sum(3)
    return y
