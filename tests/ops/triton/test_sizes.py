"""The kernels equal the equations in float64 at odd sizes: outputs, scores, J and every gradient.

New memory is filled with NaN, so that elements that a kernel does not write are detected.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_cases import MODES, assert_as_truth, make, tokens
from primal_attention.ops.triton import bidirectional

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

# (sequences, tokens, head width, rank, heads): each odd size once, and the largest that the kernels support.
SMALL = [(2, 1, 16, 1, 2), (2, 7, 48, 5, 1), (1, 63, 60, 20, 2), (1, 65, 80, 30, 1)]
MODES_OF_SIZES = ("data_dependent", "plain", "two_sided", "causal", "learned_decay", "causal_landmarks")
SIZES = [(mode, *size) for size in SMALL for mode in MODES_OF_SIZES]
SIZES += [(mode, 1, 33, 128, 96, 1) for mode in ("data_dependent", "causal")]
SIZES += [("causal_landmarks_decay", 1, 33, 128, 60, 1)]
SIZES += [(mode, 1, 17, 256, 200, 1) for mode in ("data_dependent", "learned_decay")]
SIZES += [("data_dependent", 1, 17, 256, 256, 1), ("plain", 1, 9, 16, 256, 2), ("causal", 1, 9, 16, 256, 2)]
SIZES += [("causal_landmarks_decay", 1, 17, 64, 128, 1), ("causal_landmarks", 2, 9, 16, 256, 2)]
if not torch.cuda.is_available():  # the interpreter is slow: each mode and each size, not all pairs
    SIZES = SIZES[::5] + SIZES[12:24:11]


@pytest.mark.supports("training", "cuda")
@pytest.mark.parametrize(("mode", "batch", "length", "head_dim", "rank", "heads"), SIZES)
def test_the_kernels_match_the_equations(
    device: torch.device, mode: str, batch: int, length: int, head_dim: int, rank: int, heads: int
) -> None:
    layer = make(mode, head_dim, rank, heads, max_length=length + 2).to(device)
    assert_as_truth(layer, tokens(layer, batch, length))


@pytest.mark.parametrize(("mode", "head_dim", "rank"), [("plain", 16, 96), ("data_dependent", 256, 40)])
def test_the_tiles_for_little_shared_memory_match(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mode: str, head_dim: int, rank: int
) -> None:
    monkeypatch.setattr(bidirectional, "is_shared_memory_small", lambda device: True)
    bidirectional.score_constants.cache_clear()
    layer = make(mode, head_dim, rank, heads=1).to(device)
    assert_as_truth(layer, tokens(layer, 1, 17))
    bidirectional.score_constants.cache_clear()


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks_decay"])
def test_the_kernels_match_the_equations_over_many_blocks(device: torch.device, mode: str) -> None:
    landmarks = 70 if mode == "data_dependent" else 40  # two of the kernels' blocks of landmarks
    layer = make(mode, rank=3, heads=1, landmarks=landmarks, max_length=500).to(device)
    assert_as_truth(layer, tokens(layer, 1, 500))


CHUNKED = [*((mode, 150) for mode in MODES), ("causal", 128)]
if torch.cuda.is_available():
    CHUNKED += [("data_dependent", 128)]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("mode", "length"), CHUNKED)
def test_the_kernels_match_the_equations_over_many_chunks(device: torch.device, mode: str, length: int) -> None:
    layer = make(mode, rank=20, heads=1).to(device)
    assert_as_truth(layer, tokens(layer, 1, length))


@pytest.mark.parametrize(("mode", "length"), [("data_dependent", 3), ("data_dependent", 40), ("causal_landmarks", 3)])
def test_a_sequence_shorter_than_its_landmarks_repeats_rows(device: torch.device, mode: str, length: int) -> None:
    """70 landmarks: the repetitions of one row span several blocks of landmarks."""
    layer = make(mode, heads=1, landmarks=70, max_length=length).to(device)
    assert_as_truth(layer, tokens(layer, 2, length))


@pytest.mark.parametrize("rank", [8, 5])
@pytest.mark.parametrize("keywords", [{"bias": False}, {"objective_form": "sum"}, {"objective_trace": "projections"}])
def test_every_option_of_the_layer_matches(device: torch.device, rank: int, keywords: dict[str, Any]) -> None:
    """Rank 8 fills the stored row; rank 5 leaves a free column, which holds ones."""
    layer = make("data_dependent", rank=rank, **keywords).to(device)
    assert_as_truth(layer, tokens(layer, 2, 7))


@pytest.mark.parametrize("mode", ["plain", "causal", "learned_decay", "causal_landmarks"])
def test_tokens_of_zeros_have_finite_gradients(device: torch.device, mode: str) -> None:
    """The derivative of the norm of zero must not be 0 / 0."""
    layer = make(mode, bias=False, max_length=7).to(device)
    x = tokens(layer, 2, 7)
    x[0] = 0.0
    assert_as_truth(layer, x)
