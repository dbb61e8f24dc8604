"""The feature maps φ(x) = g(q(x)) of Remark 4.1, and the normaliser D̂ that the softmax map asks for."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-12


def cosine(z: Tensor) -> Tensor:
    """g(z) = z / ‖z‖₂, the map of all experiments of the paper. Does not see the scale of z."""
    wide = z if z.dtype == torch.float64 else z.float()
    return (wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=EPS)).to(z.dtype)


def positive_random(z: Tensor, frequencies: Tensor) -> Tensor:
    """g(z) = exp(−‖z‖²/2)·(exp(w₁ᵀz), …, exp(w_pᵀz)) / √p: ⟨g(q), g(k)⟩ estimates exp(qᵀk / √p) without bias.

    z: (B, H, N, p), frequencies: (H, p, p). The p^(−1/4) on z is the usual 1/√p temperature of the softmax.
    """
    p = z.shape[-1]
    wide = (z if z.dtype == torch.float64 else z.float()) * p**-0.25
    with torch.autocast(z.device.type, enabled=False):  # an error in the exponent is a factor in the result
        logits = wide @ frequencies.to(wide.dtype).mT - wide.square().sum(-1, keepdim=True) / 2
    return (logits.exp() * p**-0.5).to(z.dtype)


def normalise_both(phi_q: Tensor, phi_k: Tensor, key_sum: Tensor) -> tuple[Tensor, Tensor]:
    """D̂^(−1/2) on both maps, with D̂_i = φ_q(x_i)ᵀ Σ_j φ_k(x_j). key_sum: (B, H, 1 or N, p)."""
    wide = torch.promote_types(phi_q.dtype, torch.float32)
    scale = (phi_q.to(wide) * key_sum.to(wide)).sum(-1, keepdim=True).clamp(min=EPS).rsqrt()  # (B, H, N, 1)
    return (phi_q.to(wide) * scale).to(phi_q.dtype), (phi_k.to(wide) * scale).to(phi_k.dtype)
