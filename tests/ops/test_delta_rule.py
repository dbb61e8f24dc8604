"""The delta rule: chunks and kernels equal the recurrence, in outputs and all gradients."""

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
from kernel_cases import make_delta
from primal_attention import ksvd_loss
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.ops import delta_rule

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

EXACT = 1e-11  # float64
SAME = 2e-6  # float32, sums of at most a few hundred terms in another order
# 16-bit operands have 8 or 11 bits; a result is a sum of many products that is rounded once or twice.
ROUNDED = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def assert_same(actual: Callable[..., Any], expected: Callable[..., Any], inputs: list[Tensor], ratio: float) -> None:
    """Compare two outputs and the gradients of all inputs with `expected` in float64 on the CPU."""
    results = []
    for function, leaves in ((actual, inputs), (expected, [t.cpu().double() for t in inputs])):
        leaves = [t.detach().requires_grad_() for t in leaves]
        outputs = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=generator).bfloat16().to(t.device, t.dtype) for t in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(one, other, ratio, f"output {i}" if i < 2 else f"gradient of input {i - 2}")


@pytest.mark.parametrize("n", [1, 7, 16, 37])
def test_chunks_equal_the_recurrence(n: int) -> None:
    """For heads that keep almost everything, forget at once, and in between; W_0 is shared by the heads."""
    q, k, v = (torch.randn(2, 3, n, 5, dtype=torch.float64) for _ in range(3))
    log_decay = -torch.rand(2, 3, n, dtype=torch.float64) * torch.tensor([1e-9, 900.0, 1.0])[:, None]
    beta, initial = torch.rand(2, 3, n, dtype=torch.float64), torch.randn(2, 1, 5, 4, dtype=torch.float64)
    inputs = [q, F.normalize(k, dim=-1), v[..., :4], log_decay, beta, initial]
    assert_same(functools.partial(delta_rule.chunked, chunk=16), delta_rule.recurrence, inputs, EXACT)


# The kernels


def draw_inputs(length: int, p: int, s: int, heads: int = 1, batch: int = 1) -> list[Tensor]:
    """φ, h, log γ, β and the initial W. The decay varies from almost none to almost complete."""
    phi = F.normalize(torch.randn(batch, length, 2, heads, p), dim=-1)
    rates = torch.logspace(-4, 1, length)[torch.randperm(length)]
    log_decay, beta = -torch.rand(batch, length, heads) * rates[:, None], torch.rand(batch, length, 2, heads)
    return [phi, torch.randn(batch, length, 2, heads, s), log_decay, beta, torch.randn(batch, 2, heads, p, s)]


def by_recurrence(phi: Tensor, h: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """e and r written out: both sides exchange queries and keys."""
    phi_q, phi_k = phi.permute(2, 0, 3, 1, 4)
    h_r, h_e = h.permute(2, 0, 3, 1, 4)
    beta_e, beta_r = beta.permute(2, 0, 3, 1)
    log_decay = log_decay.transpose(1, 2)
    e, w_e = delta_rule.recurrence(phi_q, phi_k, h_r, log_decay, beta_e, initial[:, 0])
    r, w_r = delta_rule.recurrence(phi_k, phi_q, h_e, log_decay, beta_r, initial[:, 1])
    return torch.stack([e, r], dim=3).permute(0, 2, 1, 3, 4), torch.stack([w_e, w_r], dim=1)


KERNELS = functools.partial(delta_rule.delta_scores, fused=True)


@pytest.mark.parametrize(
    ("length", "p", "s", "heads", "batch"),
    [(2, 16, 16, 2, 1), (70, 60, 33, 1, 1), (35, 16, 8, 2, 2), (40, 128, 5, 1, 1)],
)
def test_kernels_equal_the_recurrence(
    device: torch.device, length: int, p: int, s: int, heads: int, batch: int
) -> None:
    inputs = [t.to(device) for t in draw_inputs(length, p, s, heads, batch)]
    assert_same(KERNELS, by_recurrence, inputs, SAME)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.usefixtures("bfloat16_rounds")
def test_16_bit_operands_add_their_rounding_only(device: torch.device, dtype: torch.dtype) -> None:
    phi, h, *numbers = draw_inputs(70, 24, 40)
    assert_same(KERNELS, by_recurrence, [t.to(device) for t in (phi.to(dtype), h.to(dtype), *numbers)], ROUNDED[dtype])


def test_results_are_reproducible(device: torch.device) -> None:
    inputs = [t.to(device).requires_grad_() for t in draw_inputs(40, 16, 8)]
    results = []
    for _ in range(2):
        outputs = KERNELS(*inputs)
        results.append([*outputs, *torch.autograd.grad([t.sum() for t in outputs], inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# The parts around the rule


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the interpreter, in exp(−c) and in the squares
def test_large_features_have_norm_one(device: torch.device) -> None:
    z, weight, bias = (1e10 * torch.rand(shape, device=device) for shape in ((1, 9, 40), (3, 40), (40,)))
    phi, _ = delta_rule.conv_features(z, weight, bias, heads=2, rank=4)
    assert_close(phi.norm(dim=-1), torch.ones(phi.shape[:-1]), SAME)


def test_the_choice_of_the_backend(device: torch.device) -> None:
    x = torch.zeros(1, 4, 8, device=device)
    assert delta_rule.uses_kernels("fused", x, 64, 64)
    assert delta_rule.uses_kernels("auto", x, 64, 64) == x.is_cuda
    assert not delta_rule.uses_kernels("reference", x, 64, 64)
    with pytest.raises(ValueError, match="must not exceed 128"):
        delta_rule.uses_kernels("fused", x, 256, 64)
    with pytest.raises(ValueError, match="float64 is not one of"):
        delta_rule.uses_kernels("fused", x.double(), 64, 64)


def test_a_kernel_is_not_differentiated_twice(device: torch.device) -> None:
    inputs = [t.to(device).requires_grad_() for t in draw_inputs(5, 16, 8)]
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(KERNELS(*inputs)[0].sum(), inputs[0], create_graph=True)


# A layer on the kernels

# Sums over all tokens whose terms nearly cancel: the reference in float32 has the same error.
CANCELLING = {"J": 1e-5, "decay_logit": 5e-5, "decay_proj.weight": 5e-5}


def all_results(layer: DeltaPrimalAttention, x: Tensor, *args: Any) -> dict[str, Tensor]:
    """Outputs, state, J, and the gradients of x and every parameter."""
    x = x.detach().requires_grad_()
    y, scores, state = layer(x, *args, return_scores=True, return_state=True)
    outputs = {"y": y, "e": scores.e, "r": scores.r, "w_e": state.w_e_x, "w_r": state.w_r_x, "J": layer.objective}
    if state.conv is not None:
        outputs["conv"] = state.conv
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (t * torch.randn(t.shape, generator=generator).to(t)).sum() * (8 if name == "J" else 1)
        for name, t in outputs.items()
    )
    names, inputs = zip(("x", x), *layer.named_parameters(), strict=True)
    return outputs | dict(zip(names, torch.autograd.grad(loss, inputs), strict=True))


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        (35, {"num_heads": 2}),
        (37, {"head_dim": 12, "rank": 9, "conv": 3, "gate": "sigmoid", "bias": False}),
        (1, {"head_dim": 5, "rank": 7, "conv": 1}),
        (2, {"head_dim": 5, "rank": 7, "conv": 1}),
        (35, {"conv": 0, "gate": False}),
    ],
    ids=str,
)
def test_a_layer_equals_the_reference(device: torch.device, length: int, settings: dict[str, Any]) -> None:
    layer = make_delta(**settings)
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    x, mask = torch.randn(2, length, layer.embed_dim), None
    if length == 35:
        mask = torch.zeros(2, length, dtype=torch.bool)
        mask[0, [0, 4]] = mask[1, 6:] = True
    actual = all_results(layer.to(device), x.to(device), None if mask is None else mask.to(device))
    for name, value in all_results(exact, x.double(), mask).items():
        assert_close(actual[name], value, CANCELLING.get(name, SAME), name)


@torch.no_grad()
def test_a_layer_streams_and_calls_hooked_maps(device: torch.device) -> None:
    layer = make_delta().eval().to(device)
    x = torch.randn(1, 42, 16, device=device)
    expected, final = layer(x, return_state=True)
    calls = []
    for module in (layer.qk_proj, layer.dual_proj):
        module.register_forward_hook(lambda module, args, result: calls.append(module))
    first, state = layer(x[:, :35], return_state=True)
    assert calls == [layer.qk_proj, layer.dual_proj]
    second, state = layer(x[:, 35:41], state=state, return_state=True)
    third, state = layer.step(x[:, 41], state)
    assert_close(torch.cat([first, second, third[:, None]], dim=1), expected, SAME)
    for actual, other in zip(state[:3], final[:3], strict=True):
        assert_close(actual, other, SAME)


@pytest.mark.usefixtures("bfloat16_rounds")
def test_autocast_is_as_accurate_as_the_reference(device: torch.device) -> None:
    fused, x = make_delta(2), torch.randn(1, 40, 32)
    plain, exact = copy.deepcopy(fused).to(device), copy.deepcopy(fused).double()
    plain.backend = exact.backend = "reference"
    expected = all_results(exact, x.double())
    errors = []
    for layer in (fused.to(device), plain):
        with torch.autocast(device.type, torch.bfloat16):
            actual = all_results(layer, x.to(device))
        assert actual["y"].dtype == torch.bfloat16
        assert actual["w_e"].dtype == actual["J"].dtype == torch.float32
        errors.append({name: rms_ratio(actual[name], value) for name, value in expected.items()})
    # The kernels round less often, but not each result is closer; errors of few numbers are a matter of chance.
    for name, error in errors[0].items():
        if expected[name].numel() < 8:
            continue
        assert error <= max(1.5 * errors[1][name], 5e-3), (name, error, errors[1][name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Dynamo traces compiled kernels, not interpreted ones")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_compiles_as_one_graph(device: torch.device, dynamic: bool) -> None:
    layer = make_delta(2).to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for length in (33, 70):
        x = torch.randn(2, length, 32, device=device, requires_grad=True)
        results = []
        for call in (layer, compiled):
            y = call(x)
            inputs = [x, layer.conv.weight, layer.decay_proj.weight]
            results.append((y, *torch.autograd.grad(y.square().sum() + ksvd_loss(layer), inputs)))
        for eager, other in zip(*results, strict=True):
            assert_close(other, eager, 2 * SAME)  # both differ from the exact result
