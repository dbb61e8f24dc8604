"""No speed without correctness: who claims to be Primal-Attention is held against the equations in float64 first.

A backend passes if, for the output, the objective and every gradient, its error is at most 1.2 × that of the eager
equations in the same precision, or below a floor of a few roundings of that precision. NaN never passes. Where a result
is a handful of numbers (J of each sample, the gradient of each head's decay) both errors are drawn from a wide
distribution, and one may be 4 × the other by chance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.bench.contenders import build_primal
from primal_attention.bench.settings import Case
from primal_attention.bench.step import data

ALLOWANCE, ALLOWANCE_FEW = 1.2, 4.0
FEW = 32  # numbers
# Below this an error is rounding whoever computes: half a unit in the last place in 16 bits, long sums in 32.
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5, torch.float64: 1e-12}
# Odd on purpose, one below and one above the usual number of landmarks.
SHAPES = ((3, 77), (2, 331))


@dataclass(frozen=True)
class Verdict:
    """Whether a contender may be timed, and its worst error."""

    passed: bool
    where: str = ""
    error: float = 0.0
    allowed: float = 0.0

    def __str__(self) -> str:
        word = "right" if self.passed else "wrong results"
        return f"{word}: error of {self.where} {self.error:.1e}, allowed {self.allowed:.1e}"

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {**dataclasses.asdict(self), "error": self.error if math.isfinite(self.error) else None}


Results = dict[str, Tensor]


class Gate:
    """The truth for one width, worked out once, and the judgement of each contender by it."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.cases = [dataclasses.replace(case, batch=batch, length=length) for batch, length in SHAPES]
        self.weights = {name: randomised(value) for name, value in build_primal(case, "reference").state_dict().items()}
        self.inputs = [data(case, seed) for case in self.cases]
        self.truths, self.eager = [], []
        for case, (x, grad_y) in zip(self.cases, self.inputs, strict=True):
            exact = dataclasses.replace(case, dtype=torch.float64)
            wide = x.detach().double().requires_grad_()
            truth = results(self._load(build_primal(exact, "reference")), wide, grad_y.double(), case.num_heads)
            self.truths.append(truth)
            self.eager.append(results(self._load(build_primal(case, "reference")), x, grad_y, case.num_heads))

    def judge(self, build: Callable[[Case], nn.Module]) -> Verdict:
        """The verdict on the layer that `build` makes; what it raises is its own reason not to run."""
        worst = Verdict(True)
        margin = -math.inf
        for case, (x, grad_y), truth, eager in zip(self.cases, self.inputs, self.truths, self.eager, strict=True):
            found = results(self._load(build(case)), x, grad_y, case.num_heads)
            verdict = compare(found, truth, eager, FLOORS[case.dtype])
            ratio = verdict.error / verdict.allowed if math.isfinite(verdict.error) else math.inf
            if ratio > margin:
                worst, margin = verdict, ratio
        return worst

    def _load(self, layer: nn.Module) -> nn.Module:
        layer.load_state_dict(self.weights, strict=False)
        return layer.train()


def randomised(value: Tensor) -> Tensor:
    """A little noise on top, so that no parameter is as symmetric as its start."""
    return value + 0.02 * torch.randn_like(value)


def results(layer: nn.Module, x: Tensor, grad_y: Tensor, heads: int) -> Results:
    """Output, objective and all gradients. The objective's share in them is made as large as the output's."""
    y = layer(x)
    objective = layer.objective
    assert isinstance(objective, Tensor)
    named = {"x": x, **dict(layer.named_parameters())}
    # J is a mean over tokens and heads: undo that, or its gradient would drown in the other one's rounding.
    weight = torch.full_like(objective, x.shape[1] * heads)
    inputs = tuple(named.values())
    grads = torch.autograd.grad((y, objective), inputs, (grad_y.to(y.dtype), weight), allow_unused=True)
    found = {"y": y.detach(), "objective": objective.detach()}
    for name, value, grad in zip(named, inputs, grads, strict=True):
        found[f"∂{name}"] = torch.zeros_like(value) if grad is None else grad
    return found


def compare(found: Mapping[str, Tensor], truth: Results, eager: Results, floor: float) -> Verdict:
    """The result whose error is largest against what it may be."""
    worst, margin = Verdict(True), -math.inf
    for name, expected in truth.items():
        error = rms_error(found[name], expected)
        allowance = ALLOWANCE if expected.numel() > FEW else ALLOWANCE_FEW
        allowed = max(allowance * rms_error(eager[name], expected), floor)
        ratio = error / allowed if math.isfinite(error) else math.inf
        if ratio > margin:
            worst, margin = Verdict(ratio <= 1, name, error, allowed), ratio
    return worst


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """RMS(error) / RMS(expected); infinite for another shape, NaN stays NaN."""
    if actual.shape != expected.shape:
        return math.inf
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt().clamp(min=1e-300))
