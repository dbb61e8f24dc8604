"""In 16 bits the error of the kernels is at most 1.2 times that of the equations in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from closeness import assert_close, rms_ratio
from kernel_cases import CANCELLED, SAME, Layer, Results, make, results, tokens, twin
from primal_attention.ops.triton import common

# Largest ratio of the errors of kernels and equations in the same dtype. The ratio of two errors of few numbers varies
# widely: a GPU compares them over many inputs; the interpreter is slow and has a larger limit for them.
FACTOR, FACTOR_OF_FEW = 1.2, 3.0
FEW = 32
INPUTS = {"cuda": 100, "cpu": 2}
# Half the error of one rounding (RMS 0.2 eps): below it the error of the equations is small by chance, as J in float32.
FLOOR = 0.1
MODES = ("data_dependent", "plain", "two_sided", "causal", "learned_decay", "causal_landmarks_decay")
MODES_AND_DTYPES = [(mode, torch.bfloat16) for mode in MODES]
# The interpreter is slow: float16 with one mode of each side of the method.
MODES_AND_DTYPES += [(m, torch.float16) for m in (MODES if torch.cuda.is_available() else ("data_dependent", "causal"))]
TF32 = 2.0**-10  # ten bits of the mantissa


def limits(truth: Results, eager: Results, eps: float) -> dict[str, float]:
    """Return the largest relative error of each result of `stacked_results`: a multiple of that of the equations."""
    allowed = {}
    for name, value in truth.items():
        factor = FACTOR if max(value[0].numel(), len(value)) >= FEW else FACTOR_OF_FEW
        allowed[name] = max(factor * rms_ratio(eager[name], value), FLOOR * eps)
    return allowed


def draw_inputs(layer: Layer, *shape: int) -> list[Tensor]:
    return [tokens(layer, *shape) for _ in range(INPUTS[layer.w_e.device.type])]


def stacked_results(layer: Layer, inputs: list[Tensor], **keywords: bool) -> Results:
    """Return the results of several inputs: the error of a single one varies too much."""
    each = [results(layer, x, **keywords) for x in inputs]
    return {name: torch.stack([outputs[name] for outputs in each]) for name in each[0]}


@pytest.mark.usefixtures("bfloat16_rounds")
@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES, ids=str)
def test_the_kernels_are_as_exact_as_the_equations_in_the_same_dtype(
    device: torch.device, mode: str, dtype: torch.dtype
) -> None:
    heads, length = (4, 40) if device.type == "cuda" else (2, 24)  # the interpreter is slow
    layer = make(mode, heads=heads, max_length=length).to(device, dtype)
    inputs = draw_inputs(layer, 1, length)
    truth, eager, fused = (stacked_results(one, inputs) for one in (twin(layer), twin(layer, dtype), layer))
    allowed = limits(truth, eager, torch.finfo(dtype).eps)
    for name, value in fused.items():
        assert value.dtype == eager[name].dtype, name
        assert_close(value, truth[name], allowed[name], name)


def test_the_gradient_of_the_decay_survives_long_sums_in_half_precision(device: torch.device) -> None:
    """It is a sum of ds_i · s_{i−1} with ds_i orthogonal to s_i: rounding errors along s_i could dominate it."""
    layer = make("learned_decay", head_dim=64, rank=30, heads=3).to(device, torch.float16)
    x = tokens(layer, 1, 300)
    truth, eager, fused = (
        results(one, x)["gradient of decay_logit"] for one in (twin(layer), twin(layer, torch.float16), layer)
    )
    assert_close(fused, truth, FACTOR * rms_ratio(eager, truth))


@pytest.fixture
def _restore_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu  # the interpreter has no TF32
@pytest.mark.usefixtures("_restore_tf32")
@pytest.mark.parametrize(("head_dim", "rank"), [(16, 5), (64, 96)], ids=["narrow", "wide"])
@pytest.mark.parametrize("mode", ["data_dependent", "plain", "causal", "learned_decay"])
def test_the_kernels_are_as_exact_as_the_equations_where_tf32_is_allowed(
    device: torch.device, mode: str, head_dim: int, rank: int
) -> None:
    """The large products around the kernels round to TF32, as in the equations; products in the kernels do not."""
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = make(mode, head_dim=head_dim, rank=rank).to(device)
    inputs = draw_inputs(layer, 2, 60)
    truth, eager, fused = (
        stacked_results(one, inputs, scored=False) for one in (twin(layer), twin(layer, torch.float32), layer)
    )
    allowed = limits(truth, eager, TF32)
    for name, value in fused.items():
        assert_close(value, truth[name], max(allowed[name], CANCELLED.get(name, SAME)), name)


@pytest.mark.supports("autocast", "cuda")
def test_autocast_runs_the_kernels_in_its_dtype(device: torch.device) -> None:
    layer = make("data_dependent").to(device)
    with torch.no_grad():  # the interpreter converts W_e and W_r by truncation: use values that float16 has
        for w in (layer.w_e, layer.w_r):
            w.copy_(w.half())
    x = tokens(layer, 2, 7)
    half = make("data_dependent").to(device)
    half.load_state_dict(layer.state_dict())
    half.half()
    with torch.autocast(device.type, torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    assert torch.equal(y, half(x.half()))
    y.float().sum().backward()
    assert layer.w_e.grad.dtype == torch.float32
    # √Λ is a parameter of J alone and stays in its own dtype.
    assert layer.objective.dtype == torch.float32


@pytest.mark.usefixtures("_restore_tf32")
@pytest.mark.parametrize(("allowed", "expected"), [(False, "ieee"), (True, "tf32x3")])
def test_float32_products_are_exact_unless_tf32_is_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: str
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert common.precision(torch.float32) == expected
