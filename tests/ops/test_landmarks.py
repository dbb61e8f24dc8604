"""f(X): which rows become landmarks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from golden_files import PLACES
from primal_attention.ops.landmarks import landmark_indices, position_of_rank, ragged_landmark_indices, random_shift


def published_tables() -> dict[str, torch.Tensor]:
    import numpy as np

    with np.load(PLACES[0] / "sample_indices.npz") as file:
        return {key: torch.from_numpy(file[key]).long() for key in file.files if key != "meta"}


def test_rows_are_those_of_the_published_code() -> None:
    tables = published_tables()
    assert len(tables) > 200
    for name, rows in tables.items():
        length, landmarks = map(int, re.fullmatch(r"L(\d+)_n(\d+)", name).groups())
        assert torch.equal(landmark_indices(length, landmarks), rows), name


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 400))
def test_rows_are_those_of_integer_linspace(length: int, landmarks: int) -> None:
    assert torch.equal(landmark_indices(length, landmarks), torch.linspace(0, length - 1, landmarks, dtype=torch.int64))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_rows_stay_inside_never_go_back_and_cover_both_ends(length: int, landmarks: int) -> None:
    rows = landmark_indices(length, landmarks)
    assert rows.shape == (landmarks,)
    assert rows[0] == 0
    assert (rows.diff() >= 0).all()
    assert rows[-1] == (length - 1 if landmarks > 1 else 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 2**20))
def test_moved_rows_stay_in_their_stretch_and_the_ends_where_they_are(length: int, landmarks: int, seed: int) -> None:
    torch.manual_seed(seed)
    shift = random_shift(landmarks)
    assert shift.abs().max() <= 0.5
    rows = landmark_indices(length, landmarks, shift=shift)
    assert rows[0] == 0
    assert rows[-1] == (length - 1 if landmarks > 1 else 0)
    assert (rows.diff() >= 0).all()
    step = (length - 1) / max(landmarks - 1, 1)
    assert ((rows - step * torch.arange(landmarks)).abs() <= step / 2 + 0.5 + 1e-6).all()
    ragged = ragged_landmark_indices(torch.tensor([length, 0, 1]), landmarks, shift)
    assert torch.equal(ragged[0], rows)
    assert (ragged[1:] == 0).all()


def test_a_landmark_is_every_row_of_its_stretch_as_often_and_the_ends_stay() -> None:
    torch.manual_seed(0)
    counts = torch.zeros(41)
    for _ in range(4000):
        counts[landmark_indices(41, 5, shift=random_shift(5))] += 1
    # Landmarks at 10, 20, 30 move by up to 5: 11 rows each, of which two are reached by half a row on either side.
    assert (counts[6:15] - 400).abs().max() < 5 * 20
    assert (counts[[0, 40]] == 4000).all()
    assert counts[1:5].sum() == 0


def test_as_many_landmarks_as_tokens_are_all_the_tokens() -> None:
    for length in range(1, 500):
        assert torch.equal(landmark_indices(length, length), torch.arange(length)), length


def test_no_number_divides() -> None:
    """By a number a GPU divides as a product with its reciprocal: 196 · (1 / 196) < 1, and a token would repeat."""

    class Watch(TorchDispatchMode):
        divisions = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.div:
                self.divisions += 1
                assert isinstance(args[1], torch.Tensor)
                assert args[1].ndim
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        landmark_indices(197, 197)
    assert watch.divisions == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_finds_the_same_rows(compiled: bool) -> None:
    torch._dynamo.reset()
    lengths = torch.arange(1, 1500)
    for landmarks in (2, 5, 22, 36, 151, 197, 199):
        call = torch.compile(ragged_landmark_indices) if compiled else ragged_landmark_indices
        assert torch.equal(call(lengths.cuda(), landmarks).cpu(), ragged_landmark_indices(lengths, landmarks))


def test_many_lengths_at_once_equal_one_at_a_time() -> None:
    lengths = torch.tensor([1, 2, 7, 50, 1000])
    together = ragged_landmark_indices(lengths, 9)
    for row, length in zip(together, lengths.tolist(), strict=True):
        assert torch.equal(row, landmark_indices(length, 9))


def test_an_empty_sequence_gets_row_zero() -> None:
    assert ragged_landmark_indices(torch.tensor([0]), 5).tolist() == [[0] * 5]


@pytest.mark.parametrize(
    ("valid", "places"),
    [([1, 1, 1, 0, 0], [0, 1, 2]), ([0, 0, 1, 1, 1], [2, 3, 4]), ([1, 0, 0, 1, 1], [0, 3, 4])],
    ids=["right", "left", "hole"],
)
def test_the_kth_valid_token_is_found_wherever_padding_stands(valid: list[int], places: list[int]) -> None:
    found = position_of_rank(torch.tensor([valid], dtype=torch.bool), torch.tensor([[0, 1, 2]]))
    assert found.tolist() == [places]
