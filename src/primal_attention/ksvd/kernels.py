"""Kernels κ(x, z) between two data sources, symmetric or not.

Explicit kernels know their feature maps, κ(x, z) = ⟨F φ_q(x), F φ_k(z)⟩ with F = f(X) of the paper, and so can be
solved in the primal. Implicit kernels have values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel

Array = NDArray[Any]
FeatureMap = Callable[[Array], Array]
Kernel = Callable[[Array, Array], Array]  # returns the matrix [κ(x_i, z_j)]

NAMED_KERNELS = ("cosine", "linear", "rbf", "sne", "precomputed")
# Entries of a temporary block. 2**24 are 128 MiB in float64: large enough for full BLAS speed, small next to the data.
BLOCK_ENTRIES = 2**24


def row_blocks(n_rows: int, width: int, *, entries: int = BLOCK_ENTRIES) -> Iterator[slice]:
    """Slices that cover `n_rows` rows, each with at most `entries` numbers when a row has `width` of them."""
    step = max(1, entries // max(1, width))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def unit_rows(X: Array) -> Array:
    """φ(x) = x / ‖x‖, the paper's choice; a zero row stays zero, so that its kernel values are zero."""
    X = np.asarray(X, dtype=np.result_type(X, np.float32))
    squares, limits = np.einsum("ij,ij->i", X, X), np.finfo(X.dtype)
    if not ((squares > limits.tiny / limits.eps) & (squares < np.inf)).all():
        # Squares of very large or small values over- or underflow. Division by a power of two is exact.
        _, exponent = np.frexp(np.abs(X).max(axis=1, keepdims=True))
        X = np.ldexp(X, -exponent)
        squares = np.einsum("ij,ij->i", X, X)
    squares[squares == 0] = 1
    return X / np.sqrt(squares)[:, None]


@dataclass(frozen=True)
class ExplicitKernel:
    """κ(x, z) = φ_q(x)ᵀ FᵀF φ_k(z).

    `transformation` is F (m × p) or None for the identity. The kernel depends on F only through FᵀF, so a tall F is
    replaced by its p × p triangular factor: with m = N landmarks the features stay p wide instead of N.
    """

    query_map: FeatureMap
    key_map: FeatureMap
    transformation: Array | None = None
    fold: Array | None = field(init=False)

    def __post_init__(self) -> None:
        F = self.transformation
        if F is not None and F.shape[0] > F.shape[1]:
            F = np.asarray(np.linalg.qr(F, mode="r"))
        object.__setattr__(self, "fold", F)

    def query_features(self, X: Array) -> Array:
        """Features φ'_q(x) whose inner products with `key_features` are the kernel."""
        return self.fold_features(self.query_map(X))

    def key_features(self, Z: Array) -> Array:
        """Features φ'_k(z)."""
        return self.fold_features(self.key_map(Z))

    def fold_features(self, features: Array) -> Array:
        """F φ for rows φ, with the folded F."""
        return features if self.fold is None else features @ self.fold.T

    def __call__(self, X: Array, Z: Array, /) -> Array:
        return self.query_features(X) @ self.key_features(Z).T


@dataclass(frozen=True)
class SNEKernel:
    """κ(x, z) = exp(−γ‖x − z‖²) / Σ_j exp(−γ‖x − z_j‖²), the sum over the *fitted* keys z_j.

    The normaliser depends on the query and the fitted keys only. So κ is a function of a pair, also for new queries and
    keys. On the fitted data the matrix is row-stochastic, and a new key changes no other entry.
    """

    gamma: float
    keys: Array

    def __call__(self, X: Array, Z: Array, /) -> Array:
        logits = self._logits(X, Z)
        logits -= log_sum_exp(logits) if Z is self.keys else self._log_normaliser(X)
        return np.exp(logits, out=logits)

    def _logits(self, X: Array, Z: Array) -> Array:
        logits = euclidean_distances(X, Z, squared=True)
        logits *= -self.gamma
        return logits

    def _log_normaliser(self, X: Array) -> Array:
        # By blocks: Nyström evaluates few keys, and the normaliser must not need N × M memory.
        blocks = row_blocks(len(X), len(self.keys))
        return np.concatenate([log_sum_exp(self._logits(X[rows], self.keys)) for rows in blocks])


def log_sum_exp(logits: Array) -> Array:
    """Logarithm of the sum of each row's exponentials, (n, 1); takes a sixth of the time of scipy.special.logsumexp."""
    largest = logits.max(axis=1, keepdims=True)
    return largest + np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class CallableKernel:
    """A user's function (n × d, m × d) → n × m, with its result checked."""

    function: Callable[[Array, Array], Any]

    def __call__(self, X: Array, Z: Array, /) -> Array:
        K = np.asarray(self.function(X, Z))
        if K.shape != (len(X), len(Z)):
            raise ValueError(
                f"kernel returned shape {K.shape} for {len(X)} and {len(Z)} rows; "
                f"a callable kernel takes two matrices and returns a matrix of shape {(len(X), len(Z))}"
            )
        return to_floats(K, X, "kernel")


@dataclass(frozen=True)
class CheckedMap:
    """A user's feature map n × d → n × p, with its result checked."""

    function: Callable[[Array], Any]
    name: str

    def __call__(self, X: Array) -> Array:
        features = np.asarray(self.function(X))
        if features.ndim != 2 or len(features) != len(X):
            raise ValueError(
                f"kernel's {self.name} feature map returned shape {features.shape} for {len(X)} rows; "
                "it takes a matrix and returns one row of features per row"
            )
        return to_floats(features, X, f"kernel's {self.name} feature map")


def to_floats(values: Array, X: Array, source: str) -> Array:
    """Return what a user's function computed from X in floats; refuse values that are not finite real numbers."""
    if values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise ValueError(f"{source} returned values that are not finite real numbers (dtype={values.dtype})")
    return values.astype(np.result_type(X, np.float32), copy=False)


def is_feature_pair(kernel: object) -> bool:
    """Whether `kernel` is a pair (φ_q, φ_k) of callables."""
    return isinstance(kernel, tuple) and len(kernel) == 2 and all(callable(phi) for phi in kernel)


def is_explicit(kernel: object) -> bool:
    """Whether the feature maps of `kernel` are known."""
    return kernel in ("cosine", "linear") if isinstance(kernel, str) else is_feature_pair(kernel)


def check_kernel(kernel: object) -> None:
    """Raise for an unknown kernel."""
    if isinstance(kernel, str):
        if kernel not in NAMED_KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(NAMED_KERNELS)} or a callable (kernel={kernel!r})")
    elif not (callable(kernel) or is_feature_pair(kernel)):
        raise TypeError(
            f"kernel must be a name ({', '.join(NAMED_KERNELS)}), a callable (X, Z) -> matrix, "
            f"or a pair of feature maps (kernel={kernel!r})"
        )


def make_kernel(kernel: Any, *, gamma: float, keys: Array, transformation: Array | None) -> Kernel:
    """Return the kernel function of the estimator's `kernel` argument ("precomputed" has none)."""
    if kernel == "cosine":
        return ExplicitKernel(unit_rows, unit_rows, transformation)
    if kernel == "linear":
        return ExplicitKernel(np.asarray, np.asarray, transformation)  # φ(x) = x
    if is_feature_pair(kernel):
        phi_q, phi_k = kernel
        return ExplicitKernel(CheckedMap(phi_q, "query"), CheckedMap(phi_k, "key"), transformation)
    if kernel == "rbf":
        return partial(rbf_kernel, gamma=gamma)
    if kernel == "sne":
        return SNEKernel(gamma, keys)
    return CallableKernel(kernel)
