"""Linear attention: y_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j), with φ(z) = elu(z) + 1.

Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", ICML 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernelized import KernelizedAttention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .base import Common


class LinearAttention(KernelizedAttention):
    """eps: added to the denominator, as in the authors' code."""

    name = "linear"
    order_matters = False

    def __init__(self, embed_dim: int, num_heads: int, *, eps: float = 1e-6, **common: Unpack[Common]) -> None:
        super().__init__(embed_dim, num_heads, **common)
        self.eps = eps

    @property
    def num_features(self) -> int:
        return self.head_dim

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return elu_plus_one(q), elu_plus_one(k)

    def divide(self, num: Tensor, den: Tensor) -> Tensor:
        return (num / (den + self.eps).unsqueeze(-1)).to(num.dtype)


def elu_plus_one(z: Tensor) -> Tensor:
    """elu(z) + 1 from simpler operations: the compiled backward of torch's elu fails on transposed input."""
    return z.clamp(min=0.0) + z.clamp(max=0.0).exp()
