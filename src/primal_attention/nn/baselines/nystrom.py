"""Nyströmformer: softmax attention through m landmarks,

    Y = softmax(Q K̃ᵀ/√p) · softmax(Q̃ K̃ᵀ/√p)⁺ · softmax(Q̃ Kᵀ/√p) · V + DConv(V),   Q̃, K̃: segment means.

Xiong et al., "Nyströmformer: A Nyström-based Algorithm for Approximating Self-Attention", AAAI 2021. The pseudo-inverse
is iterative, started from each matrix's own norms. A sequence of m tokens or fewer gets softmax attention itself.
Landmark l of m is the mean of tokens ⌊l·L/m⌋ … ⌊(l+1)·L/m⌋ - 1 of a sequence of L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.feature_maps import accumulation_dtype
from .. import checks
from ..padding import Tokens
from .base import BaselineAttention


class NystromAttention(BaselineAttention):
    """Softmax attention approximated by the Nyström method.

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
        **common: Any,
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
                mask = tokens.key_mask()
                assert mask is not None
                short = F.scaled_dot_product_attention(q[:, :, :m], k[:, :, :m], v[:, :, :m], mask[..., :m])
                y = choose_short(tokens, m, short, y)
        return y if self.conv is None else y + self.conv(v)

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        scale = self.head_dim**-0.5
        q_mean, k_mean = means(q, self.landmarks, tokens), means(k, self.landmarks, tokens)
        between = (q_mean @ k_mean.mT * scale).softmax(-1)  # (B, H, m, m)
        inverse = iterative_pinv(between.to(accumulation_dtype(between.dtype)), self.pinv_iterations)
        gathered = F.scaled_dot_product_attention(q_mean, k, v, tokens.key_mask())  # (B, H, m, p)
        weighted = (inverse @ gathered.to(inverse.dtype)).to(v.dtype)
        return F.scaled_dot_product_attention(q, k_mean, weighted)


def means(t: Tensor, count: int, tokens: Tokens) -> Tensor:
    """Landmarks of t: (B, H, N, p) → (B, H, m, p)."""
    length = t.shape[2]
    if tokens.lengths is None and length % count == 0:
        return t.unflatten(2, (count, -1)).mean(dim=3)
    slot = torch.arange(length, device=t.device)
    lengths = slot.new_full((1,), length) if tokens.lengths is None else tokens.lengths
    segment = ((slot + 1) * count - 1) // lengths[:, None]  # (B, N), at least m behind the last token
    landmark = torch.arange(count, device=t.device)
    member = (segment[:, None, :] == landmark[:, None]).to(t.dtype)  # (B, m, N)
    return (member / member.sum(-1, keepdim=True).clamp(min=1.0)).unsqueeze(1) @ t


def choose_short(tokens: Tokens, count: int, short: Tensor, long: Tensor) -> Tensor:
    """`short` (B, H, m, p), where a sequence has m tokens at most; `long` (B, H, N, p) elsewhere."""
    assert tokens.lengths is not None
    is_short = (tokens.lengths <= count)[:, None, None, None]
    return torch.where(is_short, F.pad(short, (0, 0, 0, long.shape[2] - short.shape[2])), long)


def iterative_pinv(a: Tensor, iterations: int) -> Tensor:
    """A⁺ by Z ← ¼ Z (13 I - AZ (15 I - AZ (7 I - AZ))), from Z = Aᵀ / (‖A‖₁ ‖A‖∞), each matrix by its own norms."""
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.mT / norms[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
