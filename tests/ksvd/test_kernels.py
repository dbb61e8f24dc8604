"""Each kernel is the function that its documentation says, on fitted and on new points."""

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity, rbf_kernel

from primal_attention.ksvd import KernelSVD
from primal_attention.ksvd.kernels import SNEKernel, row_blocks


@pytest.fixture
def points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(25, 4)), rng.normal(size=(18, 4))


def test_named_kernels(points) -> None:
    X, Z = points
    for kernel, gamma, expected in (
        ("cosine", None, cosine_similarity(X, Z)),
        ("linear", None, X @ Z.T),
        ("rbf", None, rbf_kernel(X, Z, gamma=0.25)),  # one over the number of features
        ("rbf", 2, rbf_kernel(X, Z, gamma=2)),
    ):
        ksvd = KernelSVD(2, kernel=kernel, gamma=gamma).fit(X, Z=Z)
        np.testing.assert_allclose(ksvd.kernel_(X, Z), expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "exponent"), [(np.float64, 1000), (np.float64, -1000), (np.float32, 120)])
def test_cosine_does_not_depend_on_the_size_of_the_values(points, dtype, exponent) -> None:
    X = points[0].astype(dtype)
    ksvd, expected = KernelSVD(2).fit(np.ldexp(X, exponent)), KernelSVD(2).fit(X)
    np.testing.assert_array_equal(ksvd.singular_values_, expected.singular_values_)


def test_sne_normalises_over_the_fitted_keys(points) -> None:
    X, Z = points
    kernel = KernelSVD(2, kernel="sne", gamma=0.5).fit(X, Z=Z).kernel_
    rng = np.random.default_rng(1)
    new_queries, new_keys = rng.normal(size=(5, 4)), rng.normal(size=(6, 4))
    normaliser = rbf_kernel(new_queries, Z, gamma=0.5).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(kernel(new_queries, new_keys), rbf_kernel(new_queries, new_keys, gamma=0.5) / normaliser)
    np.testing.assert_allclose(kernel(X, Z).sum(axis=1), 1)
    # One fitted key has the same values as among all of them.
    np.testing.assert_allclose(kernel(new_queries, Z[3:4]), kernel(new_queries, Z)[:, 3:4])


def test_sne_is_finite_far_from_every_key() -> None:
    keys = np.zeros((3, 2))
    K = SNEKernel(1.0, keys)(np.full((1, 2), 1e3), keys)
    np.testing.assert_allclose(K, 1 / 3)


def test_precomputed_kernel_equals_the_kernel_itself(points) -> None:
    X, Z = points
    direct = KernelSVD(4, kernel="rbf").fit(X, Z=Z)
    K = direct.kernel_(X, Z)
    precomputed = KernelSVD(4, kernel="precomputed").fit(K)
    np.testing.assert_allclose(precomputed.singular_values_, direct.singular_values_)
    rng = np.random.default_rng(2)
    queries, keys = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    np.testing.assert_allclose(precomputed.transform(direct.kernel_(queries, Z)), direct.transform(queries), atol=1e-12)
    of_keys = precomputed.transform_keys(direct.kernel_(X, keys).T)
    np.testing.assert_allclose(of_keys, direct.transform_keys(keys), atol=1e-12)
    assert precomputed.kernel_ is None


@pytest.mark.parametrize(
    ("kernel", "formed", "width"),
    [
        (lambda A, B: np.tanh(A @ B.T + 0.1), lambda X, Z: np.tanh(X @ Z.T + 0.1), 4),
        (lambda A, B: (A[:, :2] @ B.T > 0).astype(int), lambda X, Z: 1.0 * (X[:, :2] @ Z.T > 0), 2),
        ((np.tanh, np.exp), lambda X, Z: np.tanh(X) @ np.exp(Z).T, 4),
    ],
    ids=["callable", "integer values of keys of another width", "feature maps"],
)
def test_kernels_of_the_caller(points, kernel, formed, width) -> None:
    X, Z = points[0], points[1][:, :width]
    ksvd, K = KernelSVD(3, kernel=kernel).fit(X, Z=Z), formed(X, Z)
    assert ksvd.singular_values_.dtype == np.float64
    assert (ksvd.n_features_in_, ksvd.n_features_keys_) == (4, width)
    np.testing.assert_allclose(ksvd.singular_values_, np.linalg.svd(K, compute_uv=False)[:3])
    np.testing.assert_allclose(ksvd.transform(X), K @ ksvd.right_vectors_, atol=1e-12)
    np.testing.assert_allclose(ksvd.transform_keys(Z), K.T @ ksvd.left_vectors_, atol=1e-12)


@pytest.mark.parametrize("as_callable", [False, True])
def test_transformation_changes_the_kernel(points, as_callable) -> None:
    X, Z = points
    F = X[:3]
    ksvd = KernelSVD(2, kernel="linear", transformation=(lambda rows: rows[:3]) if as_callable else F).fit(X, Z=Z)
    np.testing.assert_allclose(ksvd.transformation_, F)
    np.testing.assert_allclose(ksvd.kernel_(X, Z), (X @ F.T) @ (Z @ F.T).T, atol=1e-12)


@pytest.mark.parametrize("kernel", ["rbf", "sne", "cosine"])
def test_scores_do_not_depend_on_the_block_size(points, kernel, monkeypatch) -> None:
    X, Z = points
    ksvd = KernelSVD(3, kernel=kernel, solver="nystrom", n_landmarks=10, random_state=0).fit(X, Z=Z)
    expected = ksvd.transform(X), ksvd.transform_keys(Z)
    monkeypatch.setattr(row_blocks, "__kwdefaults__", {"entries": 32})
    refit = KernelSVD(3, kernel=kernel, solver="nystrom", n_landmarks=10, random_state=0).fit(X, Z=Z)
    for model in (ksvd, refit):
        np.testing.assert_allclose(model.transform(X), expected[0], atol=1e-9)
        np.testing.assert_allclose(model.transform_keys(Z), expected[1], atol=1e-9)
