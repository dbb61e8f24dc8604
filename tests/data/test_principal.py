"""Principal channels: uncorrelated, of unit variance, the same on every machine, and nothing where nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from primal_attention.data.uea import PrincipalChannels, Standardizer


@pytest.fixture
def series():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((4, 4))
    return [5 + rng.standard_normal((n, 4)) @ mixing for n in (50, 30, 80)]


def principal(x: np.ndarray, series: list[np.ndarray]) -> np.ndarray:
    """The half that stands beside the channels."""
    return PrincipalChannels.fit(series)(x)[:, x.shape[1] :]


def test_the_channels_stay_as_they_are(series):
    found = PrincipalChannels.fit(series)(series[0])
    assert found.shape == (50, 8)
    np.testing.assert_array_equal(found[:, :4], Standardizer.fit(series)(series[0]))


def test_the_training_steps_become_uncorrelated_with_unit_variance(series):
    steps = np.concatenate([principal(s, series) for s in series])
    np.testing.assert_allclose(steps.mean(axis=0), 0.0, atol=1e-12)
    covariance = np.cov(steps.T)
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0.0, atol=1e-10)
    assert (np.diag(covariance) <= 1.0).all()
    assert (np.diag(covariance) > 0.9).all()  # less by the floor beside the smallest variance


def test_a_small_difference_between_channels_becomes_large():
    rng = np.random.default_rng(0)
    hand = rng.standard_normal((500, 1))
    thumb = hand + 0.2 * rng.standard_normal((500, 1))
    x = np.hstack([hand, thumb])
    steps = principal(x, [x])
    difference = (thumb - hand)[:, 0]
    assert max(abs(np.corrcoef(difference, c)[0, 1]) for c in steps.T) > 0.95
    assert (steps.std(axis=0) > 0.9).all()


def test_a_direction_that_carries_nothing_stays_small():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 2))
    doubled = np.hstack(
        [x, x + 1e-9 * rng.standard_normal((100, 2)), np.full((100, 1), 7.0), np.full((100, 1), np.nan)]
    )
    found = principal(doubled, [doubled])
    assert np.isfinite(found).all()
    deviations = np.sort(found.std(axis=0))
    assert (deviations[:4] < 1e-6).all()
    assert (deviations[4:] > 0.9).all()


def test_two_channels_have_one_sign_however_they_are_rounded():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    bases = [
        PrincipalChannels.fit([x * (1 + noise * rng.standard_normal(x.shape))]).basis for noise in [0.0] + [1e-12] * 20
    ]
    for basis in bases[1:]:
        np.testing.assert_allclose(basis, bases[0], rtol=1e-6)


def test_one_channel_is_standardised(series):
    one = [s[:, :1] for s in series]
    steps = np.concatenate([principal(s, one) for s in one])
    assert steps.std(ddof=1) == pytest.approx(1.0, abs=1e-3)
    assert np.corrcoef(steps[:, 0], np.concatenate(one)[:, 0])[0, 1] == pytest.approx(1.0)
