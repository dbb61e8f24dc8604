"""Averaged weights: a mean over the last steps that is measured and saved in place of the weights themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines.random_buffers import drawn_buffers


def average_share(decay: float, step: int) -> float:
    """How far the average moves towards the weights; early steps use a shorter memory, or the start would linger."""
    return 1 - min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, share: float | Tensor) -> None:
    """Move the averaged weights towards the model's. A share on the device is for steps that are recorded.

    Counts and random draws are the model's own: a mean of independent draws is no draw, it is shorter.
    """
    taken = drawn_buffers(model)
    means, news = [], []
    for (name, mean), new in zip(averaged.state_dict().items(), model.state_dict().values(), strict=True):
        if name in taken or not mean.is_floating_point():
            mean.copy_(new)
        elif isinstance(share, Tensor):
            means.append(mean)
            news.append(new)
        else:
            mean.lerp_(new, share)
    if isinstance(share, Tensor):
        steps = torch._foreach_sub(news, means)
        torch._foreach_mul_(steps, share)
        torch._foreach_add_(means, steps)
