"""Argument checks of the estimator. A message names the argument, its value and the accepted values in one line."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_array

from primal_attention.ksvd.kernels import ExplicitKernel, Kernel, check_kernel, is_explicit
from primal_attention.ksvd.solvers import SOLVERS

Array = NDArray[Any]

FLOATS = (np.float64, np.float32)


def check_count(name: str, value: object, *, smallest: int) -> None:
    """Check that `value` is an integer of at least `smallest`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {smallest} ({name}={value!r})")
    if value < smallest:
        raise ValueError(f"{name} must be an integer of at least {smallest} ({name}={value!r})")


def check_parameters(estimator: Any) -> None:
    """Check all parameters that do not depend on the data."""
    check_count("n_components", estimator.n_components, smallest=1)
    check_count("n_oversamples", estimator.n_oversamples, smallest=0)
    check_count("n_iter", estimator.n_iter, smallest=0)
    if estimator.n_landmarks is not None:
        check_count("n_landmarks", estimator.n_landmarks, smallest=1)
        if estimator.n_landmarks < estimator.n_components:
            raise ValueError(
                "n_landmarks must be at least n_components "
                f"(n_landmarks={estimator.n_landmarks}, n_components={estimator.n_components})"
            )
    check_kernel(estimator.kernel)
    check_gamma(estimator.gamma)
    if not isinstance(estimator.solver, str) or estimator.solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)} (solver={estimator.solver!r})")
    if not is_explicit(estimator.kernel):
        remedy = "use 'cosine', 'linear' or a pair of feature maps"
        if estimator.solver == "primal":
            raise ValueError(f"solver='primal' needs explicit features (kernel={estimator.kernel!r}); {remedy}")
        if estimator.transformation is not None:
            raise ValueError(f"transformation needs explicit features (kernel={estimator.kernel!r}); {remedy}")


def check_gamma(gamma: object) -> None:
    """Check that gamma is None or a positive, finite number."""
    if gamma is None:
        return
    if not isinstance(gamma, Real) or isinstance(gamma, bool):
        raise TypeError(f"gamma must be a positive number or None (gamma={gamma!r})")
    if not 0 < float(gamma) < np.inf:
        raise ValueError(f"gamma must be a positive number or None (gamma={gamma!r})")


def check_size(n_components: int, shape: tuple[int, int]) -> None:
    """Check that the kernel matrix has as many singular triplets as requested."""
    if n_components > min(shape):
        raise ValueError(
            f"n_components must be at most {min(shape)}, the smaller side of the kernel matrix "
            f"(n_components={n_components}, n_samples={shape[0]}, keys={shape[1]})"
        )


def check_keys(Z: ArrayLike, queries: Array, kernel: object, *, copy: bool) -> Array:
    """Return Z as a matrix. Named kernels compare a query with a key, so both need the same width."""
    keys = check_array(Z, dtype=queries.dtype, copy=copy, input_name="Z")
    if isinstance(kernel, str) and keys.shape[1] != queries.shape[1]:
        raise ValueError(f"Z must have as many columns as X for kernel={kernel!r} (X {queries.shape}, Z {keys.shape})")
    return keys


def check_features(kernel: Kernel, X: Array, Z: Array) -> None:
    """Check that the two feature maps and the transformation have matching widths."""
    if not isinstance(kernel, ExplicitKernel):
        return
    widths = kernel.query_map(X[:1]).shape[1], kernel.key_map(Z[:1]).shape[1]
    if widths[0] != widths[1]:
        raise ValueError(f"kernel's two feature maps must have the same width (query {widths[0]}, key {widths[1]})")
    F = kernel.transformation
    if F is not None and F.shape[1] != widths[0]:
        raise ValueError(
            f"transformation must have {widths[0]} columns, one per feature (transformation of shape {F.shape})"
        )


def evaluate_transformation(transformation: Any, X: Array) -> Array | None:
    """Return F = f(X) as a matrix of X's dtype, or None for the identity."""
    if transformation is None:
        return None
    F = transformation(X) if callable(transformation) else transformation
    return check_array(F, dtype=X.dtype, copy=True, input_name="transformation")
