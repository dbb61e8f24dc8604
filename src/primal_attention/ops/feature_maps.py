"""Feature maps φ(x) = g(q(x)) of Remark 4.1, and the normaliser D̂ of the softmax map."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-12
HUGE_NORM = 1e15  # rows above this norm are scaled by HUGE_SCALE, because the sum of their squares would overflow
HUGE_SCALE = 2.0**-80


@dataclass(frozen=True)
class FeatureMap:
    """A feature map and its properties.

    Args:
        apply: the map, applied to tensors of shape (..., head_dim).
        is_normalised: divide both maps by √D̂ (Remark 4.1).
        is_scale_free: φ(c·z) = φ(z) for c > 0, so that a running sum can replace a running mean.
    """

    apply: Callable[[Tensor], Tensor]
    is_normalised: bool = False
    is_scale_free: bool = False


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, states and the objective: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def disabled_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in the dtype of the tensors. The meta device has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cosine(z: Tensor) -> Tensor:
    """Return z / ‖z‖₂ for every row, without overflow for any finite z. The paper's experiments use this map."""
    rows = z.to(accumulation_dtype(z.dtype))
    # A power of two, so that the scaling is exact. The map does not depend on the scale of z.
    is_huge = rows.detach().abs().amax(dim=-1, keepdim=True) > HUGE_NORM
    rows = rows * torch.where(is_huge, HUGE_SCALE, 1.0).to(rows.dtype)
    return (rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=EPS)).to(z.dtype)


COSINE = FeatureMap(cosine, is_scale_free=True)


def positive_random(z: Tensor, frequencies: Tensor) -> Tensor:
    """Return positive random features: ⟨g(q), g(k)⟩ is an unbiased estimate of exp(qᵀk / √p).

    g(z) = exp(−‖z‖²/2)·(exp(w₁ᵀz), …, exp(w_pᵀz)) / √p, with z scaled by p^(−1/4) for the softmax temperature 1/√p.

    Args:
        z: (B, H, N, p).
        frequencies: w, (H, p, p).
    """
    p = z.shape[-1]
    rows = z.to(accumulation_dtype(z.dtype)) * p**-0.25
    with disabled_autocast(z.device):  # an error in the exponent is a factor in the result
        logits = rows @ frequencies.to(rows.dtype).mT - rows.square().sum(-1, keepdim=True) / 2
    return (logits.exp() * p**-0.5).to(z.dtype)


def normalise_features(phi_q: Tensor, phi_k: Tensor, key_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply both maps by D̂^(−1/2), with D̂_i = φ_q(x_i)ᵀ Σ_j φ_k(x_j).

    Args:
        phi_q: (B, H, N, p).
        phi_k: (B, H, N, p).
        key_sum: Σ_j φ_k(x_j), (B, H, 1 or N, p).
    """
    dtype = accumulation_dtype(phi_q.dtype)
    scale = (phi_q.to(dtype) * key_sum.to(dtype)).sum(-1, keepdim=True).clamp(min=EPS).rsqrt()  # (B, H, N, 1)
    return (phi_q.to(dtype) * scale).to(phi_q.dtype), (phi_k.to(dtype) * scale).to(phi_k.dtype)


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32)  # QR needs it


def orthogonal_gaussian(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """(rows, columns): orthogonal in blocks of `columns` rows, each row distributed as a Gaussian vector."""
    blocks = -(-rows // columns)
    q, r = torch.linalg.qr(gaussian(generator, blocks, columns, columns))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform over rotations: QR fixes the signs
    directions = q.mT.flatten(0, 1)[:rows]
    return directions * gaussian(generator, rows, columns).norm(dim=1, keepdim=True)
