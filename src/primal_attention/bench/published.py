"""Primal-Attention the way the research code computes it: eager, one tensor after the other, the core in float32.

The yardstick for what fusing brings. The equations and where the casts stand are facts about that code; q and k come
from one product here where it has two, which is the only difference and in its favour.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.ops.landmarks import landmark_indices


class PublishedPrimal(nn.Module):
    """Parameters by the names of `PrimalAttention`, so that one state dict serves both."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int,
        landmarks: int,
        data_dependent: bool = True,
        causal: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if causal and data_dependent:
            raise ValueError("the published code has no causal data-dependent mode")
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.landmarks, self.data_dependent, self.causal = landmarks, data_dependent, causal
        core: dict[str, Any] = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
        rows = landmarks if data_dependent else self.head_dim
        self.qk_proj = nn.Linear(embed_dim, 2 * embed_dim, device=device, dtype=dtype)
        self.w_e = nn.Parameter(nn.init.orthogonal_(torch.empty(num_heads, rows, rank, **core)))
        self.w_r = nn.Parameter(nn.init.orthogonal_(torch.empty(num_heads, rows, rank, **core)))
        self.sqrt_lambda = nn.Parameter(torch.rand(num_heads, rank, **core))
        self.score_proj = nn.Linear(2 * rank, self.head_dim, **core)
        self.out_proj = nn.Linear(embed_dim, embed_dim, device=device, dtype=dtype)
        self.objective: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self._heads(t) for t in self.qk_proj(x).chunk(2, dim=-1))  # (B, H, N, p)
        if self.causal:
            q, k = running_mean(q), running_mean(k)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.data_dependent:
            rows = self._heads(x)[:, :, landmark_indices(x.shape[1], self.landmarks, x.device)]  # (B, H, n, p)
            w_e = torch.einsum("bhnp,hns->bhps", rows, self.w_e)
            w_r = torch.einsum("bhnp,hns->bhps", rows, self.w_r)
            e = torch.einsum("bhnp,bhps->bhns", q, w_e)
            r = torch.einsum("bhnp,bhps->bhns", k, w_r)
        else:
            e = torch.einsum("bhnp,hps->bhns", q, self.w_e)
            r = torch.einsum("bhnp,hps->bhns", k, self.w_r)
        self.objective = self._objective(e, r)
        heads = self.score_proj(torch.cat([e, r], dim=-1))  # (B, H, N, p)
        return self.out_proj(heads.transpose(1, 2).flatten(2).to(x.dtype))

    def _heads(self, t: Tensor) -> Tensor:
        wide = t.to(self.w_e.dtype)
        return wide.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _objective(self, e: Tensor, r: Tensor) -> Tensor:
        scale = self.sqrt_lambda[:, None]  # (H, 1, s)
        energy = (e * scale).square().sum(-1).mean((1, 2)) + (r * scale).square().sum(-1).mean((1, 2))
        trace = torch.einsum("hns,hns->h", self.w_e, self.w_r).mean()
        return 0.5 * energy - trace  # (B,)


def running_mean(z: Tensor) -> Tensor:
    count = torch.arange(1, z.shape[2] + 1, device=z.device, dtype=z.dtype)
    return z.cumsum(dim=2) / count[:, None]
