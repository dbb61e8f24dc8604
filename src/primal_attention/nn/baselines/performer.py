"""Performer (FAVOR+): softmax attention estimated with positive orthogonal random features,

    φ(z) = exp(ωᵣᵀ z - ‖z‖²/2) / √m, r = 1 … m,   E[φ(q)ᵀφ(k)] = exp(qᵀk),   with q, k scaled by p^(-1/4).

Choromanski et al., "Rethinking Attention with Performers", ICLR 2021. The features are scaled by their largest value,
which cancels in the ratio; no constant is added to them, so causal, streamed and padded forms agree exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype, orthogonal_gaussian
from .. import checks
from .base import AttentionTraits
from .linear import KernelizedAttention
from .random_buffers import RandomBuffers


class PerformerAttention(RandomBuffers, KernelizedAttention):
    """Softmax attention approximated by positive random features.

    Args:
        features: m, random features, shared by the heads.
        seed: seed of the random numbers.
        redraw_every: training forwards between two draws; None keeps the first draw.
    """

    traits = AttentionTraits(supports_causal=True, streams=True, stochastic=True)
    order_matters = False
    log_keys = True
    eps = 1e-30  # if the product with all keys underflows, y = 0, not NaN
    frequencies: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        features: int = 256,
        seed: int | None = None,
        redraw_every: int | None = 1000,
        **common: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("features", features)
        self.num_features = features
        self.start_draws(seed, redraw_every)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"frequencies": orthogonal_gaussian(generator, self.num_features, self.head_dim)}  # ω

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.count_forward()
        log_q, log_k = self._log_features(q), self._log_features(k)
        phi_q = (log_q - log_q.detach().amax(dim=-1, keepdim=True)).exp()
        return phi_q.to(q.dtype), log_k

    def _log_features(self, z: Tensor) -> Tensor:
        # In float32 at least: an exponent of bfloat16 would be off by several per cent of its exponential.
        z = z.to(accumulation_dtype(z.dtype)) * self.head_dim**-0.25
        return z @ self.frequencies.to(z.dtype).T - z.square().sum(-1, keepdim=True) / 2
