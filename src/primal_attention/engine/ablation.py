"""Primal-Attention without its r-scores: o = W_o [e; 0], the paper's ablation of the second set of projections.

The columns of W_o that read r are zero and stay so. r still takes part in the objective J, which is about both sides of
the singular value decomposition. Parameter names change, so weights of an ablated model fit ablated models only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from primal_attention.nn.objective import primal_layers


class LeftHalf(nn.Module):
    """A weight (p, 2s) whose right half, the columns of r, is zero."""

    def forward(self, weight: Tensor) -> Tensor:
        rank = weight.shape[-1] // 2
        return torch.cat([weight[..., :rank], torch.zeros_like(weight[..., rank:])], dim=-1)


def without_r_scores(model: nn.Module) -> nn.Module:
    """Cut the r-scores off the outputs of all Primal layers of a model, in place."""
    for layer in primal_layers(model).values():
        parametrize.register_parametrization(layer.score_proj, "weight", LeftHalf())
    return model
