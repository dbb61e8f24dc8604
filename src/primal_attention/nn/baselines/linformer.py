"""Linformer: softmax attention over keys and values projected from N to k rows,

    Y = softmax(Q (E K)ᵀ / √p) (F V),   E, F: (k, N), learned, shared by the heads.

Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020. E and F are parameters over positions: there are
`max_length` of them, and a sequence of L tokens uses the first L.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.padding import Tokens
from .. import checks
from .base import BaselineAttention


class LinformerAttention(BaselineAttention):
    """Softmax attention over keys and values that are projected to a fixed number of rows.

    Args:
        projected_length: k.
        max_length: the longest input. The number of parameters grows with it.
    """

    drops_weights = True

    def __init__(
        self, embed_dim: int, num_heads: int, *, projected_length: int = 256, max_length: int = 4096, **common: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("projected_length", projected_length)
        checks.positive("max_length", max_length)
        self.projected_length, self.max_length = projected_length, max_length
        like = self.in_proj.weight
        self.key_rows = nn.Parameter(torch.empty(max_length, projected_length, device=like.device, dtype=like.dtype))
        self.value_rows = nn.Parameter(torch.empty_like(self.key_rows))
        for rows in (self.key_rows, self.value_rows):
            # As the paper's analysis draws them: projections that keep inner products in expectation.
            nn.init.normal_(rows, std=projected_length**-0.5)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        length = x.shape[1]
        if length > self.max_length:
            raise ValueError(f"max_length={self.max_length} is exceeded by an input of {length} tokens")
        q, k, v = self.project_in(x)
        k, v = tokens.zero_padding(k), tokens.zero_padding(v)
        k = self.key_rows[:length].T @ k  # (B, H, k, p)
        v = self.value_rows[:length].T @ v
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.weight_dropout)
