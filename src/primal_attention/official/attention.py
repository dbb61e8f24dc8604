"""Primal-Attention as the authors' code computes it, to compare speed and memory with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.landmarks import landmark_indices


class AuthorsPrimal(PrimalAttention):
    """The authors' layer: eager, tensor by tensor, the core in float32.

    Padding takes part in f(X) and J; only the output is zeroed there. q and k come from one product instead of two.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.decay_logit is not None or (self.causal and self.data_dependent):
            raise NotImplementedError("the authors' code has neither decay nor a causal data-dependent mode")
        self.core_dtype = torch.promote_types(self.w_e.dtype, torch.float32)
        self.score_proj.to(self.core_dtype)
        for weight in (self.w_e, self.w_r, self.sqrt_lambda):
            weight.data = weight.data.to(self.core_dtype)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k = (self._split_heads(t) for t in self.qk_proj(x).chunk(2, dim=-1))  # (B, H, N, p)
        if self.causal:
            count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=q.dtype)[:, None]
            q, k = q.cumsum(dim=2) / count, k.cumsum(dim=2) / count
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        w_e, w_r = self.w_e[None], self.w_r[None]  # (1, H, p, s)
        if self.data_dependent:
            rows = self._split_heads(x)[:, :, landmark_indices(x.shape[1], self.landmarks, x.device)]  # (B, H, n, p)
            w_e, w_r = (torch.einsum("bhnp,hns->bhps", rows, w) for w in (self.w_e, self.w_r))
        e, r = q @ w_e, k @ w_r  # (B, H, N, s)
        if self.training:
            scale = self.sqrt_lambda[:, None]  # (H, 1, s)
            energy = (e * scale).square().sum(-1).mean((1, 2)) + (r * scale).square().sum(-1).mean((1, 2))
            self._objective = 0.5 * energy - torch.einsum("hns,hns->h", self.w_e, self.w_r).mean()  # (B,)
        heads = self.score_proj(torch.cat([e, r], dim=-1))  # (B, H, N, p)
        y: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2).to(x.dtype))
        return y if key_padding_mask is None else y.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)

    def _split_heads(self, t: Tensor) -> Tensor:
        return t.to(self.core_dtype).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def use_authors_layers(model: Any) -> None:
    """Replace the attention layers of an `LRAClassifier` by the authors', and its embedding by torch's."""
    model.stem.tokens = nn.Embedding.from_pretrained(model.stem.tokens.weight.detach(), freeze=False)
    for block in model.encoder.blocks:
        ours = block.attention
        block.attention = AuthorsPrimal(ours.embed_dim, ours.num_heads, rank=ours.rank, landmarks=ours.landmarks)
        block.attention.load_state_dict(ours.state_dict())
