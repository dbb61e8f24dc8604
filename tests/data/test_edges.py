"""Cases held out at the edges of their class."""

from __future__ import annotations

import numpy as np
import pytest

from primal_attention.data.edges import edge_holdout
from primal_attention.data.uea import Split
from primal_attention.utils.errors import DataError


def people() -> Split:
    """Two classes of one movement by eight persons, who differ in the offset of a channel and less in another's."""
    time = np.linspace(0, 6, 30)
    series, labels = [], []
    for label in range(2):
        for person in range(8):
            wave = np.sin((label + 1) * time)
            series.append(np.stack([wave + 3 * person, wave + (person * 3 % 8)], axis=1))
            labels.append(label)
    return Split(series, np.array(labels))


def test_the_four_numbers_are_the_two_ends_of_two_directions():
    split = people()
    parts = [edge_holdout(split, 0.25, number) for number in range(4)]
    for kept, out in parts:
        assert np.array_equal(np.sort(np.concatenate([kept, out])), np.arange(16))
        assert (np.bincount(split.labels[out]) == 2).all()
    assert not set(parts[0][1]) & set(parts[1][1])
    assert not set(parts[2][1]) & set(parts[3][1])
    assert len({tuple(out) for _, out in parts}) == 4
    assert np.array_equal(edge_holdout(split, 0.25, 4)[1], parts[0][1])


def test_the_held_out_lie_beyond_those_who_are_kept():
    offsets = [np.full((5, 1), float(v)) + np.arange(5)[:, None] for v in (4, 0, 3, 1, 2, 5)]
    split = Split(offsets, np.zeros(6, dtype=np.int64))
    assert edge_holdout(split, 0.34, 0)[1].tolist() == [1, 3]
    assert edge_holdout(split, 0.34, 1)[1].tolist() == [0, 5]
    assert edge_holdout(split, 0.34, 2)[1].tolist() == [1, 3]  # one channel has one direction


def test_a_class_keeps_a_case_and_gaps_do_no_harm():
    rng = np.random.default_rng(0)
    series = [rng.standard_normal((6, 2)) for _ in range(5)]
    series[0][:, 1] = np.nan
    kept, out = edge_holdout(Split(series, np.array([0, 0, 1, 1, 2])), 0.9, 0)
    assert sorted(np.concatenate([kept, out]).tolist()) == [0, 1, 2, 3, 4]
    assert 4 in kept
    assert len(kept) == 3


def test_classes_of_one_case_each_leave_nothing_to_hold_out():
    with pytest.raises(DataError, match="one case only"):
        edge_holdout(Split([np.ones((3, 1)), np.zeros((3, 1))], np.array([0, 1])), 0.5, 0)
