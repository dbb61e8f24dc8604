"""KernelSVD as a scikit-learn estimator: its battery of checks, and what it does not check."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
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
def test_scikit_learn_checks(estimator, check) -> None:
    check(estimator)


X = np.random.default_rng(0).normal(size=(12, 3))


@pytest.mark.parametrize("kernel", ["cosine", "sne", (np.tanh, np.exp)])
def test_pickles_and_overwritten_data_keep_the_scores(kernel) -> None:
    queries, keys = X.copy(), X[:7].copy()
    ksvd = KernelSVD(2, kernel=kernel).fit(queries, Z=keys)
    before = ksvd.transform(X), ksvd.transform_keys(X)
    queries[:], keys[:] = 0, 0
    for model in (ksvd, pickle.loads(pickle.dumps(ksvd))):
        np.testing.assert_array_equal(model.transform(X), before[0])
        np.testing.assert_array_equal(model.transform_keys(X), before[1])


def test_primal_weights_exist_for_explicit_features_alone() -> None:
    explicit, implicit = KernelSVD(2).fit(X), KernelSVD(2, kernel="rbf").fit(X)
    assert explicit.primal_weights_.w_e.shape == (3, 2)
    assert list(explicit.get_feature_names_out()) == ["kernelsvd0", "kernelsvd1"]
    assert not hasattr(KernelSVD(2), "primal_weights_")
    with pytest.raises(AttributeError, match=r"primal weights need explicit features \(kernel='rbf'\)"):
        _ = implicit.primal_weights_
    assert not hasattr(implicit, "projection_weights_")


# Bad input: one line that names the argument, the value and what is accepted


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
        ({"kernel": "rbf", "solver": "primal"}, ValueError, r"solver='primal' needs explicit .* \(kernel='rbf'\)"),
        ({"kernel": "rbf", "gamma": 0}, ValueError, r"gamma must be a positive number or None \(gamma=0\)"),
        ({"kernel": "rbf", "gamma": np.nan}, ValueError, "gamma must be a positive number"),
        ({"kernel": "rbf", "gamma": "scale"}, TypeError, r"gamma must be .*\(gamma='scale'\)"),
        ({"n_landmarks": 0}, ValueError, r"n_landmarks must be an integer of at least 1 \(n_landmarks=0\)"),
        ({"n_landmarks": 1}, ValueError, r"at least n_components \(n_landmarks=1, n_components=2\)"),
        ({"n_oversamples": -1}, ValueError, "n_oversamples must be an integer of at least 0"),
        ({"n_iter": 1.0}, TypeError, "n_iter must be an integer of at least 0"),
        ({"kernel": "sne", "transformation": X}, ValueError, r"transformation needs explicit .* \(kernel='sne'\)"),
        ({"transformation": np.eye(4)}, ValueError, r"transformation must have 3 columns.*\(4, 4\)"),
        ({"kernel": lambda A, B: 1.0}, ValueError, r"kernel returned shape \(\) for 12 and 12 rows"),
        ({"kernel": lambda A, B: np.full((len(A), len(B)), np.nan)}, ValueError, "kernel returned values that are not"),
        ({"kernel": (lambda A: A.sum(), lambda B: B)}, ValueError, r"kernel's query feature map returned shape \(\)"),
        ({"kernel": (lambda A: A, lambda B: B[:, :2])}, ValueError, r"same width \(query 3, key 2\)"),
        ({"kernel": (lambda A: A * 1j, lambda B: B)}, ValueError, "query feature map returned values .*complex128"),
        ({"kernel": (lambda A: A, lambda B: B.astype(str))}, ValueError, "key feature map returned values"),
        ({"kernel": (lambda A: A * np.nan, lambda B: B)}, ValueError, "query feature map returned values"),
    ],
)
def test_bad_arguments(arguments, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        KernelSVD(**{"n_components": 2, **arguments}).fit(X)
    assert "\n" not in str(caught.value)


def test_bad_keys_and_new_points() -> None:
    with pytest.raises(ValueError, match=r"Z must have as many columns as X .*\(X \(12, 3\), Z \(12, 2\)\)"):
        KernelSVD(2).fit(X, Z=X[:, :2])
    with pytest.raises(ValueError, match="Z must be absent when kernel='precomputed'"):
        KernelSVD(2, kernel="precomputed").fit(X @ X.T, Z=X)
    with pytest.raises(ValueError, match="Z contains NaN"):
        KernelSVD(2).fit(X, Z=np.full((4, 3), np.nan))
    with pytest.raises(NotFittedError):
        KernelSVD(2).transform_keys(X)
    ksvd = KernelSVD(2).fit(X)
    with pytest.raises(ValueError, match="X has 2 features, but KernelSVD is expecting 3"):
        ksvd.transform(X[:, :2])
    with pytest.raises(ValueError, match="Z has 2 features, but KernelSVD was fitted on keys with 3"):
        ksvd.transform_keys(X[:, :2])


def test_a_table_of_keys_has_the_columns_of_the_queries_in_their_order() -> None:
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    other = table[["c", "b", "a"]]
    ksvd = KernelSVD(2).fit(table, Z=table.copy())
    for call in (ksvd.transform_keys, lambda Z: KernelSVD(2).fit(table, Z=Z), lambda Z: ksvd.partial_fit(table, Z=Z)):
        with pytest.raises(ValueError, match="feature names should match"):
            call(other)
    KernelSVD(2, kernel=(np.tanh, np.tanh)).fit(table, Z=other)  # feature maps of one's own may take other columns
