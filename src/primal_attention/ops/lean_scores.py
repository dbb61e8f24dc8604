"""From z to the scores and back, for CPUs.

No normalised row is ever stored, since the division commutes with the projection:

    e = (W_{e|X}ᵀ z) / ‖z‖,      dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X}ᵀ = (g / ‖z‖) zᵀ      with g = de

z has its tokens in rows and the scores have them in columns: products write and read both as they are, and every pass
between them runs along the tokens. g sequences with weights of their own, m tokens each; where the weights serve all,
g = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_maps import EPS


def project(z: Tensor, w_x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores, (g, 2, H, s, m), and 1/‖z‖, (g, 2H, m). z: (g, m, 2H, p), w_x: (g, 2, H, s, p)."""
    norm = torch.linalg.vector_norm(z, dim=-1).transpose(1, 2)
    inverse = torch.clamp(norm, min=EPS, out=norm.new_empty(norm.shape)).reciprocal_()
    scores = torch.bmm(w_x.flatten(0, 2), _by_channel(z).mT)
    scores.mul_(inverse.view(-1, 1, inverse.shape[2]))
    return scores.view(*w_x.shape[:4], -1), inverse


def project_backward(grad: Tensor, z: Tensor, w_x: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of z and of w_x from that of the scores, which is overwritten; all wide. Shapes as in `project`."""
    g, m, channels, p = z.shape
    along = (grad * scores).sum(3).view(g, channels, m)
    along.mul_(inverse).mul_(inverse)
    along.masked_fill_(inverse >= 1 / EPS, 0.0)  # where ‖z‖ is below its floor the divisor is a constant
    scaled = grad.view(g * channels, -1, m).mul_(inverse.view(-1, 1, m))
    grad_w_x = torch.bmm(scaled, _by_channel(z)).view(w_x.shape)
    grad_z = z * along.transpose(1, 2)[..., None]
    if g == 1:
        grad_z[0].transpose(0, 1).baddbmm_(scaled.mT, w_x.flatten(0, 2), beta=-1)
    else:
        through = torch.bmm(scaled.mT, w_x.flatten(0, 2)).view(g, channels, m, p)
        torch.sub(through.transpose(1, 2), grad_z, out=grad_z)
    return grad_z, grad_w_x


def _by_channel(z: Tensor) -> Tensor:
    """(g, m, 2H, p) → (g·2H, m, p), without a copy where g = 1."""
    return z.transpose(1, 2).flatten(0, 1)
