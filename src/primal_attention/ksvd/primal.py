"""The primal solver: singular triplets of K = Φ_q Φ_kᵀ from the features alone, K never formed.

With Φ_q = Q_q R_q, Φ_k = Q_k R_k and the small SVD R_q R_kᵀ = Û Σ V̂ᵀ, the triplets of K are Q_q Û, Σ, Q_k V̂.
O((N + M)·p²) time. The QR is taken in row blocks (TSQR), so nothing but the data and the singular vectors is N long.
The Gram matrices Φᵀ Φ would save a pass, but squaring loses every singular value below √ε of the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import svd
from threadpoolctl import threadpool_info, threadpool_limits

from primal_attention.ksvd.kernels import ExplicitKernel, row_blocks
from primal_attention.ksvd.solvers import Triplets, choose_signs, complete_basis

Array = NDArray[Any]
T = TypeVar("T")

# Blocks that stay in the cache while LAPACK works on them.
QR_BLOCK_ENTRIES = 2**20


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

    query_triangle: Array  # (≤ p, p)
    key_triangle: Array  # the same object while both sides have the same features
    shape: tuple[int, int]  # rows read

    @classmethod
    def empty(cls, width: int, dtype: Any) -> StreamedQR:
        triangle = np.empty((0, width), dtype=dtype)
        return cls(triangle, triangle, (0, 0))

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
        small_left, values, small_right_t = svd(core, full_matrices=False, check_finite=False)
        count = min(n_components, len(values))
        padding = (0, n_components - count)
        query_sums = np.pad(queries.T @ small_left[:, :count], ((0, 0), padding))
        key_sums = np.pad(keys.T @ small_right_t[:count].T, ((0, 0), padding))
        signs = choose_signs(query_sums)
        return query_sums * signs, np.pad(values[:count], padding), key_sums * signs


def _extend(triangle: Array, features: Callable[[Array], Array], rows: Array) -> Array:
    return np.asarray(np.linalg.qr(np.vstack([triangle, TallQR(features, rows).R]), mode="r"))


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


def primal(kernel: ExplicitKernel, X: Array, Z: Array, n_components: int, rng: np.random.RandomState) -> Triplets:
    """The leading singular triplets of [κ(x_i, z_j)] from the feature maps."""
    queries = TallQR(kernel.query_features, X)
    symmetric = X is Z and kernel.query_map is kernel.key_map
    keys = queries if symmetric else TallQR(kernel.key_features, Z)
    small_left, values, small_right_t = svd(queries.R @ keys.R.T, full_matrices=False, check_finite=False)
    count = min(n_components, len(values))
    small_left, small_right = small_left[:, :count], small_right_t[:count].T
    if symmetric:  # one pass over the data for both sides
        left, right = np.hsplit(queries.apply(np.hstack([small_left, small_right])), 2)
    else:
        left, right = queries.apply(small_left), keys.apply(small_right)
    left, right = complete_basis(left, n_components, rng), complete_basis(right, n_components, rng)
    signs = choose_signs(left)
    return left * signs, np.pad(values[:count], (0, n_components - count)), right * signs
