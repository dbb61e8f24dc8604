"""Landmarks as segment means, and the iterative inverses of the small matrices between them.

Landmark l of m is the mean of tokens ⌊l·L/m⌋ … ⌊(l+1)·L/m⌋ - 1 of a sequence of L tokens: segments that differ by one
token at most, for any L ≥ m.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Tokens


def segment_means(count: int, tokens: Tokens, like: Tensor) -> Tensor:
    """The matrix, (B or 1, 1, m, N), that takes tokens to their landmarks; `like`: (B, H, N, p)."""
    length = like.shape[2]
    slot = torch.arange(length, device=like.device)
    lengths = slot.new_full((1,), length) if tokens.lengths is None else tokens.lengths
    segment = ((slot + 1) * count - 1) // lengths[:, None]  # (B, N), at least m behind the last token
    landmark = torch.arange(count, device=like.device)
    member = (segment[:, None, :] == landmark[:, None]).to(like.dtype)  # (B, m, N)
    return (member / member.sum(-1, keepdim=True).clamp(min=1.0)).unsqueeze(1)


def means(t: Tensor, count: int, tokens: Tokens) -> Tensor:
    """Landmarks of t: (B, H, N, p) → (B, H, m, p)."""
    if tokens.lengths is None and t.shape[2] % count == 0:
        return t.unflatten(2, (count, -1)).mean(dim=3)
    return segment_means(count, tokens, t) @ t


def prefix(tokens: Tokens, count: int) -> Tokens:
    """The first `count` slots: all of a sequence that has no more tokens than that."""
    if tokens.valid is None or tokens.present is None:
        return tokens
    return Tokens(tokens.present[:, :count], tokens.valid[:, :count], tokens.lengths)


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


def newton_inverse(a: Tensor, iterations: int) -> Tensor:
    """A⁺ of a symmetric positive semi-definite A by Z ← 2 Z - Z A Z, from Z = α A.

    α = 1.8 / ‖A‖₁²: a little below 2 / ‖A‖₁², where an eigenvalue equal to the norm would never settle.
    """
    z = a * (1.8 / a.abs().sum(-2).amax(-1).square())[..., None, None]
    for _ in range(iterations):
        z = 2 * z - z @ a @ z
    return z
