"""Weights that tokens write with correction, by the kernels: beside a loop over the tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from closeness import assert_close
from kernel_cases import SAME
from primal_attention.ops import written
from primal_attention.ops.written import corrected_weights

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

NAMES = ("y", "last W", *(f"gradient of {name}" for name in ("q", "k", "v", "log γ", "β", "start")))
# Operands of products have 8 or 11 bits; a result is a sum of many such products, rounded once or twice on its way.
ROUNDED = {torch.bfloat16: 6e-3, torch.float16: 8e-4}

Given = list[Tensor]


def draws(shape: tuple[int, ...], p: int, s: int, dtype: torch.dtype = torch.float32) -> Given:
    """q, k, v, log γ, β and a W to start from; the fading varies from next to nothing to all at once."""
    q, k = (F.normalize(torch.randn(*shape, p), dim=-1).to(dtype) for _ in range(2))
    log_decay = -torch.rand(shape) * torch.logspace(-4, 1, shape[-1])[torch.randperm(shape[-1])]
    return [q, k, torch.randn(*shape, s).to(dtype), log_decay, torch.rand(shape), torch.randn(*shape[:-1], p, s)]


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for i in range(q.shape[-2]):
        w = log_decay[..., i, None, None].exp() * w
        key = k[..., i, :, None]
        w = w + key @ (strength[..., i, None, None] * (v[..., i, None, :] - key.mT @ w))
        rows.append(q[..., i, None, :] @ w)
    return torch.cat(rows, dim=-2), w


def everything(function: Any, given: Given, **keywords: Any) -> list[Tensor]:
    """y, the last W, and the gradients of a sum that weighs each number of both differently."""
    given = [t.detach().requires_grad_() for t in given]
    y, last = function(*given, **keywords)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=draw).bfloat16().to(t.device, t.dtype) for t in (y, last)]
    return [y, last, *torch.autograd.grad([y, last], given, weights)]


def assert_as_loop(device: torch.device, given: Given, ratio: float, crossed: bool = False) -> None:
    def truth(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return loop(q, k.flip(-4) if crossed else k, *rest)

    found = everything(corrected_weights, [t.to(device) for t in given], crossed=crossed, fused=True)
    for name, one, other in zip(NAMES, found, everything(truth, [t.double() for t in given]), strict=True):
        assert_close(one, other, ratio, name)


@pytest.mark.parametrize(
    ("shape", "p", "s"),
    [((1, 2, 2), 16, 16), ((1, 1, 33), 20, 12), ((1, 1, 96), 16, 33), ((1, 1, 70), 60, 30), ((1, 1, 40), 128, 5)],
    ids=str,
)
def test_kernels_equal_a_loop_and_so_do_their_gradients(
    device: torch.device, shape: tuple[int, ...], p: int, s: int
) -> None:
    assert_as_loop(device, draws(shape, p, s), SAME)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.usefixtures("bfloat16_rounds")
def test_sixteen_bits_cost_what_their_rounding_costs(device: torch.device, dtype: torch.dtype) -> None:
    assert_as_loop(device, draws((1, 1, 70), 24, 40, dtype), ROUNDED[dtype])


def test_sides_that_read_each_other(device: torch.device) -> None:
    assert_as_loop(device, draws((2, 2, 2, 35), 16, 8), SAME, crossed=True)


def test_a_fading_and_a_start_that_all_share(device: torch.device) -> None:
    q, k, v, log_decay, strength, start = draws((2, 2, 1, 9), 16, 8)
    shared = [q, k, v, log_decay[:, :1], strength, start[:1, :1]]
    found = everything(corrected_weights, [t.to(device) for t in shared], fused=True)
    expected = everything(corrected_weights, [t.double() for t in shared])
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert_close(one, other, SAME, name)


def test_nothing_to_start_from_is_zeros(device: torch.device) -> None:
    given = [t.to(device) for t in draws((1, 1, 34), 16, 8)]
    y, last = corrected_weights(*given[:5], fused=True)
    z, end = corrected_weights(*given[:5], torch.zeros_like(given[5]), fused=True)
    assert torch.equal(y, z)
    assert torch.equal(last, end)


def test_stretches_equal_one_pass(device: torch.device) -> None:
    given = [t.to(device) for t in draws((1, 1, 75), 16, 8)]
    whole, end = corrected_weights(*given, fused=True)
    parts, w = [], given[5]
    for piece in (slice(0, 40), slice(40, 41), slice(41, 75)):
        y, w = corrected_weights(*(t[:, :, piece] for t in given[:5]), w, fused=True)
        parts.append(y)
    assert_close(torch.cat(parts, dim=2), whole, SAME)
    assert_close(w, end, SAME)


def test_equal_keys_replace_each_other(device: torch.device) -> None:
    """With β = 1 and nothing fading, 64 writes to one place leave the last: no sum, and no error that grows."""
    k = F.normalize(torch.ones(1, 1, 64, 16), dim=-1).to(device)
    v = torch.randn(1, 1, 64, 3).to(device)
    still, full = torch.zeros(1, 1, 64, device=device), torch.ones(1, 1, 64, device=device)
    assert_close(corrected_weights(k, k, v, still, full, fused=True)[0], v, SAME)


def test_the_same_input_gives_the_same_bits(device: torch.device) -> None:
    given = [t.to(device) for t in draws((1, 1, 40), 16, 8)]
    for one, other in zip(*(everything(corrected_weights, given, fused=True) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_who_insists_on_the_kernels_hears_why_they_cannot(device: torch.device) -> None:
    x = torch.zeros(1, 4, 8, device=device)
    assert written.fuses("fused", x, 64, 64)
    assert written.fuses("auto", x, 64, 64) == x.is_cuda
    assert not written.fuses("reference", x, 64, 64)
    with pytest.raises(ValueError, match="must not exceed 128"):
        written.fuses("fused", x, 256, 64)
    with pytest.raises(ValueError, match="float64 is not one of"):
        written.fuses("fused", x.double(), 64, 64)
