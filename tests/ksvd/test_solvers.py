"""Every solver computes the singular triplets of the kernel at any shape; the primal one never forms it."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.ksvd import KernelSVD, shifted_eigenvalue_residual
from primal_attention.ksvd.kernels import row_blocks
from primal_attention.ksvd.solvers import choose_solver

# The promise of the exact solvers, relative to the largest singular value.
PROMISED = 1e-8

EXPLICIT = ("cosine", "linear")
SIDE = st.integers(1, 60)
EXACT_PAIRS = [(kernel, solver) for kernel in (*EXPLICIT, "rbf", "sne") for solver in ("dense", "lanczos")]
EXACT_PAIRS += [(kernel, "primal") for kernel in EXPLICIT]


def two_sources(n: int, m: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, width)), rng.normal(size=(m, width))


def assert_is_svd(ksvd: KernelSVD, K: np.ndarray, tolerance: float = PROMISED) -> None:
    """Values as numpy's, vectors orthonormal, and both equations of Theorem 3.2."""
    left, sigma, right = ksvd.left_vectors_, ksvd.singular_values_, ksvd.right_vectors_
    n_components = len(sigma)
    expected = np.linalg.svd(K, compute_uv=False)[:n_components]
    scale = max(expected[0], np.finfo(float).tiny)
    assert np.abs(sigma - expected).max() <= tolerance * scale
    np.testing.assert_allclose(left.T @ left, np.eye(n_components), atol=tolerance)
    np.testing.assert_allclose(right.T @ right, np.eye(n_components), atol=tolerance)
    assert shifted_eigenvalue_residual(K, left, sigma, right) <= tolerance


@settings(max_examples=80, deadline=None)
@given(n=SIDE, m=SIDE, width=st.integers(1, 12), share=st.floats(0, 1), pair=st.sampled_from(EXACT_PAIRS))
def test_exact_solvers_agree_with_numpy(n, m, width, share, pair) -> None:
    """Also ranks below n_components, where singular values are zero, and all of the spectrum."""
    X, Z = two_sources(n, m, width, seed=n * m)
    n_components = 1 + int(share * (min(n, m) - 1))
    ksvd = KernelSVD(n_components, kernel=pair[0], solver=pair[1], random_state=0).fit(X, Z=Z)
    assert ksvd.solver_ == pair[1]
    assert ksvd.left_vectors_.shape == (n, n_components)
    assert ksvd.right_vectors_.shape == (m, n_components)
    assert_is_svd(ksvd, ksvd.kernel_(X, Z))
    assert abs(ksvd.objective_) <= PROMISED * max(1, ksvd.singular_values_.sum())


@pytest.mark.parametrize("solver", ["dense", "lanczos", "randomized", "nystrom", "primal"])
def test_zero_kernel(solver) -> None:
    ksvd = KernelSVD(3, solver=solver, random_state=0).fit(np.zeros((20, 4)))
    assert not ksvd.singular_values_.any()
    assert ksvd.objective_ == 0
    np.testing.assert_allclose(ksvd.left_vectors_.T @ ksvd.left_vectors_, np.eye(3), atol=1e-12)
    assert not ksvd.transform(np.ones((2, 4))).any()


@pytest.mark.parametrize("solver", ["primal", "lanczos"])
def test_small_singular_values_survive(solver) -> None:
    """Features of condition 1e5, kernel of condition 1e10. The values are known: scales², and Q_x, Q_z cancel.

    The Gram matrices would leave nothing of the last one, and even the formed K rounds it to eight digits.
    """
    rng = np.random.default_rng(0)
    scales = np.logspace(0, -5, 6)
    X = np.linalg.qr(rng.normal(size=(200, 6)))[0] * scales
    Z = np.linalg.qr(rng.normal(size=(150, 6)))[0] * scales
    ksvd = KernelSVD(6, kernel="linear", solver=solver, random_state=0).fit(X, Z=Z)
    np.testing.assert_allclose(ksvd.singular_values_, scales**2, rtol=1e-9)


@pytest.mark.parametrize("kernel", ["cosine", "rbf", "sne"])
def test_signs_do_not_depend_on_the_solver(kernel) -> None:
    X, Z = two_sources(70, 60, 8)
    solvers = ["dense", "lanczos"] + (["primal"] if kernel in EXPLICIT else [])
    fits = [KernelSVD(4, kernel=kernel, solver=solver, random_state=0).fit(X, Z=Z) for solver in solvers]
    for other in fits[1:]:
        np.testing.assert_allclose(other.left_vectors_, fits[0].left_vectors_, atol=1e-8)
        np.testing.assert_allclose(other.right_vectors_, fits[0].right_vectors_, atol=1e-8)
    largest = np.abs(fits[0].left_vectors_).argmax(axis=0)
    assert (fits[0].left_vectors_[largest, np.arange(4)] > 0).all()


# Randomized and Nyström


@pytest.mark.parametrize("kernel", ["cosine", "precomputed"])
@pytest.mark.parametrize("solver", ["nystrom", "randomized"])
@pytest.mark.parametrize("sources", [1, 2])
def test_sampled_solvers_are_exact_once_the_sample_reaches_the_rank(kernel, solver, sources) -> None:
    X, Z = two_sources(150, 130, 8)
    Z = Z if sources == 2 else X
    ksvd = KernelSVD(5, kernel=kernel, solver=solver, n_landmarks=20, random_state=0)
    K = KernelSVD(1).fit(X, Z=Z).kernel_(X, Z)
    ksvd.fit(K) if kernel == "precomputed" else ksvd.fit(X, Z=Z)
    assert_is_svd(ksvd, K)


def test_nystrom_never_blows_up_on_a_kernel_that_cannot_be_sampled() -> None:
    """A narrow kernel has no low rank; a plain pseudo-inverse of the sampled square makes K̂ many times K."""
    X, Z = two_sources(500, 450, 20)
    for seed in range(3):
        ksvd = KernelSVD(5, kernel="rbf", gamma=0.2, solver="nystrom", n_landmarks=50, random_state=seed).fit(X, Z=Z)
        exact = np.linalg.svd(ksvd.kernel_(X, Z), compute_uv=False)
        assert ksvd.singular_values_[0] < 3 * exact[0]


@pytest.mark.parametrize("kernel", ["rbf", "sne", "cosine", "precomputed"])
def test_nystrom_scores_are_those_of_its_own_kernel(kernel) -> None:
    """K̂ H_r = H_e Σ on the fitted points, and a copy of a fitted point has its scores."""
    X, Z = two_sources(200, 180, 4)
    ksvd = KernelSVD(5, kernel=kernel, solver="nystrom", n_landmarks=30, random_state=0)
    if kernel == "precomputed":
        X = KernelSVD(1, kernel="rbf").fit(X, Z=Z).kernel_(X, Z)
        e, Z = ksvd.fit_transform(X), X.T
        assert np.count_nonzero(ksvd.transform(np.eye(180)).any(axis=1)) == 30  # columns of the sample alone
    else:
        e = ksvd.fit_transform(X, Z=Z)
    # Directions down to 1.8e-12 of the kernel are divided by: the last digits of κ are lost in them.
    tolerance = 1e-6 * ksvd.singular_values_[0]
    np.testing.assert_allclose(e, ksvd.left_vectors_ * ksvd.singular_values_, atol=tolerance)
    np.testing.assert_allclose(ksvd.transform(X[:7].copy()), e[:7], atol=tolerance)
    r = ksvd.transform_keys(Z)
    np.testing.assert_allclose(r, ksvd.right_vectors_ * ksvd.singular_values_, atol=tolerance)
    assert abs(ksvd.objective_) < 1e-6 * ksvd.singular_values_.sum()


def errors(ksvd: KernelSVD, exact: KernelSVD) -> tuple[np.ndarray, np.ndarray]:
    """|σ_i − σ̂_i| and √(‖u_i − û_i‖² + ‖v_i − v̂_i‖²), the sign of a pair chosen for the smaller one."""
    ours, theirs = (np.vstack([fit.left_vectors_, fit.right_vectors_]) for fit in (ksvd, exact))
    theirs = theirs * np.sign(np.einsum("is,is->s", ours, theirs))
    return np.abs(ksvd.singular_values_ - exact.singular_values_), np.linalg.norm(ours - theirs, axis=0)


@pytest.mark.parametrize("kernel", ["rbf", "sne", "cosine", "precomputed"])
@pytest.mark.parametrize("sources", [1, 2])
def test_nystrom_errors_stay_below_their_bounds(kernel, sources, monkeypatch) -> None:
    monkeypatch.setattr("primal_attention.ksvd.estimator.row_blocks", partial(row_blocks, entries=5000))
    X, Z = two_sources(200, 170, 3)
    Z = Z if sources == 2 else X
    if kernel == "precomputed":
        X, Z = KernelSVD(1, kernel="sne").fit(X, Z=Z).kernel_(X, Z), None
    exact = KernelSVD(4, kernel=kernel, solver="dense").fit(X, Z=Z)
    for n_landmarks in (4, 30, 120):
        ksvd = KernelSVD(4, kernel=kernel, solver="nystrom", n_landmarks=n_landmarks, random_state=1).fit(X, Z=Z)
        bound, (values, vectors) = ksvd.error_bound(X, Z=Z), errors(ksvd, exact)
        assert (values <= bound.values).all()
        assert (vectors <= bound.vectors + 1e-9).all()  # a bound of 2 is reached by orthogonal vectors
    # Once the sample is large the bounds are useful, not only valid.
    assert bound.values.max() < 1e-4 * ksvd.singular_values_[0]
    assert bound.vectors[:3].max() < 0.1


def test_bounds_need_nystrom_and_the_rows_of_fit() -> None:
    X, Z = two_sources(60, 50, 3)
    with pytest.raises(ValueError, match=r"error_bound needs solver='nystrom' \(solver_='dense'\)"):
        KernelSVD(2, kernel="rbf").fit(X).error_bound(X)
    ksvd = KernelSVD(2, kernel="rbf", solver="nystrom").fit(X, Z=Z)
    with pytest.raises(ValueError, match=r"those of fit, 60 queries and 50 keys \(got \(60, 60\)\)"):
        ksvd.error_bound(X)


# More rows than memory

BLOCKS = [slice(0, 40), slice(40, 47), slice(47, 48), slice(48, 120)]


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "cosine"},
        {"kernel": "linear", "transformation": two_sources(9, 1, 5)[0]},
        {"kernel": "linear", "transformation": two_sources(3, 1, 5)[0]},
        {"kernel": (np.tanh, lambda rows: rows**2)},
        {"kernel": "cosine", "n_components": 7},  # more than the rank, which is 5
    ],
)
def test_blocks_of_rows_give_the_decomposition_of_all_rows(settings, sources) -> None:
    X, Z = two_sources(120, 120, 5)
    Z = Z if sources == 2 else X
    at_once = KernelSVD(**{"n_components": 3, **settings}).fit(X, Z=Z)
    streamed = KernelSVD(**{"n_components": 3, **settings})
    for block in BLOCKS:
        streamed.partial_fit(X[block], Z=None if sources == 1 else Z[block])
    np.testing.assert_allclose(streamed.singular_values_, at_once.singular_values_, atol=1e-12)
    assert abs(streamed.objective_) < 1e-10
    e, expected = streamed.transform(X), at_once.transform(X)
    signs = np.sign(np.einsum("is,is->s", e, expected)) + (at_once.singular_values_ < 1e-9)
    np.testing.assert_allclose(e, expected * signs, atol=1e-10)
    np.testing.assert_allclose(streamed.transform_keys(Z), at_once.transform_keys(Z) * signs, atol=1e-10)
    np.testing.assert_allclose(streamed.primal_weights_.w_e, at_once.primal_weights_.w_e * signs, atol=1e-9)


def test_memory_of_partial_fit_is_that_of_one_block() -> None:
    rng, rows = np.random.default_rng(0), 2000
    ksvd = KernelSVD(3, kernel="cosine")
    block_bytes = rng.normal(size=(rows, 8)).nbytes
    tracemalloc.start()
    for _ in range(100):
        ksvd.partial_fit(rng.normal(size=(rows, 8)) + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * block_bytes  # all rows would be 100 blocks
    assert ksvd.singular_values_[0] > 0.3 * 100 * rows  # the mean direction of all rows


def test_partial_fit_starts_again_after_fit_and_refuses_what_it_cannot_stream() -> None:
    X, Z = two_sources(60, 50, 4)
    ksvd = KernelSVD(2).partial_fit(X[:30]).fit(X).partial_fit(X[:30])
    np.testing.assert_allclose(ksvd.singular_values_, KernelSVD(2).fit(X[:30]).singular_values_)
    assert not hasattr(ksvd, "left_vectors_")
    with pytest.raises(ValueError, match="n_components must be at most 1"):
        KernelSVD(2).partial_fit(X[:1])
    with pytest.raises(ValueError, match="transformation must be an array in partial_fit"):
        KernelSVD(2, transformation=lambda rows: rows).partial_fit(X)
    with pytest.raises(ValueError, match="Z has 3 features, but earlier blocks had 4"):
        KernelSVD(2, kernel=(lambda a: a[:, :2], lambda b: b[:, :2])).partial_fit(X, Z=Z).partial_fit(X, Z=Z[:, :3])
    with pytest.raises(AttributeError) as caught:
        _ = KernelSVD(2, kernel="rbf").partial_fit
    assert "partial_fit needs explicit features (kernel='rbf')" in str(caught.value.__cause__)


# The primal solver at size


@pytest.mark.parametrize(
    ("rows", "columns", "settings"),
    [
        (10_000, 6, {"solver": "lanczos"}),
        (10_000, 6, {"solver": "randomized"}),
        (10_000, 4, {"kernel": "linear", "transformation": lambda rows: rows}),
    ],
    ids=["lanczos", "randomized", "f(X) with a row per sample"],
)
def test_no_solver_forms_a_kernel_with_features(rows, columns, settings) -> None:
    """K, or f(X) φ of shape N × N, would take 800 MB; f(X) enters through its p × p factor."""
    X, Z = two_sources(rows, rows, columns)
    tracemalloc.start()
    ksvd = KernelSVD(2, random_state=0, **settings).fit(X, Z=Z)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * X.nbytes
    if "solver" in settings:
        np.testing.assert_allclose(ksvd.singular_values_, KernelSVD(2).fit(X, Z=Z).singular_values_, rtol=1e-8)
    else:
        assert ksvd.primal_weights_.w_e.shape == (rows, 2)
        assert ksvd.projection_weights_.w_e.shape == (columns, 2)


@pytest.mark.parametrize(
    ("shape", "n_components", "explicit", "precomputed", "expected"),
    [
        ((10**6, 10**6), 10, True, False, "primal"),
        ((5, 5), 2, True, False, "primal"),
        ((500, 9000), 10, False, False, "dense"),
        ((2000, 2000), 300, False, False, "dense"),
        ((2000, 2000), 10, False, False, "lanczos"),
        ((20_000, 20_000), 10, False, False, "nystrom"),
        ((20_000, 20_000), 10, False, True, "lanczos"),
    ],
)
def test_auto_follows_the_documented_rule(shape, n_components, explicit, precomputed, expected) -> None:
    assert choose_solver(shape, n_components, explicit=explicit, precomputed=precomputed) == expected
