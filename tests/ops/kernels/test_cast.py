"""A layer's weights in autocast's type: all at once, as one by one."""

from __future__ import annotations

import pytest
import torch

from primal_attention import PrimalAttention
from primal_attention.ops.fused.cast import cast_weights
from primal_attention.ops.kernels.casting import cast
from primal_attention.ops.layer import Weights


def some_weights(device: torch.device, dtype: torch.dtype = torch.float32, bias: bool = True) -> Weights:
    torch.manual_seed(0)
    shapes = [(16, 8), (16,), (2, 5, 3), (2, 5, 3), (4, 6), (4,), (8, 8), (8,)]
    made = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    return Weights(*(w if bias or w.dim() > 1 else None for w in made))


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_single_casts(bias: bool, device: torch.device) -> None:
    weights = some_weights(device, bias=bias)
    cast = cast_weights(weights, torch.bfloat16)
    for w, c in zip(weights, cast, strict=True):
        assert (w is None) == (c is None)
        assert w is None or torch.equal(c, w.to(torch.bfloat16))
    given = [w for w in weights if w is not None]
    factors = [torch.randn_like(w).to(torch.bfloat16) for w in given]
    loss = sum((c * f).float().sum() for c, f in zip((c for c in cast if c is not None), factors, strict=True))
    for grad, w, f in zip(torch.autograd.grad(loss, given), given, factors, strict=True):
        assert grad.dtype == w.dtype
        assert torch.equal(grad, f.to(w.dtype))


def test_weights_of_that_type_are_left_as_they_are(device: torch.device) -> None:
    weights = some_weights(device, torch.bfloat16)
    assert all(a is b for a, b in zip(weights, cast_weights(weights, torch.bfloat16), strict=True))


def test_frozen_and_unused_weights_have_no_gradient(device: torch.device) -> None:
    weights = some_weights(device)
    weights.w_e.requires_grad_(False)
    cast = cast_weights(weights, torch.bfloat16)
    cast.w_r.float().square().sum().backward()
    assert weights.w_e.grad is None
    assert weights.out_weight.grad is None
    assert weights.w_r.grad is not None


def test_a_layer_under_autocast_refuses_a_second_derivative(device: torch.device) -> None:
    layer = PrimalAttention(32, 4, rank=4, landmarks=5, backend="fused").to(device)
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    with pytest.raises(RuntimeError, match="reference"):
        torch.autograd.grad(y.float().square().sum(), list(layer.parameters()), create_graph=True)


def test_one_launch_casts_tensors_of_any_sizes(device: torch.device) -> None:
    tensors = [torch.randn(shape, device=device) for shape in [(3, 5), (2000,), (0,), (2, 7, 4)]]
    for made, t in zip(cast(tensors, torch.float16), tensors, strict=True):
        assert torch.equal(made, t.half())


def test_compiled_the_weights_are_cast_by_one_operator(device: torch.device) -> None:
    weights = some_weights(device)

    def loss(weights: Weights) -> torch.Tensor:
        return sum(w.float().square().sum() for w in cast_weights(weights, torch.bfloat16) if w is not None)  # type: ignore[return-value]

    given = [w for w in weights if w is not None]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(weights), given) for f in (loss, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
