"""RAdam whose steps can be recorded once and replayed.

RAdam's step sizes depend on the step's number through the rectification r_t. torch's capturable form computes them on
the device in float32, where ρ_t = ρ_∞ − 2tβ₂ᵗ / (1 − β₂ᵗ) loses its leading digits in the early steps, with two small
kernels per parameter. Here the host computes them in double precision before each step and leaves two numbers on the
device, which a recorded step reads:

    p ← p + m · (adaptive / (√v + ε) + plain)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RecordableRAdam(torch.optim.Optimizer):
    """As `torch.optim.RAdam`; call `prepare` before each `step`, recorded or not. The state is kept per parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        # Not in the groups: they are values of a step, no settings, and must not be replaced by a checkpoint's.
        self._sizes: list[tuple[Tensor, Tensor]] = []

    def prepare(self) -> None:
        """Count a step and put its sizes where `step` reads them."""
        if not self._sizes:
            for group in self.param_groups:
                device = group["params"][0].device
                self._sizes.append((torch.zeros((), device=device), torch.zeros((), device=device)))
        for group, (adaptive, plain) in zip(self.param_groups, self._sizes, strict=True):
            group["step"] += 1
            for held, size in zip(
                (adaptive, plain), step_sizes(group["lr"], group["betas"], group["step"]), strict=True
            ):
                held.fill_(size)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group, (adaptive, plain) in zip(self.param_groups, self._sizes, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            beta1, beta2 = group["betas"]
            grads = [p.grad for p in params if p.grad is not None]
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            means = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            factors = torch._foreach_sqrt(squares)
            torch._foreach_add_(factors, group["eps"])
            torch._foreach_reciprocal_(factors)
            torch._foreach_mul_(factors, adaptive)
            torch._foreach_addcmul_(params, means, factors)
            # Not added to the factors: torch adds a tensor to a list by looking at it, which a recording forbids.
            torch._foreach_add_(params, torch._foreach_mul(means, plain))


def step_sizes(lr: float, betas: tuple[float, float], step: int) -> tuple[float, float]:
    """What multiplies m / (√v + ε), and what multiplies m alone while the variance of 1/√v is still unknown."""
    beta1, beta2 = betas
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    first = lr / (1 - beta1**step)
    if length <= 5:
        return 0.0, -first
    rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return -first * ((1 - beta2**step) * rectification) ** 0.5, 0.0
