"""Optimizers by their name in a recipe, learning-rate schedules, and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines.random_buffers import drawn_buffers
from primal_attention.train.config import OptimConfig

LATE_STEP = 1e9  # a step number at which βᵗ is 0


class Number:
    """A scalar on the device that a captured step reads. It is written only when its value changes."""

    def __init__(self, device: torch.device) -> None:
        self.tensor, self.value = torch.zeros((), device=device), 0.0

    def put(self, value: float) -> None:
        if value != self.value:
            self.tensor.fill_(value)
            self.value = value


class RecordableRAdam(torch.optim.Optimizer):
    """`torch.optim.RAdam` whose steps can be captured in a CUDA graph. Call `prepare` before each `step`.

    RAdam's step sizes depend on the step number through the rectification r_t. torch's capturable form computes them
    on the device in float32, where ρ_t = ρ_∞ − 2tβ₂ᵗ / (1 − β₂ᵗ) loses its leading digits in the early steps, with two
    small kernels per parameter. Here the host computes them in float64 and writes one number to the device:

        p ← p − size · m / (√v + ε),   and   p ← p − size · m   in the first steps, while Var(1/√v) is unknown

    The first form is Adam's at a late step, where its corrections of m and v are 1: one pass of torch's fused Adam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        # Not in the groups: these are values of a step, and loading a checkpoint must not replace them.
        self._sizes: list[tuple[Number, Tensor]] = []
        self._adaptive: list[bool] = []

    @property
    def steady(self) -> bool:
        """True if the prepared step has the form of all later ones."""
        return all(self._adaptive)

    def prepare(self) -> None:
        """Count a step and write its size to the device."""
        if not self._sizes:
            for group in self.param_groups:
                device = group["params"][0].device
                self._sizes.append((Number(device), torch.full((), LATE_STEP, device=device)))
        self._adaptive = []
        for group, (size, _) in zip(self.param_groups, self._sizes, strict=True):
            group["step"] += 1
            number, adaptive = step_size(group["lr"], group["betas"], group["step"])
            size.put(number)
            self._adaptive.append(adaptive)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group, (size, late), adaptive in zip(self.param_groups, self._sizes, self._adaptive, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            beta1, beta2 = group["betas"]
            grads = [p.grad for p in params if p.grad is not None]
            means = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            if adaptive:
                steps = [late] * len(params)
                options = {"weight_decay": group["weight_decay"], "eps": group["eps"], "amsgrad": False}
                options |= {"lr": size.tensor, "beta1": beta1, "beta2": beta2, "maximize": False}
                torch._fused_adam_(params, grads, means, squares, [], steps, **options)
                continue
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            torch._foreach_add_(params, means, alpha=-size.value)


def step_size(lr: float, betas: tuple[float, float], step: int) -> tuple[float, bool]:
    """Return RAdam's factor on m, and whether m is divided by √v + ε."""
    beta1, beta2 = betas
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    first = lr / (1 - beta1**step)
    if length <= 5:
        return first, False
    rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return first * ((1 - beta2**step) * rectification) ** 0.5, True


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
    if config.name == "radam":
        radam = RecordableRAdam if recordable else torch.optim.RAdam
        return radam(groups, lr=config.lr, betas=betas, eps=config.eps)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    options = {"fused": True, "capturable": True} if recordable else {}
    optimizer = kind(groups, lr=config.lr, betas=betas, eps=config.eps, **options)
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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def one_cycle(step: int, warmup: int, total: int, *, linear: bool = False) -> float:
    """Return the factor on the peak learning rate: from 1/25 up to 1, then down to 0, as a cosine or linear."""

    def shape(part: float) -> float:
        return part if linear else (1 - math.cos(math.pi * part)) / 2

    if step < warmup:
        return 1 / 25 + (1 - 1 / 25) * shape(step / warmup)
    return 1 - shape(min(1.0, (step - warmup) / max(1, total - warmup)))


def average_share(decay: float, step: int) -> float:
    """Return the weight of the new parameters in the average; early steps forget faster, or the start would linger."""
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
