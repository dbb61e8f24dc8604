"""Optimizers by their name in a recipe, learning-rate schedules, and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines.random_buffers import drawn_buffers
from primal_attention.train.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig, *, recordable: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe. Weight decay applies to matrices only, not to biases, norms and other vectors.

    Args:
        model: Its trainable parameters are optimized.
        config: Name and settings.
        recordable: Steps can be captured in a CUDA graph.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    betas = (0.9, config.beta2)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    options = {"capturable": True, "foreach" if config.name == "radam" else "fused": True} if recordable else {}
    optimizer = kinds[config.name](groups, lr=config.lr, betas=betas, eps=config.eps, **options)
    # The eager steps before the capture are intended; torch would warn about them.
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return optimizer


def learning_rate(config: OptimConfig, total: int, warmup_total: int = 0) -> Callable[[int], float]:
    """Return the learning rate as a function of the step.

    Args:
        config: Peak rate and schedule.
        total: Steps of the training.
        warmup_total: Steps that `warmup` is a part of, if not `total`: those of a run before it was extended.
    """
    warmup = max(1, round((warmup_total or total) * config.warmup))

    def factor(step: int) -> float:
        if config.schedule == "constant":
            return 1.0
        if config.schedule in ("warmup", "inverse-sqrt"):
            late = 1.0 if config.schedule == "warmup" else math.sqrt(warmup / max(step + 1, warmup))
            return min((step + 1) / warmup, late)
        return one_cycle(step, warmup, total, linear=config.schedule == "onecycle-linear")

    return lambda step: config.lr * factor(step)


def one_cycle(step: int, warmup: int, total: int, *, linear: bool = False) -> float:
    """Return the factor on the peak learning rate: from 1/25 up to 1, then down to 0, as a cosine or linear."""

    def shape(part: float) -> float:
        return part if linear else (1 - math.cos(math.pi * part)) / 2

    if step < warmup:
        return 1 / 25 + (1 - 1 / 25) * shape(step / warmup)
    return 1 - shape(min(1.0, (step - warmup) / max(1, total - warmup)))


def average_share(decay: float, step: int) -> float:
    """Return the weight of the new parameters in the average; larger in early steps, to discard the initial ones."""
    return 1 - min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, share: float | Tensor) -> None:
    """Move the averaged weights towards the model's by `share`, which is a tensor in captured steps.

    Counts and random draws are copied: a mean of independent draws is not a draw.
    """
    copied = drawn_buffers(model)
    means, news = [], []
    for (name, mean), new in zip(averaged.state_dict().items(), model.state_dict().values(), strict=True):
        if name in copied or not mean.is_floating_point():
            mean.copy_(new)
        elif not isinstance(share, Tensor):
            mean.lerp_(new, share)
        else:
            means.append(mean)
            news.append(new)
    if isinstance(share, Tensor):
        steps = torch._foreach_sub(news, means)
        torch._foreach_mul_(steps, share)
        torch._foreach_add_(means, steps)
