"""Bad input: one line that names the argument, what came, and what would work."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from primal_attention.ksvd import KernelSVD, cumulative_explained_variance, effective_rank, low_rank_singular_values

X = np.random.default_rng(0).normal(size=(12, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_components": 0}, ValueError, r"n_components must be an integer of at least 1 \(n_components=0\)"),
        ({"n_components": 2.5}, TypeError, r"n_components must be an integer of at least 1 \(n_components=2.5\)"),
        ({"n_components": True}, TypeError, "n_components"),
        ({"n_components": 13}, ValueError, r"n_components must be at most 12.*\(n_components=13, n_samples=12"),
        ({"kernel": "gauss"}, ValueError, r"kernel must be one of cosine, linear, rbf.*\(kernel='gauss'\)"),
        ({"kernel": 3}, TypeError, r"kernel must be a name .*\(kernel=3\)"),
        ({"kernel": (np.tanh,)}, TypeError, "pair of feature maps"),
        ({"solver": "qr"}, ValueError, r"solver must be one of auto, dense.*\(solver='qr'\)"),
        ({"solver": None}, ValueError, r"solver must be one of .*\(solver=None\)"),
        (
            {"kernel": "rbf", "solver": "primal"},
            ValueError,
            r"solver='primal' needs explicit features \(kernel='rbf'\)",
        ),
        ({"kernel": "rbf", "gamma": 0}, ValueError, r"gamma must be a positive number or None \(gamma=0\)"),
        ({"kernel": "rbf", "gamma": np.nan}, ValueError, "gamma must be a positive number"),
        ({"kernel": "rbf", "gamma": "scale"}, TypeError, r"gamma must be .*\(gamma='scale'\)"),
        ({"n_landmarks": 0}, ValueError, r"n_landmarks must be an integer of at least 1 \(n_landmarks=0\)"),
        (
            {"n_landmarks": 1},
            ValueError,
            r"n_landmarks must be at least n_components \(n_landmarks=1, n_components=2\)",
        ),
        ({"n_oversamples": -1}, ValueError, "n_oversamples must be an integer of at least 0"),
        ({"n_iter": 1.0}, TypeError, "n_iter must be an integer of at least 0"),
        (
            {"kernel": "sne", "transformation": X},
            ValueError,
            r"transformation needs explicit features \(kernel='sne'\)",
        ),
        ({"transformation": np.eye(4)}, ValueError, r"transformation must have 3 columns.*\(4, 4\)"),
        ({"kernel": lambda A, B: 1.0}, ValueError, r"kernel returned shape \(\) for 12 and 12 rows"),
        ({"kernel": lambda A, B: np.full((len(A), len(B)), np.nan)}, ValueError, "kernel returned values that are not"),
        ({"kernel": (lambda A: A.sum(), lambda B: B)}, ValueError, r"kernel's query feature map returned shape \(\)"),
        ({"kernel": (lambda A: A, lambda B: B[:, :2])}, ValueError, r"same width \(query 3, key 2\)"),
    ],
)
def test_bad_arguments(arguments, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        KernelSVD(**{"n_components": 2, **arguments}).fit(X)
    assert "\n" not in str(caught.value)


def test_keys_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"Z must have as many columns as X .*\(X \(12, 3\), Z \(12, 2\)\)"):
        KernelSVD(2).fit(X, Z=X[:, :2])


def test_keys_with_a_precomputed_kernel() -> None:
    with pytest.raises(ValueError, match="Z must be absent when kernel='precomputed'"):
        KernelSVD(2, kernel="precomputed").fit(X @ X.T, Z=X)


def test_keys_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="Z contains NaN"):
        KernelSVD(2).fit(X, Z=np.full((4, 3), np.nan))


def test_new_points_of_another_width() -> None:
    ksvd = KernelSVD(2).fit(X)
    with pytest.raises(ValueError, match="X has 2 features, but KernelSVD is expecting 3"):
        ksvd.transform(X[:, :2])
    with pytest.raises(ValueError, match="Z has 2 features, but KernelSVD was fitted on keys with 3"):
        ksvd.transform_keys(X[:, :2])


def test_scores_before_fit() -> None:
    with pytest.raises(NotFittedError):
        KernelSVD(2).transform(X)
    with pytest.raises(NotFittedError):
        KernelSVD(2).transform_keys(X)


@pytest.mark.parametrize("measure", [effective_rank, cumulative_explained_variance])
def test_bad_singular_values(measure) -> None:
    with pytest.raises(ValueError, match=r"singular_values must have at least one entry .*\(shape=\(0,\)\)"):
        measure(np.zeros(0))
    with pytest.raises(ValueError, match=r"singular_values must not be negative \(smallest=-1.0\)"):
        measure(np.array([1.0, -1.0]))


def test_factors_of_different_width() -> None:
    with pytest.raises(ValueError, match=r"same number of columns \(A \(12, 3\), B \(12, 2\)\)"):
        low_rank_singular_values(X, X[:, :2])
