"""sampling="random": the kernels take the same landmark rows as the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_cases import Layer, Results, assert_same, make, results, tokens, twin

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")
PACKED = (0, 30, 31, 31, 75)


def drawn(layer: Layer, x: Tensor, seed: int = 0, **keywords: Tensor | None) -> Results:
    torch.manual_seed(seed)
    return results(layer, x, **keywords)


@pytest.mark.parametrize(
    ("landmarks", "rows"), [(1, "whole"), (2, "packed"), (9, "padded"), (70, "packed"), (70, "padded")]
)
def test_the_kernels_match_the_equations(device: torch.device, landmarks: int, rows: str) -> None:
    layer = make("data_dependent", landmarks=landmarks, sampling="random").to(device)
    keywords: dict[str, Tensor] = {}
    if rows == "packed":
        keywords = {"cu_seqlens": torch.tensor(PACKED, dtype=torch.int32, device=device)}
    elif rows == "padded":
        keywords = {"key_padding_mask": (torch.arange(24) % 5 == torch.tensor([[1], [2], [9]])).to(device)}
    x = tokens(layer, 75) if rows == "packed" else tokens(layer, 3, 24)
    truth = twin(layer)
    assert_same(drawn(layer, x, **keywords), drawn(truth, x, **keywords))


def test_a_rank_that_is_large_against_the_width(device: torch.device) -> None:
    layer = make("data_dependent", head_dim=16, rank=16, heads=2, landmarks=40, sampling="random").to(device)
    x, truth = tokens(layer, 2, 50), twin(layer)
    assert_same(drawn(layer, x), drawn(truth, x))


def test_a_pass_that_is_made_again_has_the_same_landmarks(device: torch.device) -> None:
    layer = make("data_dependent", sampling="random").to(device)
    x = tokens(layer, 2, 40)
    once = drawn(layer, x)
    layer.recompute = True
    assert_same(drawn(layer, x), once, 0.0)


def test_every_pass_draws_anew_and_evaluation_never(device: torch.device) -> None:
    layer = make("data_dependent", sampling="random").to(device)
    x = tokens(layer, 2, 40)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        even = make("data_dependent").to(device).eval()
        even.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), even(x))
