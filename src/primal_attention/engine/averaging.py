"""Averaged weights: a mean over the last steps that is measured and saved in place of the weights themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def average_share(decay: float, step: int) -> float:
    """How far the average moves towards the weights; early steps use a shorter memory, or the start would linger."""
    return 1 - min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, share: float | Tensor) -> None:
    """Move the averaged weights towards the model's. A share on the device is for steps that are recorded."""
    pairs = list(zip(averaged.state_dict().values(), model.state_dict().values(), strict=True))
    for mean, new in pairs:
        if not mean.is_floating_point():
            mean.copy_(new)
        elif not isinstance(share, Tensor):
            mean.lerp_(new, share)
    if isinstance(share, Tensor):
        means, news = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        steps = torch._foreach_sub(news, means)
        torch._foreach_mul_(steps, share)
        torch._foreach_add_(means, steps)
