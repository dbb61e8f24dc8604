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

from ..feature_maps import EPS

LONG = 128  # tokens from which a sequence is worth calls of its own


def one_by_one(g: int, m: int) -> bool:
    """Whether to take the sequences one after the other as they stand, or all at once, in copies by head."""
    return g == 1 or m >= LONG


def project(z: Tensor, w_x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores, (g, 2, H, s, m), and 1/‖z‖, (g, 2H, m). z: (g, m, 2H, p), w_x: (g, 2, H, s, p)."""
    norm = torch.linalg.vector_norm(z, dim=-1).transpose(1, 2)
    inverse = torch.clamp(norm, min=EPS, out=norm.new_empty(norm.shape)).reciprocal_()
    (g, channels, m), w = inverse.shape, w_x.flatten(1, 2)
    scores = z.new_empty(g, channels, w.shape[2], m)
    if one_by_one(g, m):
        for i in range(g):
            torch.bmm(w[i], z[i].permute(1, 2, 0), out=scores[i])
    else:
        torch.bmm(w.flatten(0, 1), _by_channel(z).mT, out=scores.view(g * channels, -1, m))
    scores.mul_(inverse[:, :, None])
    return scores.view(*w_x.shape[:4], m), inverse


def project_backward(grad: Tensor, z: Tensor, w_x: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of z and of w_x from that of the scores, which is overwritten; all wide. Shapes as in `project`."""
    (g, channels, m), w = inverse.shape, w_x.flatten(1, 2)
    along = (grad * scores).sum(3).view(g, channels, m)
    along.mul_(inverse).mul_(inverse)
    along.masked_fill_(inverse >= 1 / EPS, 0.0)  # where ‖z‖ is below its floor the divisor is a constant
    scaled = grad.view(g, channels, -1, m).mul_(inverse[:, :, None])
    grad_z = z * along.transpose(1, 2)[..., None]
    grad_w = torch.empty_like(w)
    if one_by_one(g, m):
        for i in range(g):
            torch.bmm(scaled[i], z[i].transpose(0, 1), out=grad_w[i])
            grad_z[i].transpose(0, 1).baddbmm_(scaled[i].mT, w[i], beta=-1)
    else:
        flat = scaled.flatten(0, 1)
        torch.bmm(flat, _by_channel(z), out=grad_w.flatten(0, 1))
        through = torch.bmm(flat.mT, w.flatten(0, 1)).view(g, channels, m, -1)
        torch.sub(through.transpose(1, 2), grad_z, out=grad_z)
    return grad_z, grad_w.view(w_x.shape)


def _by_channel(z: Tensor) -> Tensor:
    """(g, m, 2H, p) → (g·2H, m, p)."""
    return z.transpose(1, 2).flatten(0, 1)
