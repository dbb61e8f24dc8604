"""The primal and the dual form of the KSVD problem: projection scores, objective, and residual.

Remark 3.3, the projection scores of any point, in the primal by feature maps or in the dual by kernel values:

    Primal:  e(x) = W_{e|X}ᵀ φ_q(x)             r(z) = W_{r|X}ᵀ φ_k(z)
    Dual:    e(x) = Σ_j h_{r_j} κ(x, z_j)       r(z) = Σ_i h_{e_i} κ(x_i, z)

The objective in sum form, and the dual problem, a shifted eigenvalue problem:

    J = ½ Σ_i e_iᵀ Λ e_i + ½ Σ_j r_jᵀ Λ r_j − Tr(W_eᵀ W_r)          (Lemma 4.2: zero at the solution)
    K H_r = H_e Σ,   Kᵀ H_e = H_r Σ,   Σ = Λ⁻¹                        (Theorem 3.2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.ksvd.kernels import CallableKernel, ExplicitKernel, FeatureMap, Kernel, row_blocks

Array = NDArray[Any]


def positive_singular_values(singular_values: Array, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which singular values of a matrix of this shape exceed rounding errors; Λ = Σ⁻¹ exists for these only."""
    tolerance = max(shape) * np.finfo(singular_values.dtype).eps * singular_values[0]
    return singular_values > tolerance


def ksvd_objective(e_scores: Array, r_scores: Array, *, lam: Array, coupling: float) -> float:
    """The paper's J in sum form.

    Parameters
    ----------
    e_scores : array of shape (N, s)
        Projection scores of the queries, one row e_i per query.
    r_scores : array of shape (M, s)
        Projection scores of the keys.
    lam : array of shape (s,)
        The diagonal of Λ. At the solution it is one over the singular values.
    coupling : float
        Tr(W_eᵀ W_r). In the dual the same number is Tr(H_eᵀ K H_r).

    Returns
    -------
    float

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import ksvd_objective
    >>> K = np.array([[3.0, 1.0], [0.0, 2.0]])
    >>> left, sigma, right_t = np.linalg.svd(K)
    >>> e, r, coupling = K @ right_t.T, K.T @ left, np.trace(left.T @ K @ right_t.T)
    >>> bool(abs(ksvd_objective(e, r, lam=1 / sigma, coupling=coupling)) < 1e-12)
    True
    >>> bool(abs(ksvd_objective(e, r, lam=2 / sigma, coupling=coupling)) > 1)
    True
    """
    energy_e = np.einsum("is,is,s->", e_scores, e_scores, lam)
    energy_r = np.einsum("js,js,s->", r_scores, r_scores, lam)
    return float(0.5 * energy_e + 0.5 * energy_r - coupling)


def shifted_eigenvalue_residual(K: Array, left: Array, singular_values: Array, right: Array) -> float:
    """Residual of Theorem 3.2 at (H_e, Σ, H_r): the larger of ‖K H_r − H_e Σ‖ and ‖Kᵀ H_e − H_r Σ‖, over ‖K‖.

    Norms are Frobenius norms; zero for the zero kernel.

    Parameters
    ----------
    K : array of shape (N, M)
    left : array of shape (N, s)
        H_e.
    singular_values : array of shape (s,)
    right : array of shape (M, s)
        H_r.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import shifted_eigenvalue_residual
    >>> K = np.array([[3.0, 1.0], [0.0, 2.0]])
    >>> left, sigma, right_t = np.linalg.svd(K)
    >>> bool(shifted_eigenvalue_residual(K, left, sigma, right_t.T) < 1e-14)
    True
    """
    scale = np.linalg.norm(K)
    if scale == 0:
        return 0.0
    queries = np.linalg.norm(K @ right - left * singular_values)
    keys = np.linalg.norm(K.T @ left - right * singular_values)
    return float(max(queries, keys) / scale)


class PrimalWeights(NamedTuple):
    """A weight matrix for the queries and one for the keys."""

    w_e: Array
    w_r: Array


def _by_blocks(scores: Callable[[Array], Array], rows: Array, width: int) -> Array:
    return np.concatenate([scores(rows[block]) for block in row_blocks(len(rows), width)])


def _feature_sum(features: FeatureMap, points: Array, coefficients: Array) -> Array:
    """Σ_j φ(x_j) h_jᵀ over row blocks."""
    blocks = row_blocks(len(points), points.shape[1])
    return sum(features(points[block]).T @ coefficients[block] for block in blocks)


@dataclass(frozen=True)
class PrimalRepresentation:
    """Scores by feature maps: O(p·s) per point, whatever the number of fitted points.

    A row of precomputed kernel values is its own feature vector, and the coefficients are the projection weights.
    """

    kernel: ExplicitKernel
    weights: PrimalWeights  # W_e, W_r: (m, s) for F of shape (m, p), (p, s) without F
    projection_weights: PrimalWeights  # W_{e|X} = Fᵀ W_e, W_{r|X} = Fᵀ W_r: (p, s)

    @classmethod
    def from_dual(
        cls, kernel: ExplicitKernel, queries: Array, query_coefficients: Array, keys: Array, key_coefficients: Array
    ) -> PrimalRepresentation:
        """KKT conditions: W_e = Σ_j F φ_k(z_j) h_{r_j}ᵀ and W_r = Σ_i F φ_q(x_i) h_{e_i}ᵀ."""
        key_sums = _feature_sum(kernel.key_map, keys, key_coefficients)
        query_sums = _feature_sum(kernel.query_map, queries, query_coefficients)
        return cls.from_sums(kernel, query_sums, key_sums)

    @classmethod
    def from_sums(cls, kernel: ExplicitKernel, query_sums: Array, key_sums: Array) -> PrimalRepresentation:
        """Build the representation from Φ_qᵀ H_e and Φ_kᵀ H_r, (p, s)."""
        F = kernel.transformation
        if F is None:
            weights = PrimalWeights(key_sums, query_sums)
            return cls(kernel, weights, weights)
        weights = PrimalWeights(F @ key_sums, F @ query_sums)
        return cls(kernel, weights, PrimalWeights(F.T @ weights.w_e, F.T @ weights.w_r))

    def e(self, X: Array) -> Array:
        weights = self.projection_weights.w_e
        return _by_blocks(lambda rows: self.kernel.query_map(rows) @ weights, X, len(weights))

    def r(self, Z: Array) -> Array:
        weights = self.projection_weights.w_r
        return _by_blocks(lambda rows: self.kernel.key_map(rows) @ weights, Z, len(weights))


@dataclass(frozen=True)
class DualRepresentation:
    """Scores by kernel values against the fitted points, or against the landmarks of Nyström."""

    kernel: Kernel
    queries: Array
    query_coefficients: Array
    keys: Array
    key_coefficients: Array

    def e(self, X: Array) -> Array:
        return _by_blocks(lambda rows: self.kernel(rows, self.keys) @ self.key_coefficients, X, self._width(self.keys))

    def r(self, Z: Array) -> Array:
        return _by_blocks(
            lambda rows: self.kernel(self.queries, rows).T @ self.query_coefficients, Z, self._width(self.queries)
        )

    def _width(self, anchors: Array) -> int:
        # A callable kernel gets all rows at once: an entry may depend on other rows.
        return 0 if isinstance(self.kernel, CallableKernel) else len(anchors)


Representation = PrimalRepresentation | DualRepresentation
