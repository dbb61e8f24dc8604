"""Optimisers by their name in a recipe, and how the learning rate rises and falls."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from primal_attention.engine.config import OptimConfig
from primal_attention.engine.recordable import RecordableRAdam


def make_optimizer(model: nn.Module, config: OptimConfig, *, recordable: bool = False) -> torch.optim.Optimizer:
    """Optimiser with decay on matrices only: biases, norms and other vectors carry scale, not capacity.

    recordable: its steps can stand in a CUDA graph.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    betas = (0.9, config.beta2)
    if config.name == "radam":
        radam = RecordableRAdam if recordable else torch.optim.RAdam
        return radam(groups, lr=config.lr, betas=betas, eps=config.eps)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    options = {"fused": True, "capturable": True} if recordable else {}
    optimizer = kind(groups, lr=config.lr, betas=betas, eps=config.eps, **options)
    # torch would warn that the first steps, before the recording, are not recorded.
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return optimizer


def schedule(config: OptimConfig, total: int) -> Callable[[int], float]:
    """The factor on the learning rate at each of `total` steps."""
    warmup = max(1, round(total * config.warmup))
    if config.schedule in ("warmup", "inverse-sqrt"):

        def rise(step: int) -> float:
            late = 1.0 if config.schedule == "warmup" else math.sqrt(warmup / max(step + 1, warmup))
            return min((step + 1) / warmup, late)

        return rise
    shape = linear if config.schedule == "onecycle-linear" else cosine
    return lambda step: one_cycle(step, warmup, total, shape)


def cosine(part: float) -> float:
    """From 0 to 1, slow at both ends."""
    return (1 - math.cos(math.pi * part)) / 2


def linear(part: float) -> float:
    return part


def one_cycle(step: int, warmup: int, total: int, shape: Callable[[float], float] = cosine) -> float:
    """Factor on the peak learning rate: from 1/25 up to 1, then down to 0."""
    if step < warmup:
        return 1 / 25 + (1 - 1 / 25) * shape(step / warmup)
    return 1 - shape(min(1.0, (step - warmup) / max(1, total - warmup)))
