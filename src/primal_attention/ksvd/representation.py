"""Remark 3.3: the projection scores of any point, in the primal by feature maps or in the dual by kernel values.

Primal:  e(x) = W_{e|X}ᵀ φ_q(x)             r(z) = W_{r|X}ᵀ φ_k(z)
Dual:    e(x) = Σ_j h_{r_j} κ(x, z_j)       r(z) = Σ_i h_{e_i} κ(x_i, z)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.ksvd.kernels import CallableKernel, ExplicitKernel, FeatureMap, Kernel, row_blocks

Array = NDArray[Any]


class PrimalWeights(NamedTuple):
    """A weight matrix for the queries and one for the keys."""

    w_e: Array
    w_r: Array


def _by_blocks(scores: Callable[[Array], Array], rows: Array, width: int) -> Array:
    return np.concatenate([scores(rows[block]) for block in row_blocks(len(rows), width)])


def _feature_sum(features: FeatureMap, points: Array, coefficients: Array) -> Array:
    """Σ_j φ(x_j) h_jᵀ over row blocks."""
    blocks = row_blocks(len(points), points.shape[1])
    first = next(blocks)
    total = features(points[first]).T @ coefficients[first]
    for block in blocks:
        total += features(points[block]).T @ coefficients[block]
    return total


@dataclass(frozen=True)
class PrimalRepresentation:
    """Scores by feature maps: O(p·s) per point, whatever the number of fitted points."""

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


@dataclass(frozen=True)
class PrecomputedRepresentation:
    """Scores of rows of kernel values: κ(x, z_1), …, κ(x, z_M) for a query, κ(x_1, z), …, κ(x_N, z) for a key."""

    query_coefficients: Array
    key_coefficients: Array

    def e(self, X: Array) -> Array:
        return X @ self.key_coefficients

    def r(self, Z: Array) -> Array:
        return Z @ self.query_coefficients


Representation = PrimalRepresentation | DualRepresentation | PrecomputedRepresentation
