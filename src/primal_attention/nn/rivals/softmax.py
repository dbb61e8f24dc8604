"""Softmax attention: y_i = Σ_j softmax_j(q_i·k_j / √p) v_j, through torch's fused kernels.

Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .base import RivalAttention, Tokens


class SoftmaxAttention(RivalAttention):
    """The canonical Transformer's attention. Memory is linear where torch has a fused kernel, else quadratic."""

    name = "softmax"
    complexity = "O(N²)"
    linear_memory = False
    supports_causal = True
    order_matters = False
    drops_weights = True

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        # Causal: padding stands behind every token, so the causal mask hides it already.
        mask = None if self.causal else tokens.key_mask()
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, dropout_p=self.weight_dropout
        )
