"""Solvers for the leading singular triplets of a kernel matrix, which is an array or known by its products only.

Each returns (left, singular values, right): orthonormal columns, values in decreasing order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from threadpoolctl import threadpool_info, threadpool_limits

from primal_attention.ksvd.kernels import ExplicitKernel, row_blocks

Array = NDArray[Any]
T = TypeVar("T")
Triplets = tuple[Array, Array, Array]

# Blocks that stay in the cache while LAPACK works on them.
QR_BLOCK_ENTRIES = 2**20

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
    left, values, right_t = np.linalg.svd(K, full_matrices=False)
    return left[:, :n_components], values[:n_components], right_t[:n_components].T


def lanczos(K: Array | LinearOperator, n_components: int, rng: np.random.RandomState) -> Triplets:
    """ARPACK's implicitly restarted Lanczos, to machine precision.

    It cannot return all singular values, nor start on a zero matrix; `dense` does both.
    """
    # In the range of K: from another start, ARPACK of SciPy before 1.15 loses singular values below √ε of the largest.
    start = rng.standard_normal(max(K.shape)).astype(K.dtype)
    start = (K.T if K.shape[0] >= K.shape[1] else K) @ start  # the side that svds iterates on
    start /= np.abs(start).max() or 1  # ARPACK multiplies it by K twice more: no underflow
    if n_components >= min(K.shape) or not np.any(start):
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
    right, values, small_t = np.linalg.svd(K.T @ basis, full_matrices=False)
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


# Explicit features


def primal(kernel: ExplicitKernel, X: Array, Z: Array, n_components: int, rng: np.random.RandomState) -> Triplets:
    """Singular triplets of K = Φ_q Φ_kᵀ from the features alone, without forming K.

    With Φ_q = Q_q R_q, Φ_k = Q_k R_k and the small SVD R_q R_kᵀ = Û Σ V̂ᵀ, the triplets of K are Q_q Û, Σ, Q_k V̂.
    O((N + M)·p²) time. The QR is taken in row blocks (TSQR), so nothing but the data and the singular vectors is N
    long. The Gram matrices Φᵀ Φ would save a pass, but squaring loses every singular value below √ε of the largest.
    """
    queries = TallQR(kernel.query_features, X)
    is_symmetric = X is Z and kernel.query_map is kernel.key_map
    keys = queries if is_symmetric else TallQR(kernel.key_features, Z)
    small_left, values, small_right = dense(queries.R @ keys.R.T, n_components)
    if is_symmetric:  # one pass over the data for both sides
        left, right = np.hsplit(queries.apply(np.hstack([small_left, small_right])), 2)
    else:
        left, right = queries.apply(small_left), keys.apply(small_right)
    left, right = complete_basis(left, n_components, rng), complete_basis(right, n_components, rng)
    signs = choose_signs(left)
    return left * signs, np.pad(values, (0, n_components - len(values))), right * signs


class TallQR:
    """Φ = Q R of a tall feature matrix, Q known only by its action.

    Pass 1 keeps the triangular factor of every row block and joins them by one more QR; pass 2, in `apply`, computes
    the blocks' Q again instead of storing N × p numbers.
    """

    def __init__(self, features: Callable[[Array], Array], rows: Array) -> None:
        self._features = features
        self._rows = rows
        width = features(rows[:1]).shape[1]
        # A block is several times as tall as wide, or the joint QR would be as large as the data.
        self._blocks = list(row_blocks(len(rows), width, entries=max(QR_BLOCK_ENTRIES, 8 * width * width)))
        triangles = _in_parallel(self._triangle, self._blocks)
        ends = np.cumsum([len(triangle) for triangle in triangles])[:-1]
        with threadpool_limits(limits=1, user_api="blas"):
            joint, self.R = np.linalg.qr(np.vstack(triangles))
        self._joint = np.split(joint, ends)

    def apply(self, small: Array) -> Array:
        """Q @ small, for `small` with as many rows as R."""
        out = np.empty((len(self._rows), small.shape[1]), dtype=np.result_type(self.R, small))

        def fill(task: tuple[slice, Array]) -> None:
            block, part = task
            out[block] = np.linalg.qr(self._features(self._rows[block]))[0] @ (part @ small)

        _in_parallel(fill, list(zip(self._blocks, self._joint, strict=True)))
        return out

    def _triangle(self, block: slice) -> Array:
        return np.asarray(np.linalg.qr(self._features(self._rows[block]), mode="r"))


@dataclass(frozen=True)
class StreamedQR:
    """The triangular factors of features that are read once, in blocks: all that `KernelSVD.partial_fit` stores.

    The factor of [Φ; Φ_new] is that of [R; Φ_new]. With H_e = Q_q Û the sums Φ_qᵀ H_e = R_qᵀ Û need no row again.
    """

    query_triangle: Any = None  # (≤ p, p), None before the first rows
    key_triangle: Any = None  # the same object while both sides have the same features
    shape: tuple[int, int] = (0, 0)  # rows read

    def add(self, kernel: ExplicitKernel, X: Array, Z: Array) -> StreamedQR:
        """The factors with the rows of X and Z added."""
        queries = _extend(self.query_triangle, kernel.query_map, X)
        if X is Z and kernel.query_map is kernel.key_map and self.query_triangle is self.key_triangle:
            keys = queries
        else:
            keys = _extend(self.key_triangle, kernel.key_map, Z)
        return StreamedQR(queries, keys, (self.shape[0] + len(X), self.shape[1] + len(Z)))

    def solve(self, kernel: ExplicitKernel, n_components: int) -> tuple[Array, Array, Array]:
        """Φ_qᵀ H_e, Σ and Φ_kᵀ H_r. The largest entry of each column of the first is positive."""
        queries, keys = self.query_triangle, self.key_triangle
        core = kernel.fold_features(queries) @ kernel.fold_features(keys).T
        small_left, values, small_right = dense(core, n_components)
        padding = (0, n_components - len(values))
        query_sums = np.pad(queries.T @ small_left, ((0, 0), padding))
        key_sums = np.pad(keys.T @ small_right, ((0, 0), padding))
        signs = choose_signs(query_sums)
        return query_sums * signs, np.pad(values, padding), key_sums * signs


def _extend(triangle: Array | None, features: Callable[[Array], Array], rows: Array) -> Array:
    added = TallQR(features, rows).R
    return added if triangle is None else np.asarray(np.linalg.qr(np.vstack([triangle, added]), mode="r"))


def _in_parallel(work: Callable[[Any], T], tasks: list[Any]) -> list[T]:
    """One block per thread, each with a single-threaded BLAS.

    A tall QR is thousands of small products. BLAS threads synchronise after each of them, which on a busy machine takes
    tens of times longer than the products. Separate blocks need no synchronisation. Uses as many threads as BLAS would.
    """
    if len(tasks) == 1:
        return [work(tasks[0])]
    workers = max((library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"), default=1)
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, tasks))
