"""The kernels give what the equations give in float64: outputs, scores, J and every gradient, at sizes that fit badly.

Memory that a kernel should have written is NaN before it runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_cases import MODES, assert_as_truth, make, results, tokens

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

# (sequences, tokens, head width, rank, heads): each odd size once, and the largest that the kernels take.
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


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks_decay"])
def test_the_kernels_match_the_equations_over_many_blocks(device: torch.device, mode: str) -> None:
    landmarks = 70 if mode == "data_dependent" else 40  # two of the kernels' blocks of landmarks
    layer = make(mode, rank=3, heads=1, landmarks=landmarks, max_length=500).to(device)
    assert_as_truth(layer, tokens(layer, 1, 500))


@pytest.mark.parametrize("mode", ["data_dependent", "causal"] if torch.cuda.is_available() else ["causal"])
def test_the_kernels_match_the_equations_beyond_one_chunk(device: torch.device, mode: str) -> None:
    layer = make(mode, rank=8, heads=1).to(device)
    assert_as_truth(layer, tokens(layer, 1, 1030))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("mode", "length"), [*((mode, 150) for mode in MODES), ("data_dependent", 128), ("causal", 128)]
)
def test_the_kernels_match_the_equations_over_many_chunks(device: torch.device, mode: str, length: int) -> None:
    layer = make(mode, rank=20, heads=1).to(device)
    assert_as_truth(layer, tokens(layer, 1, length))


@pytest.mark.parametrize(("mode", "length"), [("data_dependent", 3), ("data_dependent", 40), ("causal_landmarks", 3)])
def test_a_sequence_shorter_than_its_landmarks_repeats_rows(device: torch.device, mode: str, length: int) -> None:
    """70 landmarks: the repeats of one row cross the kernels' blocks of landmarks."""
    layer = make(mode, heads=1, landmarks=70, max_length=length).to(device)
    assert_as_truth(layer, tokens(layer, 2, length))


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks"])
def test_a_layer_without_biases_matches(device: torch.device, mode: str) -> None:
    layer = make(mode, bias=False, max_length=7).to(device)
    assert_as_truth(layer, tokens(layer, 2, 7))


@pytest.mark.parametrize("rank", [8, 5])
@pytest.mark.parametrize("keywords", [{"objective_form": "sum"}, {"objective_trace": "projections"}])
def test_every_form_of_the_objective_matches(device: torch.device, rank: int, keywords: dict[str, Any]) -> None:
    """Rank 8 fills its stored row, rank 5 leaves room for the column of ones."""
    layer = make("data_dependent", rank=rank, **keywords).to(device)
    assert_as_truth(layer, tokens(layer, 2, 7))


@pytest.mark.parametrize("mode", ["plain", "causal", "learned_decay", "causal_landmarks"])
def test_tokens_of_zeros_have_finite_gradients(device: torch.device, mode: str) -> None:
    """q and k of zero have no direction: the norm's derivative must not become 0 / 0."""
    layer = make(mode, bias=False, max_length=7).to(device)
    x = tokens(layer, 2, 7)
    x[0] = 0.0
    assert_as_truth(layer, x)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_gives_empty_results_and_zero_gradients(device: torch.device, mode: str) -> None:
    layer = make(mode, backend="auto").to(device)
    found = results(layer, tokens(layer, 0, 7))
    assert found["y"].shape == (0, 7, 32)
    assert found["J"].shape == (0,)
    for name, value in found.items():
        assert not value.any(), name
