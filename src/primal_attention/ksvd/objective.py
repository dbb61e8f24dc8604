"""The KSVD objective in sum form and the residual of its dual, the shifted eigenvalue problem.

J = ½ Σ_i e_iᵀ Λ e_i + ½ Σ_j r_jᵀ Λ r_j − Tr(W_eᵀ W_r)          (Lemma 4.2: zero at the solution)
K H_r = H_e Σ,   Kᵀ H_e = H_r Σ,   Σ = Λ⁻¹                        (Theorem 3.2)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
