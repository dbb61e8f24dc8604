"""Nyströmformer: softmax attention through m landmarks,

    Y = softmax(Q K̃ᵀ/√p) · softmax(Q̃ K̃ᵀ/√p)⁺ · softmax(Q̃ Kᵀ/√p) · V + DConv(V),   Q̃, K̃: segment means.

Xiong et al., "Nyströmformer: A Nyström-based Algorithm for Approximating Self-Attention", AAAI 2021. The pseudo-inverse
is iterative, started from each matrix's own norms. A sequence of m tokens or fewer gets softmax attention itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.reference import wide
from .. import checks
from .base import RivalAttention, Tokens
from .landmarks import choose_short, iterative_pinv, means, prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .base import Common


class NystromAttention(RivalAttention):
    """
    Args:
        landmarks: m.
        pinv_iterations: of the pseudo-inverse.
        conv_kernel: width of the depthwise convolution of the values, one filter per head; None leaves it out.
    """

    name = "nystrom"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        landmarks: int = 64,
        pinv_iterations: int = 6,
        conv_kernel: int | None = 35,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        checks.positive("landmarks", landmarks)
        checks.positive("pinv_iterations", pinv_iterations)
        self.landmarks, self.pinv_iterations = landmarks, pinv_iterations
        self.conv: nn.Conv2d | None = None
        if conv_kernel is not None:
            checks.positive("conv_kernel", conv_kernel)
            if conv_kernel % 2 == 0:
                raise ValueError(f"conv_kernel must be odd (got {conv_kernel})")
            self.conv = nn.Conv2d(
                num_heads,
                num_heads,
                (conv_kernel, 1),
                padding=(conv_kernel // 2, 0),
                groups=num_heads,
                bias=False,
                device=self.in_proj.weight.device,
                dtype=self.in_proj.weight.dtype,
            )

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        q, k, v = tokens.zero_padding(q), tokens.zero_padding(k), tokens.zero_padding(v)
        m = self.landmarks
        if x.shape[1] <= m:
            y = F.scaled_dot_product_attention(q, k, v, tokens.key_mask())
        else:
            y = self._through_landmarks(q, k, v, tokens)
            if tokens.lengths is not None:
                head = prefix(tokens, m).key_mask()
                short = F.scaled_dot_product_attention(q[:, :, :m], k[:, :, :m], v[:, :, :m], head)
                y = choose_short(tokens, m, short, y)
        return y if self.conv is None else y + self.conv(v)

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        scale = self.head_dim**-0.5
        q_mean, k_mean = means(q, self.landmarks, tokens), means(k, self.landmarks, tokens)
        between = (q_mean @ k_mean.mT * scale).softmax(-1)  # (B, H, m, m)
        inverse = iterative_pinv(between.to(wide(between.dtype)), self.pinv_iterations)
        gathered = F.scaled_dot_product_attention(q_mean, k, v, tokens.key_mask())  # (B, H, m, p)
        weighted = (inverse @ gathered.to(inverse.dtype)).to(v.dtype)
        return F.scaled_dot_product_attention(q, k_mean, weighted)
