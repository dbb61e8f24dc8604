"""Rotary positions: pairs of coordinates of q and k are turned by angles that grow with the token's position,

    q_i·k_j then depends on i − j, whatever i and j are.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rotary_angles(positions: Tensor, head_dim: int, base: float = BASE) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles in float32: positions (B or 1, N) → (B or 1, 1, N, head_dim / 2)."""
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head width (head_dim={head_dim})")
    speed = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[:, None, :, None].float() * speed
    return angle.cos(), angle.sin()


def rotate(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """z (B, H, N, p) with coordinate m and m + p/2 turned together, in float32 and back."""
    a, b = z.float().chunk(2, dim=-1) if z.dtype in (torch.bfloat16, torch.float16) else z.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(z.dtype)


def sinusoids(positions: Tensor, embed_dim: int) -> Tensor:
    """The first Transformer's positions, to be added to embeddings: (B or 1, N) → (B or 1, N, embed_dim).

    As the toolkit behind the published language models lays them out: all sines, then all cosines, wave lengths from
    2π to 2π·10⁴, and the first token at position 2.
    """
    half = max(embed_dim // 2, 1)
    speed = BASE ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / max(half - 1, 1))
    angle = (positions[..., None] + 2).float() * speed
    return torch.cat([angle.sin(), angle.cos(), torch.zeros_like(angle[..., : embed_dim % 2])], dim=-1)
