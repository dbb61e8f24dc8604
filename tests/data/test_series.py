"""Preprocessing: what is filled, scaled, padded and held out."""

from __future__ import annotations

import numpy as np
import pytest

from primal_attention.data.uea import (
    Standardizer,
    drop_missing_tail,
    interpolate_missing,
    pad,
    stratified_holdout,
)
from primal_attention.utils.errors import DataError

nan = np.nan


def test_gaps_are_filled_linearly_and_ends_take_the_nearest_value():
    series = np.array([[nan, 1.0], [2.0, 2.0], [nan, nan], [6.0, 4.0], [nan, 5.0]])
    assert interpolate_missing(series)[:, 0].tolist() == [2.0, 2.0, 4.0, 6.0, 6.0]
    assert interpolate_missing(series)[:, 1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_infinite_values_count_as_missing():
    assert interpolate_missing(np.array([[1.0], [np.inf], [3.0]])).ravel().tolist() == [1.0, 2.0, 3.0]


def test_a_tail_without_any_value_is_padding_and_is_cut():
    series = np.array([[1.0, nan], [2.0, 3.0], [nan, nan], [nan, nan]])
    assert len(drop_missing_tail(series)) == 2
    assert len(drop_missing_tail(np.full((3, 2), nan))) == 3


def test_statistics_are_those_of_all_training_steps_with_ddof_1():
    rng = np.random.default_rng(0)
    series = [rng.normal(3, 2, (n, 4)) for n in (5, 9, 2)]
    standard = Standardizer.fit(series)
    steps = np.concatenate(series)
    np.testing.assert_allclose(standard.mean, steps.mean(0))
    np.testing.assert_allclose(standard.std, steps.std(0, ddof=1))


def test_constant_and_absent_channels_become_zero_not_nan():
    series = [np.array([[1.0, 7.0, nan], [3.0, 7.0, nan]])]
    result = Standardizer.fit(series)(series[0])
    assert np.isfinite(result).all()
    assert (result[:, 1:] == 0).all()


def test_padding_stands_right_and_the_mask_is_true_there():
    values, mask = pad([np.ones((2, 3)), np.ones((4, 3))], length=3)
    assert values.shape == (2, 3, 3)
    assert mask.tolist() == [[False, False, True], [False, False, False]]
    assert values[0, 2].tolist() == [0, 0, 0]
    assert pad([np.ones((4, 3))], length=3, clip=False)[0].shape == (1, 4, 3)
    assert pad([np.ones((2, 3))], length=3, clip=False)[0].shape == (1, 3, 3)


def test_holdout_keeps_class_proportions_and_depends_on_the_seed_alone():
    labels = np.repeat([0, 1, 2], [50, 10, 5])
    kept, held = stratified_holdout(labels, 0.2, seed=1)
    assert np.bincount(labels[held]).tolist() == [10, 2, 1]
    assert sorted([*kept, *held]) == list(range(65))
    assert stratified_holdout(labels, 0.2, seed=1)[1].tolist() == held.tolist()
    assert stratified_holdout(labels, 0.2, seed=2)[1].tolist() != held.tolist()


def test_the_only_case_of_a_class_is_never_held_out():
    kept, held = stratified_holdout(np.array([0, 0, 1]), 0.2, seed=0)
    assert 2 in kept
    assert len(held) == 1
    with pytest.raises(DataError, match="one case only"):
        stratified_holdout(np.array([0, 1]), 0.2, seed=0)
    with pytest.raises(DataError, match="between 0 and 1"):
        stratified_holdout(np.array([0, 1]), 1.5, seed=0)
