"""Asymmetric Nyström: the kernel SVD from a sample of its rows and a sample of its columns.

Landmark queries I and landmark keys J give C = K[:, J] (N × m) and R = K[I, :] (n × M). On the sample alone Theorem 3.2
reads K[I, J] Ṽ = Ũ Σ̃, and each singular function extends to all points by its own equation, Û = C Ṽ Σ̃⁻¹ and
V̂ = Rᵀ Ũ Σ̃⁻¹: the classical formula, K̂ = Û Σ̃ V̂ᵀ = C K[I, J]⁺ R.

Where rows and columns are sampled independently, K[I, J] is a square matrix without structure, its smallest singular
values are close to zero by chance, and its pseudo-inverse can make K̂ larger than K. The best core between C and R is
the least-squares one, C⁺ K R⁺, which needs all of K; here it is fitted on a larger sample I' ⊃ I, J' ⊃ J,

    K̂ = C G R,   G = C[I', :]⁺ K[I', J'] R[:, J']⁺,

the classical formula again when I' = I and J' = J, and K itself when the landmarks reach the rank of K. The singular
triplets of K̂ follow exactly from those of C, R and a small core, so Theorem 3.2 and Lemma 4.2 hold for K̂ to rounding.
A new point is compared with the landmarks only: e(x) = κ(x, Z_J) G R H_r and r(z) = κ(X_I, z)ᵀ Gᵀ Cᵀ H_e.

Error bound. The operator A = [[0, K], [Kᵀ, 0]] of Theorem 3.2, the coupled covariances seen from the data, is symmetric
with eigenvalues ±σ_i and zeros. Weyl: |σ_i − σ̂_i| ≤ δ = ‖K − K̂‖_F. The unit vector (û_i, v̂_i) / √2 has a residual ρ_i.
So an eigenvalue lies within ρ_i of σ̂_i; all but σ_i are at least g_i = min(σ̂_{i−1} − σ̂_i, σ̂_i − σ̂_{i+1}) − δ away. If
ρ_i < g_i, Kato–Temple and Davis–Kahan bound σ_i and the angle. `docs/notes/theory.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.ksvd.solvers import Triplets, choose_signs, complete_basis, dense

Array = NDArray[Any]

# |I'| / |I|: a random tall matrix of this aspect has a condition number near (√4 + 1) / (√4 − 1) = 3.
CORE_OVERSAMPLING = 4
# Directions whose norm on I' is below this fraction of the largest one are not estimated from it.
MIN_SAMPLED_NORM = 0.2


@dataclass(frozen=True)
class Sample:
    """Indices into one side of the kernel: `core` is I' (or J'), and its first `size` entries are I (or J)."""

    core: Array
    size: int

    @property
    def landmarks(self) -> Array:
        return self.core[: self.size]

    @classmethod
    def draw(cls, population: int, size: int, rng: np.random.RandomState) -> Sample:
        """Draw uniformly, without replacement, at most the population."""
        return cls(rng.permutation(population)[: CORE_OVERSAMPLING * size], min(size, population))


class ErrorBound(NamedTuple):
    """Bounds on the error of each Nyström triplet against the exact one."""

    values: Array  # (s,), of |σ_i − σ̂_i|
    vectors: Array  # (s,), of √(‖u_i − û_i‖² + ‖v_i − v̂_i‖²); 2 where the bound does not separate the triplet


def nystrom(
    C: Array, R: Array, core: Array, samples: tuple[Sample, Sample], n_components: int, rng: np.random.RandomState
) -> tuple[Triplets, Array, Array]:
    """Singular triplets of K̂ = C G R, from C = K[:, J], R = K[I, :] and core = K[I', J'].

    The second and third result are the coefficients of the scores of new points, (n, s) and (m, s):
    r(z) = κ(X_I, z)ᵀ @ query_coefficients and e(x) = κ(x, Z_J) @ key_coefficients.
    """
    left_basis, to_left = _range(C)
    right_basis, to_right = _range(R.T)
    left_inverse = np.linalg.pinv(left_basis[samples[0].core], rcond=MIN_SAMPLED_NORM)
    right_inverse = np.linalg.pinv(right_basis[samples[1].core], rcond=MIN_SAMPLED_NORM)
    small_left, values, small_right = dense(left_inverse @ core @ right_inverse.T, n_components)
    left, right = left_basis @ small_left, right_basis @ small_right
    missing = n_components - len(values)
    left, right = complete_basis(left, n_components, rng), complete_basis(right, n_components, rng)
    # K̂ H_r = H_e Σ, and the columns of H_e are C @ to_left @ small_left: completed columns have Σ = 0.
    key_coefficients = np.pad(to_left @ (small_left * values), ((0, 0), (0, missing)))
    query_coefficients = np.pad(to_right @ (small_right * values), ((0, 0), (0, missing)))
    signs = choose_signs(left)
    triplets = (left * signs, np.pad(values, (0, missing)), right * signs)
    return triplets, query_coefficients * signs, key_coefficients * signs


def _range(A: Array) -> tuple[Array, Array]:
    """An orthonormal basis of the range of A, and T with basis = A T.

    Directions below ε^¾ (1.8e-12 in float64) of the largest are rounding errors, by which T would divide.
    """
    basis, values, right_t = np.linalg.svd(A, full_matrices=False)
    is_large = values > np.finfo(values.dtype).eps ** 0.75 * values[0]
    return basis[:, is_large], right_t[is_large].T / values[is_large]


def bound_errors(blocks: Iterable[tuple[slice, Array]], triplets: Triplets, n_components: int) -> ErrorBound:
    """Bounds for the leading triplets of K̂, given all triplets of K̂ and the rows of K in blocks."""
    left, values, right = triplets
    u, v = left[:, :n_components], right[:, :n_components]
    distance, images, adjoint = 0.0, np.empty_like(u), np.zeros_like(v)
    for rows, K in blocks:
        difference = K - (left[rows] * values) @ right.T
        distance += float(np.vdot(difference, difference))
        images[rows] = difference @ v  # K v̂ − σ̂ û, because K̂ v̂ = σ̂ û
        adjoint += difference.T @ u[rows]
    rounding = max(len(left), len(right)) * np.finfo(values.dtype).eps * values[0]
    delta = np.sqrt(distance) + rounding
    rho = np.sqrt((np.square(images).sum(axis=0) + np.square(adjoint).sum(axis=0)) / 2) + rounding
    shift = np.abs(np.einsum("is,is->s", u, images)) + rounding
    steps = -np.diff(np.concatenate([[np.inf], values, [0.0]]))  # σ̂_{i−1} − σ̂_i
    gap = np.minimum(steps[:n_components], steps[1 : n_components + 1]) - delta
    bounds, sines = np.full(n_components, delta), np.ones(n_components)
    for i in np.flatnonzero((rho < gap) & (shift < gap)):
        bounds[i] = min(delta, rho[i], shift[i] + rho[i] ** 2 / (gap[i] - shift[i]))
        sines[i] = rho[i] / gap[i]
    return ErrorBound(bounds, 2 * sines / np.sqrt(1 + np.sqrt(1 - sines**2)))
