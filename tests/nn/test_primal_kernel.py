"""The kernel that the layer implies: K_ij = ⟨φ′_q(x_i), φ′_k(x_j)⟩ of Theorem 3.2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_attention import PrimalAttention
from primal_attention.ops.feature_maps import positive_random
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.reference import split_heads
from primal_cases import MAX_LENGTH, MODES_AND_DECAYS, inputs, make

SAME = 1e-12  # float64, the same sums in another order


def features(layer: PrimalAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """φ of q and k, or of their weighted sums in the data-independent modes, with the norm written out."""
    q, k = (split_heads(z, layer.num_heads) for z in layer.qk_proj(x).chunk(2, -1))
    if not layer.data_dependent and (layer.causal or layer.decay is not None):
        n = x.shape[1]
        age = torch.arange(n)[:, None] - torch.arange(n)
        gamma = torch.ones(layer.num_heads, dtype=x.dtype) if layer.decay is None else layer.decay
        weights = gamma[:, None, None] ** age.abs()  # (H, N, N)
        weights = weights * (age >= 0) if layer.causal else weights
        q, k = weights @ q, weights @ k
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


def theorem(layer: PrimalAttention, x: Tensor) -> Tensor:
    """K_ij = φ(q_i)ᵀ f(X)ᵀ f(X) φ(k_j), or φ(q_i)ᵀ φ(k_j) when not data-dependent."""
    phi_q, phi_k = features(layer, x)
    if not layer.data_dependent:
        return phi_q @ phi_k.mT
    n = x.shape[1]
    length = layer.max_length if layer.causal else n
    grid = landmark_indices(length, layer.landmarks)
    rows = torch.zeros(*x.shape[:1], layer.num_heads, layer.landmarks, layer.head_dim, dtype=x.dtype)
    exists = grid < n
    rows[:, :, exists] = split_heads(x, layer.num_heads)[:, :, grid[exists]]
    visible = torch.ones(layer.num_heads, n, layer.landmarks, dtype=x.dtype)
    if layer.causal:
        age = torch.arange(n)[:, None] - grid
        gamma = torch.ones(layer.num_heads, dtype=x.dtype) if layer.decay is None else layer.decay
        visible = (age >= 0) * gamma[:, None, None] ** age.clamp(min=0)
    return (phi_q @ rows.mT * visible) @ (phi_k @ rows.mT * visible).mT


@pytest.mark.parametrize(("mode", "decay"), [*MODES_AND_DECAYS, ("two_sided", 0.7)])
def test_the_kernel_matrix_is_the_formula_of_the_theorem(mode: str, decay: Any) -> None:
    for landmarks in (1, 6, MAX_LENGTH):
        layer = make(mode, decay, landmarks=landmarks)
        for n in (1, 4, MAX_LENGTH):
            x = inputs(2, n)
            assert_close(layer.kernel_matrix(x), theorem(layer, x), SAME)


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_scores_are_the_factors_times_the_directions(mode: str, decay: Any, feature_map: str) -> None:
    # φ′_q W_e = e and φ′_k W_r = r: primal scores and kernel belong to the same feature maps.
    layer = make(mode, decay, feature_map=feature_map)
    x = inputs(2, 15)
    y, scores = layer(x, return_scores=True)
    phi_q, phi_k = layer.kernel_factors(x)
    assert_close(phi_q @ layer.w_e, scores.e, SAME, "e")
    assert_close(phi_k @ layer.w_r, scores.r, SAME, "r")
    heads = layer.score_proj(torch.cat([*scores], dim=-1))
    assert_close(y, layer.out_proj(heads.transpose(1, 2).flatten(2)), SAME, "y")


def test_the_softmax_kernel_is_attention_with_its_normaliser_split_over_both_sides() -> None:
    # K = D̂^(−1/2) A D̂^(−1/2) for the unnormalised A = φ_q φ_kᵀ whose rows sum to D̂; attention itself is D̂⁻¹ A.
    layer = make("plain", feature_map="softmax")
    x = inputs(1, 8)
    q, k = (split_heads(z, layer.num_heads) for z in layer.qk_proj(x).chunk(2, -1))
    raw = positive_random(q, layer.frequencies) @ positive_random(k, layer.frequencies).mT
    root = raw.sum(-1, keepdim=True).sqrt()
    attention = layer.kernel_matrix(x) / root * root.mT
    assert_close(attention, raw / raw.sum(-1, keepdim=True), SAME)
    assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]), SAME)


def test_a_callable_feature_map_is_applied_to_tokens_and_running_means() -> None:
    x = inputs(2, 5)
    for mode in ("plain", "causal"):
        layer = make(mode, feature_map=torch.nn.functional.elu)
        assert layer.feature_map == "elu"
        q, k = (split_heads(z, layer.num_heads) for z in layer.qk_proj(x).chunk(2, -1))
        if layer.causal:
            q, k = (torch.stack([z[:, :, : i + 1].mean(2) for i in range(5)], 2) for z in (q, k))
        for phi, z in zip(layer.kernel_factors(x), (q, k), strict=True):
            assert_close(phi, torch.nn.functional.elu(z), SAME)
