"""Solvers for the leading singular triplets of a kernel matrix, which is an array or known by its products only.

Each returns (left, singular values, right): orthonormal columns, values in decreasing order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import svd
from scipy.sparse.linalg import LinearOperator, svds

Array = NDArray[Any]
Triplets = tuple[Array, Array, Array]

SOLVERS = ("auto", "dense", "lanczos", "randomized", "nystrom", "primal")

# Below this size LAPACK's full decomposition is faster than the first few Lanczos iterations.
DENSE_UP_TO = 500
# Lanczos needs a few vectors per wanted triplet; from this share of the spectrum on, all of it is cheaper.
DENSE_FROM_SHARE = 0.1
# The largest kernel matrix that "auto" forms: 0.8 GB in float64.
FORM_UP_TO = 10**8


def choose_solver(shape: tuple[int, int], n_components: int, *, explicit: bool, precomputed: bool) -> str:
    """Return the solver that `solver="auto"` stands for; `KernelSVD` documents the rule."""
    if explicit:
        return "primal"
    if shape[0] * shape[1] > FORM_UP_TO and not precomputed:
        return "nystrom"
    if min(shape) <= DENSE_UP_TO or n_components > DENSE_FROM_SHARE * min(shape):
        return "dense"
    return "lanczos"


def dense(K: Array, n_components: int) -> Triplets:
    """Compute the full SVD by LAPACK and return its leading part."""
    left, values, right_t = svd(K, full_matrices=False, check_finite=False)
    return left[:, :n_components], values[:n_components], right_t[:n_components].T


def lanczos(K: Array | LinearOperator, n_components: int, rng: np.random.RandomState) -> Triplets:
    """ARPACK's implicitly restarted Lanczos, to machine precision.

    It cannot return all singular values, nor start on a zero matrix; `dense` does both.
    """
    start = rng.standard_normal(min(K.shape)).astype(K.dtype)
    needs_all = n_components >= min(K.shape)
    if needs_all or not np.any(K @ (start if K.shape[1] <= K.shape[0] else K.T @ start)):
        return dense(K if isinstance(K, np.ndarray) else K @ np.eye(K.shape[1], dtype=K.dtype), n_components)
    left, values, right_t = svds(K, k=n_components, v0=start, solver="arpack")
    order = np.argsort(values)[::-1]
    return left[:, order], values[order], right_t[order].T


def randomized(
    K: Array | LinearOperator, n_components: int, rng: np.random.RandomState, *, n_oversamples: int, n_iter: int
) -> Triplets:
    """Randomized subspace iteration: a random range finder, `n_iter` power steps with a QR after each product.

    Exact when the rank of K is at most n_components + n_oversamples; else its error falls with the spectral gap to the
    power 2·n_iter + 1 (Halko, Martinsson, Tropp 2011).
    """
    width = min(n_components + n_oversamples, min(K.shape))
    basis = K @ rng.standard_normal((K.shape[1], width)).astype(K.dtype)
    for _ in range(n_iter):
        basis = K @ np.linalg.qr(K.T @ np.linalg.qr(basis)[0])[0]
    basis = np.linalg.qr(basis)[0]
    # SVD of Kᵀ·basis, tall and thin, is the Rayleigh–Ritz step: its values are never above the true ones.
    right, values, small_t = svd(K.T @ basis, full_matrices=False, check_finite=False)
    left = basis @ small_t.T
    return left[:, :n_components], values[:n_components], right[:, :n_components]


def complete_basis(basis: Array, n_columns: int, rng: np.random.RandomState) -> Array:
    """Extend orthonormal columns by further ones, up to `n_columns`.

    A kernel of rank below n_components leaves its last singular vectors free; any completion is right.
    """
    missing = n_columns - basis.shape[1]
    if missing <= 0:
        return basis[:, :n_columns]
    extra = rng.standard_normal((len(basis), missing)).astype(basis.dtype)
    for _ in range(2):  # one pass leaves a part of `basis` of the size of rounding, two do not
        extra -= basis @ (basis.T @ extra)
        extra = np.linalg.qr(extra)[0]
    return np.hstack([basis, extra])


def choose_signs(left: Array) -> Array:
    """Return the signs that make the largest entry of every left vector positive; the sign of a pair is arbitrary."""
    largest = np.argmax(np.abs(left), axis=0)
    return np.where(left[largest, np.arange(left.shape[1])] < 0, -1, 1).astype(left.dtype)
