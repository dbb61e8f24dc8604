"""Causal softmax attention that streams: rotary positions, and a cache of keys and values that grows with the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rivals.base import Tokens
from .rivals.softmax import SoftmaxAttention
from .rotary import rotary_angles, rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .rivals.base import Common


class CacheState(NamedTuple):
    """All keys and values so far: unlike the other states, this one grows."""

    k: Tensor  # (B, H, T, p), already rotated
    v: Tensor  # (B, H, T, p)
    valid: Tensor  # (B, T): slots that hold a token
    position: Tensor  # (B,): tokens read


class CachedSoftmaxAttention(SoftmaxAttention):
    """Softmax attention for decoders; always causal. rotary: positions of the tokens, padding not counted."""

    def __init__(self, embed_dim: int, num_heads: int, *, rotary: bool = True, **common: Unpack[Common]) -> None:
        common["causal"] = True
        super().__init__(embed_dim, num_heads, **common)
        if rotary and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head width (head_dim={self.head_dim})")
        self.rotary = rotary

    def initial_state(self, batch_size: int) -> CacheState:
        """The state before the first token: an empty cache."""
        weight = self.in_proj.weight
        kv = weight.new_zeros(2, batch_size, self.num_heads, 0, self.head_dim)
        valid = torch.zeros(batch_size, 0, dtype=torch.bool, device=weight.device)
        return CacheState(kv[0], kv[1], valid, torch.zeros(batch_size, dtype=torch.int64, device=weight.device))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: CacheState | None = None,
        return_state: bool = False,
    ) -> Any:
        """y, or (y, state) with `return_state`; `state` resumes where an earlier stretch of the sequences ended."""
        padding = self.read_mask(x, key_padding_mask)
        tokens = Tokens() if padding is None else padding.tokens
        heads, after = self._attend(x if padding is None else padding.enter(x), tokens, state)
        y = self.project_out(heads)
        y = y if padding is None else padding.leave(y)
        return (y, after) if return_state else y

    def _attend(self, x: Tensor, tokens: Tokens, past: CacheState | None) -> tuple[Tensor, CacheState]:
        q, k, v = self.project_in(x)
        batch, n = x.shape[:2]
        place = torch.arange(n, device=x.device)[None]
        if self.rotary:
            angles = rotary_angles(place if past is None else place + past.position[:, None], self.head_dim)
            q, k = rotate(q, *angles), rotate(k, *angles)
        new = torch.ones(batch, n, dtype=torch.bool, device=x.device) if tokens.present is None else tokens.present
        count = new.sum(dim=1)
        if past is None:
            # Padding stands behind every token here, so the causal mask hides it already.
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.weight_dropout)
            return y, CacheState(k, v, new, count)
        k, v = torch.cat([past.k.to(k.dtype), k], dim=2), torch.cat([past.v.to(v.dtype), v], dim=2)
        seen = torch.cat([past.valid[:, None].expand(-1, n, -1), (place <= place.T).expand(batch, -1, -1)], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], dropout_p=self.weight_dropout)
        return y, CacheState(k, v, torch.cat([past.valid, new], dim=1), past.position + count)

    def step(self, x_t: Tensor, state: CacheState) -> tuple[Tensor, CacheState]:
        """One token of each sequence: x_t (B, embed_dim) → y_t, row t of the full pass, and the state after it."""
        y, state = self(x_t[:, None], state=state, return_state=True)
        return y[:, 0], state
