"""KernelSVD as a scikit-learn estimator: the official battery, and what the battery does not ask."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal_attention.ksvd import KernelSVD


@parametrize_with_checks(
    [
        KernelSVD(2),
        KernelSVD(2, kernel="rbf"),
        KernelSVD(2, kernel="sne"),
        KernelSVD(2, kernel="precomputed"),
        KernelSVD(2, solver="lanczos", random_state=0),
        KernelSVD(2, kernel="rbf", solver="randomized", random_state=0),
        KernelSVD(2, kernel="sne", solver="nystrom", random_state=0),
    ]
)
def test_scikit_learn_accepts_it(estimator, check) -> None:
    check(estimator)


@pytest.fixture
def points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 5)), rng.normal(size=(20, 5))


def test_one_source_is_the_same_source_twice(points) -> None:
    X, _ = points
    alone, twice = KernelSVD(3).fit(X), KernelSVD(3).fit(X, Z=X.copy())
    np.testing.assert_allclose(alone.singular_values_, twice.singular_values_)
    np.testing.assert_allclose(alone.transform(X), twice.transform(X), atol=1e-10)
    # A symmetric, positive kernel has the same vectors on both sides.
    np.testing.assert_allclose(alone.left_vectors_, alone.right_vectors_, atol=1e-10)


@pytest.mark.parametrize("kernel", ["cosine", "rbf", "sne"])
@pytest.mark.parametrize("solver", ["dense", "lanczos", "randomized", "nystrom"])
def test_fit_transform_equals_fit_then_transform(points, kernel, solver) -> None:
    X, Z = points
    ksvd = KernelSVD(3, kernel=kernel, solver=solver, random_state=0)
    together = ksvd.fit_transform(X, Z=Z)
    np.testing.assert_allclose(together, clone(ksvd).fit(X, Z=Z).transform(X), atol=1e-8)


@pytest.mark.parametrize("solver", ["lanczos", "randomized", "nystrom"])
def test_random_state_fixes_everything(points, solver) -> None:
    X, Z = points
    first, second = (
        KernelSVD(3, kernel="sne", solver=solver, n_landmarks=8, random_state=7).fit(X, Z=Z) for _ in range(2)
    )
    np.testing.assert_array_equal(first.left_vectors_, second.left_vectors_)
    np.testing.assert_array_equal(first.transform(X), second.transform(X))


@pytest.mark.parametrize("kernel", ["cosine", "sne"])
def test_single_precision_stays_single(points, kernel) -> None:
    X, Z = (A.astype(np.float32) for A in points)
    ksvd = KernelSVD(3, kernel=kernel).fit(X, Z=Z)
    for array in (ksvd.left_vectors_, ksvd.singular_values_, ksvd.transform(X), ksvd.transform_keys(Z)):
        assert array.dtype == np.float32
    exact = KernelSVD(3, kernel=kernel).fit(*points[:1], Z=points[1])
    # Float32 has seven digits.
    np.testing.assert_allclose(ksvd.singular_values_, exact.singular_values_, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["cosine", "sne"])
def test_overwriting_the_data_does_not_change_the_fit(points, kernel) -> None:
    X, Z = (A.copy() for A in points)
    ksvd = KernelSVD(2, kernel=kernel).fit(X, Z=Z)
    before = ksvd.transform(points[0]), ksvd.transform_keys(points[1])
    X[:], Z[:] = 0, 0
    np.testing.assert_array_equal(ksvd.transform(points[0]), before[0])
    np.testing.assert_array_equal(ksvd.transform_keys(points[1]), before[1])


def test_pickle_keeps_the_scores(points) -> None:
    X, Z = points
    for kernel in ("cosine", "sne"):
        ksvd = KernelSVD(2, kernel=kernel).fit(X, Z=Z)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(ksvd)).transform_keys(Z), ksvd.transform_keys(Z))


def test_names_of_the_output_columns(points) -> None:
    assert list(KernelSVD(2).fit(points[0]).get_feature_names_out()) == ["kernelsvd0", "kernelsvd1"]


def test_works_in_a_pipeline() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    X = rng.normal(size=(200, 10))
    X[:, 0] += 4 * labels
    model = make_pipeline(KernelSVD(3, kernel="sne"), LogisticRegression()).fit(X[:150], labels[:150])
    assert model.score(X[150:], labels[150:]) > 0.9


def test_primal_weights_exist_for_explicit_features_alone(points) -> None:
    X, _ = points
    assert KernelSVD(2).fit(X).primal_weights_.w_e.shape == (5, 2)
    assert not hasattr(KernelSVD(2), "primal_weights_")
    implicit = KernelSVD(2, kernel="rbf").fit(X)
    with pytest.raises(AttributeError, match=r"primal weights need explicit features \(kernel='rbf'\)"):
        _ = implicit.primal_weights_
    assert not hasattr(implicit, "projection_weights_")
