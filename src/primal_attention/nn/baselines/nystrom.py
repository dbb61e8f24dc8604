"""Nyströmformer: softmax attention through m landmarks,

    Y = softmax(Q K̃ᵀ/√p) · softmax(Q̃ K̃ᵀ/√p)⁺ · softmax(Q̃ Kᵀ/√p) · V + DConv(V),   Q̃, K̃: segment means.

Xiong et al., "Nyströmformer: A Nyström-based Algorithm for Approximating Self-Attention", AAAI 2021. The pseudo-inverse
is iterative and starts from the norms of each matrix. A sequence of at most m tokens gets exact softmax attention.
Landmark l of m is the mean of tokens ⌊l·L/m⌋ … ⌊(l+1)·L/m⌋ - 1 of a sequence of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.feature_maps import accumulation_dtype
from ...ops.padding import Tokens
from .. import checks
from .base import BaselineAttention


class NystromAttention(BaselineAttention):
    """Softmax attention approximated by the Nyström method.

    Args:
        landmarks: m.
        pinv_iterations: iterations of the pseudo-inverse.
        conv_kernel: width of the depthwise convolution of the values, one filter per head; None leaves it out.
    """

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

        def softmax_attention(n: int) -> Tensor:
            mask = tokens.key_mask()
            mask = None if mask is None else mask[..., :n]
            return F.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], mask)

        y = choose_by_length(x, tokens, self.landmarks, softmax_attention, lambda: self._approximate(q, k, v, tokens))
        return y if self.conv is None else y + self.conv(v)

    def _approximate(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
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
    segment = ((slot + 1) * count - 1) // lengths[:, None]  # (B, N), at least m after the last token
    landmark = torch.arange(count, device=t.device)
    member = (segment[:, None, :] == landmark[:, None]).to(t.dtype)  # (B, m, N)
    return (member / member.sum(-1, keepdim=True).clamp(min=1.0)).unsqueeze(1) @ t


def choose_by_length(
    x: Tensor, tokens: Tokens, count: int, exact: Callable[[int], Tensor], approximate: Callable[[], Tensor]
) -> Tensor:
    """`exact` attention among the first slots for sequences of `count` tokens at most, else `approximate` attention."""
    length = x.shape[1]
    if length <= count:
        return exact(length)
    y = approximate()  # (B, H, N, p)
    if tokens.lengths is None:
        return y
    is_short = (tokens.lengths <= count)[:, None, None, None]
    return torch.where(is_short, F.pad(exact(count), (0, 0, 0, length - count)), y)


def iterative_pinv(a: Tensor, iterations: int) -> Tensor:
    """A⁺ by Z ← ¼ Z (13 I - AZ (15 I - AZ (7 I - AZ))), from Z = Aᵀ / (‖A‖₁ ‖A‖∞), with the norms of each matrix."""
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.mT / norms[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
