"""Singular value decomposition of asymmetric kernels, in primal and in dual form."""

from primal_attention.ksvd.estimator import KernelSVD
from primal_attention.ksvd.objective import ksvd_objective, shifted_eigenvalue_residual
from primal_attention.ksvd.spectrum import (
    cumulative_explained_variance,
    effective_rank,
    low_rank_singular_values,
)

__all__ = [
    "KernelSVD",
    "cumulative_explained_variance",
    "effective_rank",
    "ksvd_objective",
    "low_rank_singular_values",
    "shifted_eigenvalue_residual",
]
