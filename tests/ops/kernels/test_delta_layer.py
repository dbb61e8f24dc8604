"""A delta layer on fused kernels, and the passes around the writing: beside plain torch in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from closeness import assert_close, rms_ratio
from kernel_cases import CANCELLED, SAME
from primal_attention import ksvd_loss
from primal_attention.nn.conv import ShiftedProducts
from primal_attention.nn.delta import EPS, TINY, DeltaPrimalAttention
from primal_attention.ops.fused import delta as ops
from primal_attention.ops.fused.operator import Operator

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


def assert_same(
    found: Callable[..., Any], truth: Callable[..., Any], given: list[Tensor], device: torch.device, ratio: float = SAME
) -> None:
    """Two results and the gradients of everything given, in float32 (or less) there and in float64 here."""
    results = []
    for function, inputs in ((found, [t.to(device) for t in given]), (truth, [t.double() for t in given])):
        inputs = [t.detach().requires_grad_() for t in inputs]
        outputs = function(*inputs)
        draw = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=draw).bfloat16().to(t.device, t.dtype) for t in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, weights)])
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(one, other, ratio, f"number {i}")


def plain_features(z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    seen = F.pad(z, (0, 0, len(weight) - 1, 0))
    a = F.silu(ShiftedProducts.apply(seen, weight, bias))
    qk, h = a.split([z.shape[-1] - 2 * heads * rank, 2 * heads * rank], dim=-1)
    qk, h = (t.unflatten(-1, (2, heads, -1)).permute(0, 2, 3, 1, 4) for t in (qk, h))
    return qk / (qk.square().sum(-1, keepdim=True) + qk.shape[-1] * TINY).sqrt(), h


@pytest.mark.parametrize(
    ("length", "heads", "p", "rank", "kernel"), [(37, 1, 12, 20, 4), (3, 2, 16, 5, 3), (130, 1, 8, 8, 1)]
)
def test_features(device: torch.device, length: int, heads: int, p: int, rank: int, kernel: int) -> None:
    columns = 2 * heads * (p + rank)
    given = [torch.randn(shape) for shape in ((1 + heads, length, columns), (kernel, columns), (columns,))]
    sizes = {"heads": heads, "rank": rank}
    assert_same(functools.partial(ops.features, **sizes), functools.partial(plain_features, **sizes), given, device)


def plain_gated(scores: Tensor, norm: Tensor, *gate: Tensor) -> tuple[Tensor, Tensor]:
    unit = scores / (scores.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
    return (unit * F.silu(gate[0]) if gate else unit), scores.square().sum(1)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("shape", [(2, 19, 2, 10), (1, 150, 1, 24)], ids=str)
def test_scores_of_one_size_under_a_gate(device: torch.device, shape: tuple[int, ...], gate: bool) -> None:
    def fused(scores: Tensor, norm: Tensor, *gate: Tensor) -> tuple[Tensor, Tensor]:
        return ops.gated(scores, gate[0] if gate else None, norm, EPS)

    given = [torch.randn(shape), torch.randn(shape[-1]), *([torch.randn(shape)] if gate else [])]
    assert_same(fused, plain_gated, given, device)


# As for the fading of a head: plain torch in float32 misses the truth by as much.
LOOSE = {**CANCELLED, "gradient of decay_proj.weight": CANCELLED["gradient of decay_logit"]}


def layer(**settings: Any) -> DeltaPrimalAttention:
    made = DeltaPrimalAttention(32, 2, rank=6, backend="fused", **settings)
    torch.nn.init.normal_(made.decay_proj.weight, std=0.3)
    with torch.no_grad():
        made.decay_logit.copy_(torch.tensor([0.5, 2.5]))  # as in kernel_cases.make: γ itself is rounded
    return made


def everything(attention: Any, x: Tensor, *args: Any, **keywords: Any) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y, scores, state = attention(x, *args, return_scores=True, return_state=True, **keywords)
    found = {"y": y, "e": scores.e, "r": scores.r, "w_e": state.w_e_x, "w_r": state.w_r_x, "J": attention.objective}
    if state.conv is not None:
        found["conv"] = state.conv
    draw = torch.Generator().manual_seed(1)
    loss = sum(
        (t * torch.randn(t.shape, generator=draw).to(t)).sum() * (8 if k == "J" else 1) for k, t in found.items()
    )
    names, inputs = zip(("x", x), *attention.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, inputs)  # of every parameter: all of them matter
    return {**found, **{f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}}


def assert_as_truth(device: torch.device, attention: DeltaPrimalAttention, x: Tensor, *args: Any) -> None:
    truth = copy.deepcopy(attention).double()
    truth.backend = "reference"
    found = everything(attention.to(device), x.to(device), *(t.to(device) for t in args))
    for name, value in everything(truth, x.double(), *args).items():
        assert_close(found[name], value, max(SAME, LOOSE.get(name, 0.0)), name)


@pytest.mark.parametrize("settings", [{}, {"gate": False, "bias": False}, {"conv": 0}], ids=str)
def test_the_layer_and_all_its_gradients(device: torch.device, settings: dict[str, Any]) -> None:
    assert_as_truth(device, layer(**settings), torch.randn(1, 37, 32))


def test_padding_anywhere(device: torch.device) -> None:
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, [0, 4]] = mask[1, 6:] = True
    assert_as_truth(device, layer(), torch.randn(2, 20, 32), mask)


def test_a_batch_of_nothing(device: torch.device) -> None:
    attention, x = layer().to(device), torch.zeros(0, 20, 32, device=device, requires_grad=True)
    y = attention(x)
    (y.sum() + attention.objective.sum()).backward()
    assert y.shape == x.grad.shape == (0, 20, 32)


def test_a_prompt_and_steps_equal_one_pass(device: torch.device) -> None:
    attention, x = layer().eval().to(device), torch.randn(1, 45, 32).to(device)
    with torch.no_grad():
        whole, end = attention(x, return_state=True)
        first, state = attention(x[:, :38], return_state=True)
        second, state = attention(x[:, 38:43], state=state, return_state=True)
        rows = [first, second]
        for token in x[:, 43:].unbind(1):
            y, state = attention.step(token, state)
            rows.append(y[:, None])
    assert_close(torch.cat(rows, dim=1), whole, SAME)
    for mine, theirs in zip(state, end, strict=True):
        assert_close(mine, theirs, SAME)


@pytest.mark.usefixtures("bfloat16_rounds")
def test_autocast_is_as_close_to_the_truth_as_plain_torch(device: torch.device) -> None:
    """The kernels round less often, but not every number of theirs is closer than plain torch's."""
    attention, x = layer(), torch.randn(1, 40, 32)
    plain, truth = copy.deepcopy(attention).to(device), copy.deepcopy(attention).double()
    plain.backend = truth.backend = "reference"
    expected = everything(truth, x.double())
    results = []
    for model in (attention.to(device), plain):
        with torch.autocast(device.type, torch.bfloat16):
            found = everything(model, x.to(device))
        results.append({k: rms_ratio(found[k], v) for k, v in expected.items()})
    for name, error in results[0].items():
        assert error <= max(1.5 * results[1][name], 5e-3), (name, error, results[1][name])


def test_it_compiles_as_one_graph(device: torch.device) -> None:
    attention, x = layer().to(device), torch.randn(1, 33, 32, device=device, requires_grad=True)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    results = []
    for run in (attention, compiled):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.square().sum() + ksvd_loss(attention), [x, attention.conv.weight])))
    for one, other in zip(*results, strict=True):
        assert_close(other, one, SAME)


def written(device: torch.device, grad: bool = True) -> list[Tensor]:
    shapes = ((1, 5, 2, 1, 16), (1, 5, 2, 1, 16), (1, 5, 2, 1, 8), (1, 5, 2, 1), (1, 5, 2, 1), (1, 2, 1, 16, 8))
    given = [torch.rand(shape, device=device) for shape in shapes]
    given[3] = -given[3]
    return [t.requires_grad_(grad) for t in given]


def written_backward(device: torch.device) -> tuple[Any, ...]:
    given = written(device, False)
    y, last, inverse = ops.WRITTEN.run(*given, True)
    return *given, inverse, torch.ones_like(y), torch.ones_like(last), True


def features(device: torch.device, grad: bool = True) -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=grad) for shape in ((1, 5, 80), (3, 80), (80,))]


def features_backward(device: torch.device) -> tuple[Any, ...]:
    given = features(device, False)
    return *given, *(torch.ones_like(t) for t in ops.FEATURES.run(*given, 2, 8))


def gated(device: torch.device, grad: bool = True) -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=grad) for shape in ((1, 5, 2, 8), (1, 5, 2, 8), (8,))]


def gated_backward(device: torch.device) -> tuple[Any, ...]:
    given = gated(device, False)
    return *given, EPS, *(torch.ones_like(t) for t in ops.GATED.run(*given, EPS))


ARGUMENTS: dict[str, Callable[[torch.device], tuple[Any, ...]]] = {
    "FEATURES": lambda device: (*features(device), 2, 8),
    "FEATURES_BACKWARD": features_backward,
    "WRITTEN": lambda device: (*written(device), True),
    "WRITTEN_BACKWARD": written_backward,
    "GATED": lambda device: (*gated(device), EPS),
    "GATED_BACKWARD": gated_backward,
}


def test_every_operator_is_checked() -> None:
    assert {name for name, value in vars(ops).items() if isinstance(value, Operator)} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operator_passes_the_checks_of_torch(device: torch.device, name: str) -> None:
    torch.library.opcheck(getattr(ops, name).registered, ARGUMENTS[name](device), atol=1e-5, rtol=1e-5)
