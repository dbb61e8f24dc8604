"""The paper's theorems as tests: Theorem 3.2, Remark 3.3 and Lemma 4.2, with f(X) and with the identity."""

import numpy as np
import pytest
import torch

from closeness import assert_close
from primal_attention.ksvd import KernelSVD, ksvd_objective, shifted_eigenvalue_residual

N, M, WIDTH, RANK = 40, 30, 6, 4
# Everything here is float64 and well conditioned: rounding is near 1e-15, and 1e-10 leaves room for any BLAS.
EXACT = 1e-10

QUERY_PROJECTION = np.random.default_rng(1).normal(size=(WIDTH, 5))
KEY_PROJECTION = np.random.default_rng(2).normal(size=(WIDTH, 5))


def phi_q(X: np.ndarray) -> np.ndarray:
    """g(W_q x), the paper's cosine feature map of a projected query."""
    q = X @ QUERY_PROJECTION
    return q / np.linalg.norm(q, axis=1, keepdims=True)


def phi_k(Z: np.ndarray) -> np.ndarray:
    k = Z @ KEY_PROJECTION
    return k / np.linalg.norm(k, axis=1, keepdims=True)


# f(X): none, every row of X in the width of the features, and fewer rows than features, as many as components.
TRANSFORMATIONS = pytest.mark.parametrize(
    "f", [None, lambda X: X[:, :5], lambda X: X[::10, :5]], ids=["identity", "f(X)", "few-rows"]
)
SOLVERS = pytest.mark.parametrize("solver", ["primal", "dense", "lanczos"])


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, WIDTH)), rng.normal(size=(M, WIDTH))


def fitted(data: tuple[np.ndarray, np.ndarray], f: object, solver: str) -> KernelSVD:
    X, Z = data
    return KernelSVD(RANK, kernel=(phi_q, phi_k), transformation=f, solver=solver, random_state=0).fit(X, Z=Z)


def formed_kernel(X: np.ndarray, Z: np.ndarray, F: np.ndarray | None) -> np.ndarray:
    """K_ij = ⟨f(X) φ_q(x_i), f(X) φ_k(z_j)⟩, written out."""
    G = np.eye(5) if F is None else F.T @ F
    return phi_q(X) @ G @ phi_k(Z).T


def near(actual: np.ndarray, expected: np.ndarray, what: str = "result") -> None:
    assert_close(torch.as_tensor(actual), torch.as_tensor(expected), EXACT, what)


# Theorem 3.2


def lagrangian_gradients(data, ksvd: KernelSVD) -> dict[str, torch.Tensor]:
    """∂L of the proof with respect to every primal and dual variable, by automatic differentiation."""
    X, Z = data
    F = np.eye(5) if ksvd.transformation_ is None else ksvd.transformation_
    (w_e, w_r), (h_e, h_r) = ksvd.primal_weights_, (ksvd.left_vectors_, ksvd.right_vectors_)
    values = {"W_e": w_e, "W_r": w_r, "e": ksvd.transform(X), "r": ksvd.transform_keys(Z), "h_e": h_e, "h_r": h_r}
    v = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    lam = torch.tensor(1 / ksvd.singular_values_)
    queries, keys = torch.tensor(phi_q(X) @ F.T), torch.tensor(phi_k(Z) @ F.T)
    J = 0.5 * (v["e"] ** 2 * lam).sum() + 0.5 * (v["r"] ** 2 * lam).sum() - (v["W_e"] * v["W_r"]).sum()
    constraint_e = (v["h_e"] * (v["e"] - queries @ v["W_e"])).sum()
    constraint_r = (v["h_r"] * (v["r"] - keys @ v["W_r"])).sum()
    (J - constraint_e - constraint_r).backward()
    return {name: tensor.grad for name, tensor in v.items() if tensor.grad is not None}


@TRANSFORMATIONS
@SOLVERS
def test_every_kkt_condition_holds_at_the_solution(data, f, solver) -> None:
    ksvd = fitted(data, f, solver)
    gradients = lagrangian_gradients(data, ksvd)
    assert set(gradients) == {"W_e", "W_r", "e", "r", "h_e", "h_r"}
    for name, gradient in gradients.items():
        assert gradient.abs().max() < EXACT, f"∂L/∂{name} is not zero"


# Remark 3.3


@TRANSFORMATIONS
@pytest.mark.parametrize("solver", ["primal", "dense", "lanczos", "randomized", "nystrom"])
@pytest.mark.parametrize("where", ["in-sample", "out-of-sample"])
def test_primal_scores_equal_dual_scores(data, f, solver, where) -> None:
    X, Z = data
    ksvd = fitted(data, f, solver)
    rng = np.random.default_rng(3)
    queries, keys = (X, Z) if where == "in-sample" else (rng.normal(size=(9, WIDTH)), rng.normal(size=(11, WIDTH)))
    F = ksvd.transformation_
    near(ksvd.transform(queries), formed_kernel(queries, Z, F) @ ksvd.right_vectors_, "e, dual")
    near(ksvd.transform_keys(keys), formed_kernel(X, keys, F).T @ ksvd.left_vectors_, "r, dual")

    w_e_given_x, w_r_given_x = ksvd.projection_weights_
    near(ksvd.transform(queries), phi_q(queries) @ w_e_given_x, "e, primal")
    near(ksvd.transform_keys(keys), phi_k(keys) @ w_r_given_x, "r, primal")

    w_e, w_r = ksvd.primal_weights_
    F = np.eye(5) if F is None else F
    near(w_e_given_x, F.T @ w_e, "W_{e|X} = f(X)ᵀ W_e")
    near(w_r_given_x, F.T @ w_r, "W_{r|X} = f(X)ᵀ W_r")


# Lemma 4.2


@TRANSFORMATIONS
@pytest.mark.parametrize("solver", ["primal", "dense", "lanczos", "nystrom"])
def test_objective_is_zero_at_the_solution(data, f, solver) -> None:
    X, Z = data
    ksvd = fitted(data, f, solver)
    scale = ksvd.singular_values_.sum()
    assert abs(ksvd.objective_) < EXACT * scale
    w_e, w_r = ksvd.primal_weights_
    energies = (ksvd.transform(X) ** 2).sum(axis=0) + (ksvd.transform_keys(Z) ** 2).sum(axis=0)
    assert abs(0.5 * (energies / ksvd.singular_values_).sum() - np.trace(w_e.T @ w_r)) < EXACT * scale


def objective_at(K: np.ndarray, H_e: np.ndarray, H_r: np.ndarray, lam: np.ndarray) -> float:
    """J with the primal variables eliminated: e = K H_r, r = Kᵀ H_e, Tr(W_eᵀ W_r) = Tr(H_eᵀ K H_r)."""
    return ksvd_objective(K @ H_r, K.T @ H_e, lam=lam, coupling=float(np.trace(H_e.T @ K @ H_r)))


def test_objective_is_not_zero_elsewhere(data) -> None:
    X, Z = data
    ksvd = fitted(data, None, "primal")
    K = formed_kernel(X, Z, None)
    H_e, sigma, H_r = ksvd.left_vectors_, ksvd.singular_values_, ksvd.right_vectors_
    turn = np.linalg.qr(np.random.default_rng(4).normal(size=(RANK, RANK)))[0]
    elsewhere = {
        "another Λ": (H_e, H_r, 2 / sigma),
        "Λ in another order": (H_e, H_r, 1 / sigma[::-1]),
        "vectors of one side scaled": (2 * H_e, H_r, 1 / sigma),
        "pairs broken": (H_e[:, ::-1], H_r, 1 / sigma),
        "signs broken": (-H_e, H_r, 1 / sigma),
        "subspace turned on both sides": (H_e @ turn, H_r @ turn, 1 / sigma),
    }
    assert abs(objective_at(K, H_e, H_r, 1 / sigma)) < EXACT
    for name, point in elsewhere.items():
        assert abs(objective_at(K, *point)) > 1e-2, name


def test_objective_of_an_unfinished_solution_is_its_residual(data) -> None:
    """For a Rayleigh–Ritz solution, uᵀKv = σ, J = ½ Σ σ⁻¹ (‖Kv − σu‖² + ‖Kᵀu − σv‖²): positive until solved."""
    X, Z = data
    objectives = []
    for n_iter in range(4):
        ksvd = KernelSVD(3, kernel="rbf", solver="randomized", n_oversamples=0, n_iter=n_iter, random_state=0)
        ksvd.fit(X, Z=Z)
        K, H_e, sigma, H_r = ksvd.kernel_(X, Z), ksvd.left_vectors_, ksvd.singular_values_, ksvd.right_vectors_
        residual = ((K @ H_r - H_e * sigma) ** 2).sum(0) + ((K.T @ H_e - H_r * sigma) ** 2).sum(0)
        near(np.array(ksvd.objective_), 0.5 * (residual / sigma).sum(), "J")
        assert shifted_eigenvalue_residual(K, H_e, sigma, H_r) > 1e-6
        objectives.append(ksvd.objective_)
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] > 0
