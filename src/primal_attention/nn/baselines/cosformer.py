"""cosFormer: linear attention with ReLU features and a weight that decreases with distance,

    s_ij = relu(q_i)·relu(k_j) cos(π/2 · (i - j)/M),   y_i = Σ_j s_ij v_j / Σ_j s_ij,

which is linear because the cosine of a difference splits into products. Qin et al., "cosFormer: Rethinking Softmax in
Attention", ICLR 2022. Positions count valid tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from .. import checks
from .linear import KernelizedAttention

CAUSAL_MAX_LENGTH = 4096


class CosformerAttention(KernelizedAttention):
    """Linear attention with relu features and cosine weights of the distance.

    Args:
        max_length: M. None is the length of each sequence, as in the authors' code. In a causal layer the length is
            unknown and M is a number, 4096 by default; longer inputs raise an error. The length of a stream is not
            checked, because reading its position would synchronise with the device at every step.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, max_length: int | None = None, **common: Any) -> None:
        super().__init__(embed_dim, num_heads, **common)
        if max_length is not None:
            checks.positive("max_length", max_length)
        self.max_length = CAUSAL_MAX_LENGTH if self.causal and max_length is None else max_length
        self.num_features = 2 * self.head_dim

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = q.shape[2]
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"max_length={self.max_length} is exceeded by an input of {length} tokens")
        horizon = lengths[:, None] if self.max_length is None else self.max_length
        angle = (positions.to(accumulation_dtype(q.dtype)) * (math.pi / 2) / horizon)[:, None, :, None]
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        q, k = q.relu(), k.relu()
        return torch.cat([q * cos, q * sin], dim=-1), torch.cat([k * cos, k * sin], dim=-1)
