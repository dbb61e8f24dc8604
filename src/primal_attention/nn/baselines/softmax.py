"""Softmax attention: y_i = Σ_j softmax_j(q_i·k_j / √p) v_j, by torch's fused kernels.

Vaswani et al., "Attention Is All You Need", NeurIPS 2017. Rotary positions: Su et al., "RoFormer: Enhanced Transformer
with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.padding import Tokens
from .base import AttentionTraits, BaselineAttention, StreamingAttention

ROTARY_BASE = 10_000.0


class SoftmaxAttention(BaselineAttention):
    """Attention of the original Transformer. Memory is linear where torch has a fused kernel, else quadratic."""

    traits = AttentionTraits("O(N²)", linear_memory=False, supports_causal=True)
    order_matters = False
    drops_weights = True

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        # Causal: padding is after all tokens, so the causal mask hides it.
        mask = None if self.causal else tokens.key_mask()
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, dropout_p=self.weight_dropout
        )


class CacheState(NamedTuple):
    """All keys and values so far. Unlike the other states, this one grows with the number of tokens."""

    k: Tensor  # (B, H, T, p), already rotated
    v: Tensor  # (B, H, T, p)
    valid: Tensor  # (B, T), True at tokens
    position: Tensor  # (B,), tokens read


class CachedSoftmaxAttention(StreamingAttention, SoftmaxAttention):
    """Causal softmax attention with a key-value cache.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads.
        rotary: rotate q and k by the positions of the tokens; padding is not counted.
        common: see `BaselineAttention`; `causal` is always True.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, rotary: bool = True, **common: Any) -> None:
        common["causal"] = True
        super().__init__(embed_dim, num_heads, **common)
        if rotary and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head width (head_dim={self.head_dim})")
        self.rotary = rotary

    def initial_state(self, batch_size: int) -> CacheState:
        """Return the state before the first token: an empty cache."""
        weight = self.in_proj.weight
        kv = weight.new_zeros(2, batch_size, self.num_heads, 0, self.head_dim)
        valid = torch.zeros(batch_size, 0, dtype=torch.bool, device=weight.device)
        return CacheState(kv[0], kv[1], valid, torch.zeros(batch_size, dtype=torch.int64, device=weight.device))

    def _resume(
        self, x: Tensor, tokens: Tokens, state: CacheState | None, nans: Tensor | None
    ) -> tuple[Tensor, CacheState]:
        q, k, v = self.project_in(x)
        batch, n = x.shape[:2]
        place = torch.arange(n, device=x.device)[None]
        if self.rotary:
            angles = rotary_angles(place if state is None else place + state.position[:, None], self.head_dim)
            q, k = rotate(q, *angles), rotate(k, *angles)
        new = torch.ones(batch, n, dtype=torch.bool, device=x.device) if tokens.present is None else tokens.present
        count = new.sum(dim=1)
        stored = k if nans is None else k + nans[:, None, :, None].to(k.dtype)
        if state is None:
            # Padding is after all tokens, so the causal mask hides it.
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.weight_dropout)
            return y, CacheState(stored, v, new, count)
        past_k, has_later_keys = state.k.to(k.dtype), nans is not None and n > 1
        k = torch.cat([past_k, k if has_later_keys else stored], dim=2)
        v = torch.cat([state.v.to(v.dtype), v], dim=2)
        visible = torch.cat([state.valid[:, None].expand(-1, n, -1), (place <= place.T).expand(batch, -1, -1)], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], dropout_p=self.weight_dropout)
        k = torch.cat([past_k, stored], dim=2) if has_later_keys else k
        return y, CacheState(k, v, torch.cat([state.valid, new], dim=1), state.position + count)


def rotary_angles(positions: Tensor, head_dim: int, base: float = ROTARY_BASE) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles in float32: positions (B or 1, N) → (B or 1, 1, N, head_dim / 2)."""
    speed = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[:, None, :, None].float() * speed
    return angle.cos(), angle.sin()


def rotate(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate coordinates m and m + p/2 of z (B, H, N, p), in at least float32: q_i·k_j then depends on i − j."""
    a, b = z.float().chunk(2, dim=-1) if z.dtype in (torch.bfloat16, torch.float16) else z.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(z.dtype)
