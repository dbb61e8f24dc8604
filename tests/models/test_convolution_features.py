"""Random-convolution features, the ridge head's leave-one-out scores, and calibrated combinations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

pytest.importorskip("aeon")

from primal_attention.models.convolution_features import (
    ConvolutionFeatures,
    RidgeHead,
    calibration_error,
    centre,
    choose_penalty,
    fit_weights,
    resample,
)


@pytest.fixture
def labelled():
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    return rng.standard_normal((24, 40)) + 0.7 * np.eye(3)[labels] @ rng.standard_normal((3, 40)), labels


def ridge(features, targets, penalty, new):
    """Ridge regression with an intercept that is not penalised, by its definition."""
    mean, centred = features.mean(0), features - features.mean(0)
    weight = np.linalg.solve(centred.T @ centred + penalty * np.eye(features.shape[1]), centred.T @ targets)
    return (new - mean) @ weight + targets.mean(0)


def test_leave_one_out_scores_are_those_of_fits_without_the_sample(labelled):
    features, labels = labelled
    targets = 2 * np.eye(3)[labels] - 1
    head, held_out = RidgeHead.fit(features, labels, 3)
    centred = features - features.mean(0)
    penalty = choose_penalty(centre(centred @ centred.T), targets)
    np.testing.assert_allclose(head(features), ridge(features, targets, penalty, features), rtol=1e-4, atol=1e-4)
    for i in range(len(labels)):
        rest = np.arange(len(labels)) != i
        expected = ridge(features[rest], targets[rest], penalty, features[i])
        np.testing.assert_allclose(held_out[i], expected, rtol=1e-6, atol=1e-6)


def test_features_of_unequal_and_short_series_leave_generators_and_threads_alone():
    rng = np.random.default_rng(1)
    series = [rng.standard_normal((length, 2)) for length in (3, 5, 8, 4)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    np.random.seed(5)
    torch.manual_seed(5)
    features = ConvolutionFeatures.fit(series, 0)
    drawn = np.random.rand(), torch.rand(1).item()
    np.random.seed(5)
    torch.manual_seed(5)
    assert drawn == (np.random.rand(), torch.rand(1).item())
    values = features(series)
    assert torch.get_num_threads() == 1  # numba's threads set those of torch
    torch.set_num_threads(threads)
    assert np.isfinite(values).all()
    settings = {name: getattr(features, name) for name in ("shape", "kernels", "seed")}
    np.testing.assert_array_equal(ConvolutionFeatures.restore(features.arrays(), **settings)(series), values)


def test_resampling_keeps_ends_and_straight_lines():
    line = np.stack([np.arange(5.0), -np.arange(5.0)], axis=1)
    np.testing.assert_allclose(resample(line, 9)[:, 0], np.linspace(0, 4, 9))
    assert resample(line, 5) is line


def test_weights_find_the_informative_classifier_and_stay_positive():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 400)
    good = 2.0 * np.eye(4)[labels] + rng.standard_normal((400, 4))  # log-odds of the true model: 2 · good
    weights = fit_weights([good, rng.standard_normal((400, 4))], labels, [1.0, 1.0])
    assert 1.6 < weights[0] < 2.4
    assert 0 < weights[1] < 0.2
    assert calibration_error(softmax(weights[0] * good, axis=1), labels) < 0.06
    few = fit_weights([rng.standard_normal((3, 4))] * 2, labels[:3], [0.5, 2.0])
    assert (few > 0).all()
    right = fit_weights([np.eye(4)[labels]], labels, [1.0])
    assert np.isfinite(right).all()


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    sure = np.array([[0.9, 0.1]] * 10)
    labels = np.array([0] * 7 + [1] * 3)
    assert calibration_error(sure, labels) == pytest.approx(0.2)
    mixed = np.concatenate([sure, np.array([[0.4, 0.6]] * 10)])
    assert calibration_error(mixed, np.concatenate([labels, [1] * 8 + [0] * 2])) == pytest.approx(0.2)
    assert calibration_error(np.eye(2)[[0, 1]], np.array([0, 1])) == 0.0
