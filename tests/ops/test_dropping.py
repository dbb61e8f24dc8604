"""Masks of dropout from places: the right share, no pattern along the places or between keys, and the way back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from primal_attention.nn.dropout import Dropout
from primal_attention.ops import dropping

PLACES = 2**20
FAR = 4.5  # deviations: one of a hundred thousand fair draws is as far


def standard(kept: Tensor, p: float) -> Tensor:
    """Mean zero, deviation one where a number is kept with probability 1 − p."""
    return (kept.double() - (1 - p)) / math.sqrt(p * (1 - p))


def masks(p: float) -> list[Tensor]:
    """Of one key: both halves of the bits, and all of them."""
    key, place = dropping.draw_key(torch.device("cpu")), torch.arange(PLACES, dtype=torch.int32)
    coarse = dropping.coarse(p) / 2**16
    halves = [standard(kept, coarse) for kept in dropping.kept_pair(key, place, p)]
    return [*halves, standard(dropping.drop(torch.ones(PLACES), p, key) != 0, p)]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_masks_look_drawn(p: float):
    low, high, whole = masks(p)
    others = masks(p)
    for mask, other in zip((low, high, whole), others, strict=True):
        assert abs(mask.sum()) < FAR * PLACES**0.5, "the share that is kept"
        for lag in (1, 2, 16, 63, 64, 128, 4096):
            assert abs((mask[lag:] * mask[:-lag]).sum()) < FAR * PLACES**0.5, f"neighbours {lag} apart"
        assert abs((mask * other).sum()) < FAR * PLACES**0.5, "two keys"
        rows = mask.view(-1, 64).sum(dim=1).square() / 64  # of a token's width
        assert abs(rows.mean() - 1) < FAR * math.sqrt(2 / len(rows)) + 1 / (64 * p), "how much a row keeps"
    assert abs((low * high).sum()) < FAR * PLACES**0.5, "the two numbers of a place"


def test_the_share_is_the_one_asked_for_and_means_are_kept():
    x, key = torch.full((PLACES,), 3.0), dropping.draw_key(torch.device("cpu"))
    y = dropping.drop(x, 0.1, key)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(3.0) / 0.9)}
    assert abs(float(y.mean()) / 3 - 1) < FAR * math.sqrt(0.1 / 0.9 / PLACES)
    assert dropping.coarse(0.1) == 6554


def test_the_way_back_has_the_same_mask_and_keys_differ():
    x = torch.randn(64, 33, requires_grad=True)
    key = dropping.draw_key(torch.device("cpu"))
    y = dropping.drop(x, 0.3, key)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0)
    assert torch.equal(dropping.drop(x, 0.3, key), y)
    assert not torch.equal(dropping.drop(x, 0.3, dropping.draw_key(torch.device("cpu"))) != 0, y != 0)


def test_on_a_cpu_torch_drops():
    x = torch.randn(50, 8)
    torch.manual_seed(3)
    ours = Dropout(0.2)(x)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.2))
    assert torch.equal(Dropout(0.2).eval()(x), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_recorded_step_draws_anew():
    x = torch.ones(4096, 64, device="cuda", requires_grad=True)
    layer = torch.compile(Dropout(0.25))
    kept, grads = torch.empty_like(x), torch.empty_like(x)

    def work() -> None:
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        kept.copy_(y.detach())
        grads.copy_(grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kept, grads), "the way back has the mask of the way there"
        assert abs(float(kept.mean()) - 1) < FAR * math.sqrt(1 / 3 / x.numel())
        found.append(kept != 0)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
