"""RAdam whose steps can be recorded once and replayed.

RAdam's step sizes depend on the step's number through the rectification r_t. torch's capturable form computes them on
the device in float32, where ρ_t = ρ_∞ − 2tβ₂ᵗ / (1 − β₂ᵗ) loses its leading digits in the early steps, with two small
kernels per parameter. Here the host computes them in double precision before each step and leaves one number on the
device, which a recorded step reads:

    p ← p − size · m / (√v + ε)        and  p ← p − size · m  in the first steps, while the variance of 1/√v is unknown

The first form is Adam's after infinitely many steps, whose corrections of m and v are 1: one pass of torch's fused
Adam over all weights. Done in parts it would read and write them ten times, which is most of what a small step does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from primal_attention.engine.recording import Number

LATE = 1e9  # a step's number at which βᵗ is 0


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
        self._sizes: list[tuple[Number, Tensor]] = []
        self._adaptive: list[bool] = []

    @property
    def steady(self) -> bool:
        """Whether the step that was prepared has the form of all later ones: what is recorded before would be lost."""
        return all(self._adaptive)

    def prepare(self) -> None:
        """Count a step and put its sizes where `step` reads them."""
        if not self._sizes:
            for group in self.param_groups:
                device = group["params"][0].device
                self._sizes.append((Number(device), torch.full((), LATE, device=device)))
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
                torch._fused_adam_(
                    params,
                    grads,
                    means,
                    squares,
                    [],
                    [late] * len(params),
                    lr=size.held,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )
                continue
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            torch._foreach_add_(params, means, alpha=-size.value)


def step_size(lr: float, betas: tuple[float, float], step: int) -> tuple[float, bool]:
    """What multiplies m, and whether m / (√v + ε) or m alone."""
    beta1, beta2 = betas
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    first = lr / (1 - beta1**step)
    if length <= 5:
        return first, False
    rectification = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return first * ((1 - beta2**step) * rectification) ** 0.5, True
