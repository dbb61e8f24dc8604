"""f(X): which rows become landmarks."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_files import PLACES
from primal_attention.ops.sampling import landmark_indices, ragged_landmark_indices, token_of_rank


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
    found = token_of_rank(torch.tensor([valid], dtype=torch.bool), torch.tensor([[0, 1, 2]]))
    assert found.tolist() == [places]
