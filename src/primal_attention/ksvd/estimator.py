"""KernelSVD: the paper's kernel singular value decomposition as a scikit-learn estimator."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from primal_attention.ksvd.kernels import (
    CallableKernel,
    ExplicitKernel,
    Kernel,
    check_kernel,
    is_explicit,
    make_kernel,
    row_blocks,
)
from primal_attention.ksvd.nystrom import ErrorBound, Sample, bound_errors, nystrom
from primal_attention.ksvd.objective import (
    DualRepresentation,
    PrimalRepresentation,
    PrimalWeights,
    Representation,
    ksvd_objective,
    positive_singular_values,
)
from primal_attention.ksvd.solvers import (
    SOLVERS,
    StreamedQR,
    Triplets,
    choose_signs,
    choose_solver,
    dense,
    lanczos,
    primal,
    randomized,
)

Array = NDArray[Any]

FLOATS = (np.float64, np.float32)
ALL = slice(None)
ROWS_OF_VALUES = ExplicitKernel(np.asarray, np.asarray)  # the features of a precomputed kernel


def _has_explicit_features(estimator: KernelSVD) -> bool:
    if not is_explicit(estimator.kernel):
        raise AttributeError(f"partial_fit needs explicit features (kernel={estimator.kernel!r})")
    return True


class KernelSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Singular value decomposition of an asymmetric kernel between two data sources.

    For queries x_1 … x_N and keys z_1 … z_M, the kernel matrix K = [κ(x_i, z_j)] need be neither symmetric nor
    square. The estimator finds its leading singular triplets K H_r = H_e Σ, Kᵀ H_e = H_r Σ and maps any point, fitted
    or new, to its projection scores: e(x) for queries, r(z) for keys.

    Parameters
    ----------
    n_components : int, default=2
        Number s of singular triplets, at most min(N, M). Where the rank of K is smaller, the last singular values
        are zero and their vectors an arbitrary orthonormal completion.
    kernel : str, callable or pair of callables, default="cosine"
        - ``"cosine"``: ⟨x/‖x‖, z/‖z‖⟩, the paper's choice. Explicit features. A zero row has zero features.
        - ``"linear"``: ⟨x, z⟩. Explicit features.
        - ``"rbf"``: exp(−γ‖x − z‖²).
        - ``"sne"``: exp(−γ‖x − z‖²) / Σ_j exp(−γ‖x − z_j‖²). Asymmetric; the sum runs over the keys seen in `fit`,
          also when κ is evaluated at new queries and new keys.
        - ``"precomputed"``: `fit` takes K itself, N × M. `transform` takes rows κ(x, z_1 … z_M), and
          `transform_keys` rows κ(x_1 … x_N, z); so `transform_keys(K.T)` are the r-scores of the fitted keys. A row
          is a query and a column a key: splitting the samples keeps every column.
        - a callable (n × d, m × d) → n × m. Entry (i, j) should depend on x_i and z_j alone; otherwise the
          scores of new points depend on the other rows of the call.
        - a pair of callables (φ_q, φ_k), each n × d → n × p: explicit features, κ(x, z) = ⟨φ_q(x), φ_k(z)⟩.
    solver : str, default="auto"
        - ``"dense"``: LAPACK's SVD of the formed K.
        - ``"lanczos"``: ARPACK, to machine precision; only products with K.
        - ``"randomized"``: subspace iteration; only products with K. Approximate unless the rank is small.
        - ``"nystrom"``: `n_landmarks` sampled rows I and columns J of K, K̂ = K[:, J] G K[I, :] with the core G fitted
          on a sample four times as large. Approximate unless the sample reaches the rank of K; `error_bound` says by
          how much at most.
        - ``"primal"``: explicit features only. O((N + M)·p²) time, and nothing but data and singular vectors is N
          long; K is never formed. As accurate as ``"dense"``.
        - ``"auto"``: ``"primal"`` for explicit features; otherwise ``"nystrom"`` when K would have more than 10⁸
          entries and is not precomputed; otherwise ``"dense"`` when min(N, M) ≤ 500 or n_components exceeds a tenth
          of it; otherwise ``"lanczos"``.
    gamma : float, default=None
        γ of ``"rbf"`` and ``"sne"``; one over the number of features by default.
    transformation : array of shape (m, p) or callable, default=None
        The paper's F = f(X), for explicit features: κ(x, z) = ⟨F φ_q(x), F φ_k(z)⟩. A callable gets the X of
        `fit`. None is the identity.
    n_landmarks : int, default=None
        Sample size of ``"nystrom"``, on each side, cut to N and M. By default the larger of 100 and 4·n_components.
        One data source is sampled once for both sides; two sources are sampled independently.
    n_oversamples : int, default=10
        Extra directions of ``"randomized"``.
    n_iter : int, default=7
        Power iterations of ``"randomized"``.
    random_state : int, RandomState or None, default=None
        Start of ``"lanczos"``, directions of ``"randomized"``, sample of ``"nystrom"``.

    Attributes
    ----------
    singular_values_ : array of shape (n_components,)
        Σ, largest first. Λ of the paper is its inverse.
    left_vectors_ : array of shape (N, n_components)
        H_e. The largest entry of each column is positive.
    right_vectors_ : array of shape (M, n_components)
        H_r.
    primal_weights_ : PrimalWeights (w_e, w_r)
        W_e and W_r, for explicit features: p × s without a transformation, m × s with one.
    projection_weights_ : PrimalWeights (w_e, w_r)
        W_{e|X} = Fᵀ W_e and W_{r|X} = Fᵀ W_r, p × s: e(x) = W_{e|X}ᵀ φ_q(x).
    objective_ : float
        J in sum form, over the positive singular values. Zero up to rounding at an exact solution (Lemma 4.2); for
        ``"randomized"`` it measures the residual, and for ``"nystrom"`` it refers to K̂.
    transformation_ : array of shape (m, p) or None
        F.
    kernel_ : callable or None
        κ as a function of two matrices; None when precomputed.
    solver_ : str
        The solver that ran.
    n_features_in_ : int
        Columns of X.
    n_features_keys_ : int
        Columns that `transform_keys` expects.

    References
    ----------
    Y. Chen, Q. Tao, F. Tonin, J. A. K. Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in
    Primal Representation", NeurIPS 2023.

    J. A. K. Suykens, "SVD revisited: A new variational principle, compatible feature maps and nonlinear extensions",
    Applied and Computational Harmonic Analysis 40 (2016).

    Q. Tao, F. Tonin, A. Lambert, Y. Chen, P. Patrinos, J. A. K. Suykens, "Learning in Feature Spaces via Coupled
    Covariances: Asymmetric Kernel SVD and Nyström method", ICML 2024.

    N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Review 53 (2011).

    Examples
    --------
    >>> import numpy as np
    >>> from primal_attention.ksvd import KernelSVD
    >>> rng = np.random.default_rng(0)
    >>> queries, keys = rng.normal(size=(200, 8)), rng.normal(size=(300, 8))
    >>> ksvd = KernelSVD(3, kernel="sne", solver="lanczos", random_state=0).fit(queries, Z=keys)
    >>> ksvd.transform(queries).shape, ksvd.transform_keys(keys).shape
    ((200, 3), (300, 3))
    >>> bool(abs(ksvd.objective_) < 1e-10)
    True
    """

    kernel_: Kernel | None
    transformation_: Array | None
    _samples: tuple[Sample, Sample]
    _stream: StreamedQR | None

    def __init__(
        self,
        n_components: int = 2,
        *,
        kernel: Any = "cosine",
        solver: str = "auto",
        gamma: float | None = None,
        transformation: Any = None,
        n_landmarks: int | None = None,
        n_oversamples: int = 10,
        n_iter: int = 7,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.solver = solver
        self.gamma = gamma
        self.transformation = transformation
        self.n_landmarks = n_landmarks
        self.n_oversamples = n_oversamples
        self.n_iter = n_iter
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: Any = None, *, Z: ArrayLike | None = None) -> KernelSVD:
        """Decompose the kernel between X and Z.

        Parameters
        ----------
        X : array of shape (N, d)
            Queries; the N × M kernel matrix when ``kernel="precomputed"``.
        y : ignored
        Z : array of shape (M, d), default=None
            Keys, the second data source; X itself when absent.

        Returns
        -------
        KernelSVD
        """
        self._fit(X, Z)
        return self

    def fit_transform(self, X: ArrayLike, y: Any = None, *, Z: ArrayLike | None = None) -> Array:
        """Fit, and return the e-scores of X; as ``fit(X, Z=Z).transform(X)`` but without evaluating κ again.

        Parameters
        ----------
        X : array of shape (N, d), or K for ``kernel="precomputed"``
        y : ignored
        Z : array of shape (M, d), default=None
            The keys; X itself by default.

        Returns
        -------
        array of shape (N, n_components)
        """
        return self._fit(X, Z)

    def transform(self, X: ArrayLike) -> Array:
        """e-scores of queries, fitted or new.

        Parameters
        ----------
        X : array of shape (n, d)

        Returns
        -------
        array of shape (n, n_components)
        """
        check_is_fitted(self)
        return self._representation.e(validate_data(self, X, dtype=FLOATS, reset=False))

    def transform_keys(self, Z: ArrayLike) -> Array:
        """r-scores of keys, fitted or new.

        Parameters
        ----------
        Z : array of shape (m, d)

        Returns
        -------
        array of shape (m, n_components)
        """
        check_is_fitted(self)
        keys = check_array(Z, dtype=FLOATS, input_name="Z")
        if keys.shape[1] != self.n_features_keys_:
            raise ValueError(
                f"Z has {keys.shape[1]} features, but {type(self).__name__} was fitted on keys with "
                f"{self.n_features_keys_}"
            )
        self._check_names(Z)
        return self._representation.r(keys)

    @available_if(_has_explicit_features)
    def partial_fit(self, X: ArrayLike, y: Any = None, *, Z: ArrayLike | None = None) -> KernelSVD:
        """Add rows to the decomposition, for more rows than fit in memory. Explicit features only.

        Call it once for each block of rows. The result is that of `fit` on all rows, to rounding, but memory holds one
        block and p × p numbers, so `left_vectors_` and `right_vectors_` do not exist; ``transform(X) /
        singular_values_`` are the left vectors of a block. The sign of a component may differ from that of `fit`.
        `fit` discards them.

        Parameters
        ----------
        X : array of shape (n, d)
            Some of the queries. The first block needs at least `n_components` rows.
        y : ignored
        Z : array of shape (m, d), default=None
            Some of the keys; X itself when absent. The blocks of the two sources may differ in length.

        Returns
        -------
        KernelSVD
        """
        check_parameters(self)
        if callable(self.transformation):
            raise ValueError("transformation must be an array in partial_fit: a callable needs all rows of X at once")
        stream: StreamedQR | None = getattr(self, "_stream", None)
        queries = validate_data(self, X, dtype=FLOATS, reset=stream is None)
        keys = self._check_keys(Z, X, queries)
        if stream is None:
            for name in ("left_vectors_", "right_vectors_"):
                self.__dict__.pop(name, None)
            self._set_kernel(queries, keys)
            self.solver_ = "primal"
        elif keys.shape[1] != self.n_features_keys_:
            raise ValueError(f"Z has {keys.shape[1]} features, but earlier blocks had {self.n_features_keys_}")
        kernel = self.kernel_
        assert isinstance(kernel, ExplicitKernel)
        stream = (stream or StreamedQR()).add(kernel, queries, keys)
        check_size(self.n_components, stream.shape)
        query_sums, values, key_sums = stream.solve(kernel, self.n_components)
        self._stream, self.singular_values_ = stream, values
        representation = PrimalRepresentation.from_sums(kernel, query_sums, key_sums)
        # R has the Gram matrix of the features, and J reads the scores through their squares alone.
        weights = representation.projection_weights
        e_scores, r_scores = stream.query_triangle @ weights.w_e, stream.key_triangle @ weights.w_r
        self._set_representation(representation, e_scores, r_scores, stream.shape)
        return self

    def error_bound(self, X: ArrayLike, *, Z: ArrayLike | None = None) -> ErrorBound:
        """Bound the error of ``solver="nystrom"`` against the exact decomposition.

        Reads every entry of K once, in row blocks: N·M kernel values in time, but never in memory.

        Parameters
        ----------
        X : array of shape (N, d)
            The X of `fit`; K when ``kernel="precomputed"``.
        Z : array of shape (M, d), default=None
            The Z of `fit`.

        Returns
        -------
        ErrorBound (values, vectors)
            Two arrays of shape (n_components,): bounds of |σ_i − σ̂_i| and of √(‖u_i − û_i‖² + ‖v_i − v̂_i‖²). The
            second is 2, and says nothing, where the gap between singular values is smaller than the error.
        """
        check_is_fitted(self)
        if self.solver_ != "nystrom":
            raise ValueError(f"error_bound needs solver='nystrom' (solver_={self.solver_!r})")
        queries = validate_data(self, X, dtype=FLOATS, reset=False)
        keys = self._check_keys(Z, X, queries)
        shape = self._shape(queries, keys)
        fitted = len(self.left_vectors_), len(self.right_vectors_)
        if shape != fitted:
            raise ValueError(f"X and Z must be those of fit, {fitted[0]} queries and {fitted[1]} keys (got {shape})")
        count = min(len(sample.landmarks) for sample in self._samples)
        rng = check_random_state(0)  # completes a basis for singular values of zero
        triplets, _, _ = nystrom(*self._sampled_parts(queries, keys), self._samples, count, rng)
        # A callable kernel gets all rows at once.
        rows = row_blocks(shape[0], 0 if isinstance(self.kernel_, CallableKernel) else shape[1])
        blocks = ((block, self._values(queries, keys, block, ALL)) for block in rows)
        return bound_errors(blocks, triplets, self.n_components)

    @property
    def primal_weights_(self) -> PrimalWeights:
        """W_e and W_r."""
        return self._primal().weights

    @property
    def projection_weights_(self) -> PrimalWeights:
        """W_{e|X} and W_{r|X}."""
        return self._primal().projection_weights

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Never pairwise: a precomputed K may be N × M, and a split of the queries must keep every key's column.
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(self.singular_values_)

    def _primal(self) -> PrimalRepresentation:
        check_is_fitted(self)
        if not isinstance(self.kernel_, ExplicitKernel):
            raise AttributeError(
                f"primal weights need explicit features (kernel={self.kernel!r}); use 'cosine', 'linear' or a pair "
                "of feature maps"
            )
        assert isinstance(self._representation, PrimalRepresentation)
        return self._representation

    def _fit(self, X: ArrayLike, Z: ArrayLike | None) -> Array:
        check_parameters(self)
        self._stream = None
        # The dual form stores the fitted points, which a caller may overwrite; the primal form stores weights only.
        stores_points = not self._is_precomputed and not is_explicit(self.kernel)
        queries = validate_data(self, X, dtype=FLOATS, copy=stores_points)
        if self._is_precomputed:
            if Z is not None:
                raise ValueError("Z must be absent when kernel='precomputed': X already holds every κ(x_i, z_j)")
            self.kernel_, self.transformation_, self.n_features_keys_ = None, None, len(queries)
            return self._solve(queries, queries)
        keys = self._check_keys(Z, X, queries, copy=stores_points)
        self._set_kernel(queries, keys)
        return self._solve(queries, keys)

    def _check_keys(self, Z: ArrayLike | None, X: ArrayLike, queries: Array, *, copy: bool = False) -> Array:
        """Return Z as a matrix, or the queries if Z is absent or X itself."""
        if Z is None or Z is X:
            return queries
        keys = check_array(Z, dtype=queries.dtype, copy=copy, input_name="Z")
        if isinstance(self.kernel, str) and keys.shape[1] != queries.shape[1]:
            shapes = f"(X {queries.shape}, Z {keys.shape})"
            raise ValueError(f"Z must have as many columns as X for kernel={self.kernel!r} {shapes}")
        self._check_names(Z)
        return keys

    def _check_names(self, Z: ArrayLike) -> None:
        """Check that a table of keys has the columns of X in the same order: named kernels compare them one by one."""
        if isinstance(self.kernel, str) and not self._is_precomputed:
            validate_data(self, Z, reset=False, skip_check_array=True)

    def _set_kernel(self, X: Array, Z: Array) -> None:
        """Set the attributes that follow from the kernel and the data."""
        self.n_features_keys_ = Z.shape[1]
        self.transformation_ = evaluate_transformation(self.transformation, X)
        gamma = 1.0 / X.shape[1] if self.gamma is None else float(self.gamma)
        self.kernel_ = make_kernel(self.kernel, gamma=gamma, keys=Z, transformation=self.transformation_)
        check_features(self.kernel_, X, Z)

    def _solve(self, X: Array, Z: Array) -> Array:
        """Decompose the kernel between X and Z and return the e-scores of X; X is K when precomputed."""
        shape, kernel = self._shape(X, Z), self.kernel_
        check_size(self.n_components, shape)
        self.solver_ = self.solver
        if self.solver == "auto":
            explicit = isinstance(kernel, ExplicitKernel)
            self.solver_ = choose_solver(shape, self.n_components, explicit=explicit, precomputed=kernel is None)
        rng = check_random_state(self.random_state)
        if self.solver_ == "nystrom":
            size = max(100, 4 * self.n_components) if self.n_landmarks is None else self.n_landmarks
            queries = keys = Sample.draw(shape[0], size, rng)
            if X is not Z or shape[0] != shape[1]:
                # One data source is sampled once: a local kernel has its large entries on the diagonal.
                keys = Sample.draw(shape[1], size, rng)
            self._samples, rows, columns = (queries, keys), queries.landmarks, keys.landmarks
            C, R, core = self._sampled_parts(X, Z)
            triplets, for_queries, for_keys = nystrom(C, R, core, self._samples, self.n_components, rng)
            representation = self._represent(X, rows, for_queries, Z, columns, for_keys)
            e_scores, r_scores = C @ for_keys, R.T @ for_queries
        elif self.solver_ == "primal":
            assert isinstance(kernel, ExplicitKernel)
            left, _, right = triplets = primal(kernel, X, Z, self.n_components, rng)
            representation = self._represent(X, ALL, left, Z, ALL, right)
            e_scores, r_scores = representation.e(X), representation.r(Z)
        else:
            if isinstance(kernel, ExplicitKernel) and self.solver_ != "dense":  # products with K are enough
                K = aslinearoperator(kernel.query_features(X)) @ aslinearoperator(kernel.key_features(Z)).T
            else:
                K = self._values(X, Z, ALL, ALL)
            left, _, right = triplets = self._decompose(K, rng)
            representation = self._represent(X, ALL, left, Z, ALL, right)
            e_scores, r_scores = K @ right, K.T @ left
        self.left_vectors_, self.singular_values_, self.right_vectors_ = triplets
        self._set_representation(representation, e_scores, r_scores, shape)
        return e_scores

    @property
    def _is_precomputed(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel == "precomputed"

    def _shape(self, X: Array, Z: Array) -> tuple[int, int]:
        """The shape of K; X is K when precomputed."""
        return X.shape if self.kernel_ is None else (len(X), len(Z))

    def _values(self, X: Array, Z: Array, rows: Any, columns: Any) -> Array:
        """K[rows, columns]; X is K when precomputed."""
        return X[rows][:, columns] if self.kernel_ is None else self.kernel_(take(X, rows), take(Z, columns))

    def _sampled_parts(self, X: Array, Z: Array) -> tuple[Array, Array, Array]:
        """C = K[:, J], R = K[I, :] and K[I', J'] of Nyström."""
        queries, keys = self._samples
        pairs = (ALL, keys.landmarks), (queries.landmarks, ALL), (queries.core, keys.core)
        C, R, core = (self._values(X, Z, *pair) for pair in pairs)
        return C, R, core

    def _decompose(self, K: Array | LinearOperator, rng: np.random.RandomState) -> Triplets:
        if self.solver_ == "lanczos":
            left, values, right = lanczos(K, self.n_components, rng)
        elif self.solver_ == "randomized":
            left, values, right = randomized(
                K, self.n_components, rng, n_oversamples=self.n_oversamples, n_iter=self.n_iter
            )
        else:
            left, values, right = dense(K, self.n_components)
        signs = choose_signs(left)
        return left * signs, values, right * signs

    def _represent(
        self, X: Array, rows: Any, query_coefficients: Array, Z: Array, columns: Any, key_coefficients: Array
    ) -> Representation:
        """The scores of new points from coefficients on some queries and keys."""
        kernel, shape = self.kernel_, self._shape(X, Z)
        if kernel is None:  # rows of values at all points; the coefficients of the others are zero
            coefficients = [np.zeros((n, self.n_components), X.dtype) for n in shape]
            coefficients[0][rows], coefficients[1][columns] = query_coefficients, key_coefficients
            weights = PrimalWeights(w_e=coefficients[1], w_r=coefficients[0])
            return PrimalRepresentation(ROWS_OF_VALUES, weights, weights)
        args = (take(X, rows), query_coefficients, take(Z, columns), key_coefficients)
        if isinstance(kernel, ExplicitKernel):
            return PrimalRepresentation.from_dual(kernel, *args)
        return DualRepresentation(kernel, *args)

    def _set_representation(
        self, representation: Representation, e_scores: Array, r_scores: Array, shape: tuple[int, int]
    ) -> None:
        """Store the representation, and evaluate the objective on the scores."""
        self._representation = representation
        positive = positive_singular_values(self.singular_values_, shape)
        if isinstance(representation, PrimalRepresentation) and self.kernel_ is not None:
            couplings = np.einsum("ps,ps->s", *representation.weights)  # the diagonal of W_eᵀ W_r
        else:
            couplings = np.einsum("is,is->s", e_scores, self.left_vectors_)  # that of H_eᵀ K H_r
        self.objective_ = ksvd_objective(
            e_scores[:, positive],
            r_scores[:, positive],
            lam=1 / self.singular_values_[positive],
            coupling=couplings[positive].sum(),
        )


def take(A: Array, rows: Any) -> Array:
    """A[rows]; for all rows A itself, by which the SNE kernel recognises its keys."""
    return A if rows is ALL else A[rows]


# Checks. A message names the argument, its value and the accepted values in one line.


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
