"""Longformer: softmax attention in a sliding window, with a few global tokens that are visible to all,

    y_i = Σ_j softmax_j(q_i·k_j/√p) v_j over {j : |i - j| ≤ w/2} ∪ {global}; global i over all j, with their own W.

Beltagy et al., "Longformer: The Long-Document Transformer", 2020. The first tokens of a sequence are the global ones.
The window is computed in chunks of w/2 queries against three chunks of keys, so no N×N matrix is formed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.padding import Tokens
from ...ops.reference import split_heads
from .. import checks
from .base import BaselineAttention


class LongformerAttention(BaselineAttention):
    """Softmax attention in a sliding window, with a few global tokens.

    Args:
        window: w, an even number: each token attends to itself and w/2 tokens on either side.
        global_tokens: how many tokens at the start of each sequence are global; 0 for the window only.
    """

    drops_weights = True

    def __init__(
        self, embed_dim: int, num_heads: int, *, window: int = 128, global_tokens: int = 1, **common: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("window", window)
        if window % 2:
            raise ValueError(f"window must be even: half of it on either side (got {window})")
        if global_tokens < 0:
            raise ValueError(f"global_tokens must be at least 0 (got {global_tokens})")
        self.window, self.global_tokens = window, global_tokens
        self.global_proj: nn.Linear | None = None
        if global_tokens:
            bias, weight = self.in_proj.bias is not None, self.in_proj.weight
            # Rows [W_q; W_k; W_v], for the global tokens' own attention.
            self.global_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=weight.device, dtype=weight.dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        y = self._windowed(x, tokens)
        if self.global_proj is None:
            return y
        return torch.cat([self._global(x, tokens), y[:, :, self.global_tokens :]], dim=2)

    def _global(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The attention of the global tokens over all tokens."""
        assert self.global_proj is not None
        weights = self.global_proj.weight.chunk(3)
        biases = (None,) * 3 if self.global_proj.bias is None else self.global_proj.bias.chunk(3)
        inputs = (x[:, : self.global_tokens], x, x)  # queries are needed for the global tokens only
        q, k, v = (split_heads(F.linear(*args), self.num_heads) for args in zip(inputs, weights, biases, strict=True))
        return F.scaled_dot_product_attention(q, k, v, tokens.key_mask(), dropout_p=self.weight_dropout)

    def _windowed(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The attention of each token over its window and the global tokens."""
        q, k, v = self.project_in(x)
        batch, _, length, _ = q.shape
        half = self.window // 2
        chunks = -(-length // half)
        q, k, v = (_by_chunk(t, half, chunks) for t in (q, k, v))  # (B, n, H, C, p)
        shared = min(self.global_tokens, length)
        first_k, first_v = (t.transpose(1, 2).flatten(2, 3)[:, None, :, :shared] for t in (k, v))
        first_k, first_v = (t.expand(-1, chunks, -1, -1, -1) for t in (first_k, first_v))
        k, v = (torch.cat([first, _neighbours(t)], dim=3) for first, t in ((first_k, k), (first_v, v)))
        is_visible = self._visible_keys(tokens, length, chunks, q.device)  # (B or 1, n, C, g + 3C)
        is_visible = is_visible.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
        y = F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_visible, dropout_p=self.weight_dropout
        )  # (B·n, H, C, p)
        return y.unflatten(0, (batch, chunks)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    def _visible_keys(self, tokens: Tokens, length: int, chunks: int, device: torch.device) -> Tensor:
        """The mask of visible keys of each query, in the order [global, previous chunk, own chunk, next chunk]."""
        half = self.window // 2
        query = torch.arange(chunks * half, device=device).view(1, chunks, half, 1)
        key = torch.arange(3 * half, device=device) + (torch.arange(chunks, device=device) * half - half)[:, None]
        key = key.view(1, chunks, 1, 3 * half)
        end = length if tokens.lengths is None else tokens.lengths.view(-1, 1, 1, 1)
        # Global tokens in the window are counted once.
        window = ((query - key).abs() <= half) & (key >= self.global_tokens) & (key < end)
        # A slot after the end attends to itself, so that its softmax, which is discarded, is not empty.
        window = window | ((query == key) & (query >= end))
        shared = torch.arange(min(self.global_tokens, length), device=device).view(1, 1, 1, -1) < end
        return torch.cat([shared.expand(-1, chunks, half, -1), window], dim=-1)


def _by_chunk(t: Tensor, size: int, chunks: int) -> Tensor:
    """(B, H, N, p) → (B, n, H, C, p), zeros after the end."""
    return F.pad(t, (0, 0, 0, chunks * size - t.shape[2])).unflatten(2, (chunks, size)).transpose(1, 2)


def _neighbours(t: Tensor) -> Tensor:
    """Previous, own and next chunk side by side: (B, n, H, C, p) → (B, n, H, 3C, p)."""
    padded = F.pad(t, (0, 0, 0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], dim=3)
