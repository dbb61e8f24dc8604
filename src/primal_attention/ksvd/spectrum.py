"""Measures of a kernel's rank from its singular values: NumPy arrays or torch tensors, batched over leading axes."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

ArrayT = TypeVar("ArrayT", np.ndarray, torch.Tensor)


def _checked(singular_values: Any) -> Any:
    if not isinstance(singular_values, np.ndarray | torch.Tensor):
        singular_values = np.asarray(singular_values, dtype=float)
    if singular_values.ndim == 0 or singular_values.shape[-1] == 0:
        shape = tuple(singular_values.shape)
        raise ValueError(f"singular_values must have at least one entry along its last axis (shape={shape})")
    if bool((singular_values < 0).any()):
        raise ValueError(f"singular_values must not be negative (smallest={float(singular_values.min())})")
    return singular_values


def effective_rank(singular_values: ArrayT) -> ArrayT:
    """Effective rank: the exponential of the entropy of the normalised singular values.

    Between 1 (one nonzero singular value) and n (all singular values equal); 0 for a zero matrix.

    Parameters
    ----------
    singular_values : array or tensor of shape (..., n)
        In any order.

    Returns
    -------
    array or tensor of shape (...)

    References
    ----------
    O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import effective_rank
    >>> float(effective_rank(np.array([2.0, 2.0, 2.0, 0.0])).round(12))
    3.0
    """
    sigma = _checked(singular_values)
    xp: Any = torch if isinstance(sigma, torch.Tensor) else np
    total = sigma.sum(-1)
    share = sigma / xp.where(total > 0, total, xp.ones_like(total))[..., None]
    entropy = -(share * xp.log(xp.where(share > 0, share, xp.ones_like(share)))).sum(-1)
    return xp.where(total > 0, xp.exp(entropy), xp.zeros_like(total))


def cumulative_explained_variance(singular_values: ArrayT) -> ArrayT:
    """Share of ‖K‖² in the first l directions, Σ_{i≤l} σ_i² / Σ_i σ_i², for every l.

    Parameters
    ----------
    singular_values : array or tensor of shape (..., n)
        All singular values, in any order.

    Returns
    -------
    array or tensor of shape (..., n)
        Non-decreasing, the last entry is 1. Ones for a zero matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import cumulative_explained_variance
    >>> cumulative_explained_variance(np.array([2.0, 1.0, 1.0])).round(3).tolist()
    [0.667, 0.833, 1.0]
    """
    sigma = _checked(singular_values)
    xp: Any = torch if isinstance(sigma, torch.Tensor) else np
    largest_first = xp.flip(xp.sort(sigma, -1).values, (-1,)) if xp is torch else np.sort(sigma, axis=-1)[..., ::-1]
    cumulative = xp.cumsum(largest_first**2, -1)
    total = cumulative[..., -1:]
    share = cumulative / xp.where(total > 0, total, xp.ones_like(total))
    return xp.where(total > 0, share, xp.ones_like(share))


def low_rank_singular_values(A: ArrayT, B: ArrayT) -> ArrayT:
    """Singular values of A Bᵀ without forming it: with A = Q_a R_a and B = Q_b R_b, those of R_a R_bᵀ.

    O((N + M)·p²) time and O((N + M)·p) memory, and as accurate as the SVD of the product; the Gram matrices AᵀA and
    BᵀB would be cheaper but lose the singular values below √ε of the largest.

    Parameters
    ----------
    A : array or tensor of shape (..., N, p)
    B : array or tensor of shape (..., M, p)

    Returns
    -------
    array or tensor of shape (..., min(N, M, p))
        Largest first. The other singular values of A Bᵀ, if any, are zero.

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import low_rank_singular_values
    >>> A, B = np.diag([3.0, 2.0]), np.eye(2)
    >>> low_rank_singular_values(A, B).round(12).tolist()
    [3.0, 2.0]
    """
    if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-1]:
        raise ValueError(
            f"A and B must be matrices with the same number of columns (A {tuple(A.shape)}, B {tuple(B.shape)})"
        )
    if isinstance(A, torch.Tensor):
        core = torch.linalg.qr(A, mode="r").R @ torch.linalg.qr(B, mode="r").R.mT
        return torch.linalg.svdvals(core)
    core = np.linalg.qr(A, mode="r") @ np.swapaxes(np.linalg.qr(B, mode="r"), -1, -2)
    return np.linalg.svd(core, compute_uv=False)
