"""The work that is timed: one layer, forward and backward, with gradients to x and to all its parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from primal_attention.bench.settings import Case


class Step:
    """A call is a training step of the layer alone: y = layer(x), then back from ∂y and, where there is one, from J².

    The gradient of y is given, as the rest of a network would give it; nothing is accumulated into `.grad`.
    """

    def __init__(self, layer: nn.Module, x: Tensor, grad_y: Tensor) -> None:
        self.layer, self.x, self.grad_y = layer, x, grad_y
        self.inputs = (x, *(p for p in layer.parameters() if p.requires_grad))

    @classmethod
    def of(cls, layer: nn.Module, case: Case, seed: int = 0) -> Step:
        x, grad_y = data(case, seed)
        return cls(layer.train(), x, grad_y)

    def forward(self) -> tuple[Tensor, ...]:
        y = self.layer(self.x)
        objective = getattr(self.layer, "objective", None)
        return (
            (y,) if objective is None else (y, F.mse_loss(objective, torch.zeros_like(objective)))
        )  # mean_b J_b² in one operator

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(outputs, self.inputs, (self.grad_y, None)[: len(outputs)], allow_unused=True)

    def __call__(self) -> None:
        self.backward(self.forward())


def data(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x, which asks for its gradient, and the gradient of y: random numbers, never zeros."""
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = (case.batch, case.length, case.embed_dim)
    # Drawn a sequence at a time: the wide draw of a million tokens would be the largest tensor of the step.
    x, grad_y = (torch.empty(shape, device=case.device, dtype=case.dtype) for _ in range(2))
    for t in (x, grad_y):
        for row in t:
            row.copy_(torch.randn(row.shape, generator=generator, device=case.device))
    return x.requires_grad_(), grad_y
