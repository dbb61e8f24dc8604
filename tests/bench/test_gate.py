"""The gate: who computes Primal-Attention passes, who is wrong anywhere does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from primal_attention.bench import gate as gate_module
from primal_attention.bench.contenders import build_primal, primal, published
from primal_attention.bench.gate import Gate
from primal_attention.bench.settings import Case

SMALL = {"embed_dim": 24, "num_heads": 2, "batch": 1, "length": 1, "rank": 5, "landmarks": 9}


def make_gate(**changes) -> Gate:
    return Gate(Case(**{**SMALL, **changes}))


class Wrapped(nn.Module):
    """The right layer with something done to its output."""

    def __init__(self, case: Case, spoil) -> None:
        super().__init__()
        inner = build_primal(case, "reference")
        for name, value in inner.named_children():
            self.add_module(name, value)
        for name, value in inner.named_parameters(recurse=False):
            self.register_parameter(name, value)
        self.inner, self.spoil = [inner], spoil

    @property
    def objective(self) -> Tensor | None:
        return self.inner[0].objective

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.inner[0](x))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.02 * grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("contender", [primal("reference"), primal("cpu"), published()], ids=lambda c: c.name)
def test_every_way_to_compute_it_passes(contender, causal, dtype):
    verdict = make_gate(causal=causal, data_dependent=not causal, dtype=dtype).judge(contender.build)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "spoil",
    [lambda y: 1.01 * y, lambda y: y + torch.where(y == y.max(), torch.nan, 0.0), WrongGradient.apply],
    ids=["scaled", "one NaN", "wrong gradient"],
)
def test_wrong_results_are_refused(spoil):
    verdict = make_gate().judge(lambda case: Wrapped(case, spoil))
    assert not verdict.passed
    assert not verdict.error <= 0.005  # NaN is no small error either


def test_a_lost_gradient_is_refused():
    class Detached(Wrapped):
        def forward(self, x):
            inner = self.inner[0]
            weight = inner.score_proj.weight
            inner.score_proj.weight.requires_grad_(False)
            y = inner(x)
            weight.requires_grad_(True)
            return y

    verdict = make_gate().judge(lambda case: Detached(case, lambda y: y))
    assert not verdict.passed
    assert verdict.where == "∂score_proj.weight"


def test_a_wrong_objective_is_refused():
    class Off(Wrapped):
        @property
        def objective(self):
            return self.inner[0].objective * 1.05

    verdict = make_gate().judge(lambda case: Off(case, lambda y: y))
    assert not verdict.passed
    assert verdict.error == pytest.approx(0.05, rel=0.1)


def test_the_verdict_has_no_nan_in_json():
    verdict = gate_module.Verdict(False, "y", float("nan"), 1e-5)
    assert verdict.plain()["error"] is None
    assert "wrong" in str(verdict)
