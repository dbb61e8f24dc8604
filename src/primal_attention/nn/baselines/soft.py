"""SOFT, the softmax-free Transformer: a Gaussian kernel with shared q and k, through m landmarks,

    S_ij = exp(-‖q_i - q_j‖² / (2√p)),   Y = S(Q, Q̃) · S(Q̃, Q̃)⁺ · S(Q̃, Q) · V,   Q̃: segment means.

Lu et al., "SOFT: Softmax-free Transformer with Linear Complexity", NeurIPS 2021. The inverse is Newton's. Segment means
are the paper's average pooling over one axis; its convolutional sampling is for images. A sequence of at most m
tokens gets the exact kernel.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from ...ops.padding import Tokens
from .. import checks
from .base import BaselineAttention
from .nystrom import choose_by_length, means


class SoftAttention(BaselineAttention):
    """Attention with a Gaussian kernel, approximated by the Nyström method.

    Args:
        landmarks: m, 49 in the paper.
        newton_iterations: iterations of the inverse, 20 in the paper.
    """

    projections = 2

    def __init__(
        self, embed_dim: int, num_heads: int, *, landmarks: int = 49, newton_iterations: int = 20, **common: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("landmarks", landmarks)
        checks.positive("newton_iterations", newton_iterations)
        self.landmarks, self.newton_iterations = landmarks, newton_iterations

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, v = self.project_in(x)
        q, v = tokens.zero_padding(q) * self.head_dim**-0.25, tokens.zero_padding(v)

        def kernel_attention(n: int) -> Tensor:
            return gaussian_kernel(q[:, :, :n], q[:, :, :n]) @ v[:, :, :n]  # v is zero at padding

        return choose_by_length(x, tokens, self.landmarks, kernel_attention, lambda: self._approximate(q, v, tokens))

    def _approximate(self, q: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        q_mean = means(q, self.landmarks, tokens)
        high = q_mean.to(accumulation_dtype(q.dtype))
        inverse = newton_inverse(gaussian_kernel(high, high), self.newton_iterations)  # (B, H, m, m)
        to_landmarks = gaussian_kernel(q, q_mean)  # (B, H, N, m)
        gathered = to_landmarks.mT @ v  # (B, H, m, p)
        return to_landmarks @ (inverse @ gathered.to(inverse.dtype)).to(v.dtype)


def gaussian_kernel(a: Tensor, b: Tensor) -> Tensor:
    """exp(-‖a_i - b_j‖² / 2), (…, N, M)."""
    distance = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2) - 2 * a @ b.mT
    return (distance.clamp(min=0.0) / -2).exp()


def newton_inverse(a: Tensor, iterations: int) -> Tensor:
    """A⁺ of a symmetric positive semi-definite A by Z ← 2 Z - Z A Z, from Z = α A.

    α = 1.8 / ‖A‖₁²: below 2 / ‖A‖₁², where an eigenvalue equal to the norm does not converge.
    """
    z = a * (1.8 / a.abs().sum(-2).amax(-1).square())[..., None, None]
    for _ in range(iterations):
        z = 2 * z - z @ a @ z
    return z
