"""f(X): which rows become landmarks."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from golden_files import PLACES
from primal_attention.ops.landmarks import landmark_indices, ragged_landmark_indices, random_shift


def test_rows_are_those_of_the_published_code() -> None:
    with np.load(PLACES[0] / "sample_indices.npz") as file:
        tables = {key: torch.from_numpy(file[key]).long() for key in file.files if key != "meta"}
    assert len(tables) > 200
    for name, rows in tables.items():
        length, landmarks = map(int, re.fullmatch(r"L(\d+)_n(\d+)", name).groups())
        assert torch.equal(landmark_indices(length, landmarks), rows), name


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 400))
def test_rows_are_those_of_integer_linspace(length: int, landmarks: int) -> None:
    rows = landmark_indices(length, landmarks)
    assert torch.equal(rows, torch.linspace(0, length - 1, landmarks, dtype=torch.int64))
    assert torch.equal(landmark_indices(length, length), torch.arange(length))  # one landmark per token
    ragged = ragged_landmark_indices(torch.tensor([length, 0, 7]), landmarks)
    assert torch.equal(ragged[0], rows)
    assert (ragged[1] == 0).all()
    assert torch.equal(ragged[2], landmark_indices(7, landmarks))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 2**20))
def test_jittered_rows_stay_within_half_a_spacing_and_the_ends_fixed(length: int, landmarks: int, seed: int) -> None:
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


def test_no_division_by_a_number() -> None:
    """A GPU multiplies by the reciprocal of a number: 196 · (1 / 196) < 1, and a token would repeat."""
    graph = make_fx(lambda _: landmark_indices(197, 197), tracing_mode="fake")(torch.zeros(1)).graph
    divisors = [node.args[1] for node in graph.nodes if "div" in str(node.target)]
    assert len(divisors) == 1
    assert all(isinstance(divisor, Node) and divisor.meta["val"].ndim for divisor in divisors)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_computes_the_same_rows(compiled: bool) -> None:
    torch._dynamo.reset()
    lengths = torch.arange(1, 1500)
    for landmarks in (2, 5, 22, 36, 151, 197, 199):
        call = torch.compile(ragged_landmark_indices) if compiled else ragged_landmark_indices
        assert torch.equal(call(lengths.cuda(), landmarks).cpu(), ragged_landmark_indices(lengths, landmarks))
