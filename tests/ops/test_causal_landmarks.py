"""The causal data-dependent mode against a reference that rebuilds W_{e|X≤i} for every i."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from primal_attention.ops.feature_maps import cosine
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.reference import split_heads
from primal_cases import inputs, make

# float64: the same products, summed over landmarks first or over columns first.
SAME = 1e-12


def brute_force(x_h: Tensor, phi: Tensor, w: Tensor, grid: list[int], decay: Tensor | None) -> Tensor:
    """e_i = W_{e|X≤i}ᵀ φ(x_i) for one head: x_h, phi (N, p), w (n, s) → (N, s)."""
    scores = []
    for i in range(len(x_h)):
        w_x = torch.zeros(x_h.shape[1], w.shape[1], dtype=w.dtype)  # W_{e|X≤i}
        for j, position in enumerate(grid):
            if position <= i:
                fade = 1.0 if decay is None else decay ** (i - position)
                w_x = w_x + fade * torch.outer(x_h[position], w[j])
        scores.append(w_x.T @ phi[i])
    return torch.stack(scores)


@pytest.mark.parametrize("decay", [None, "learned", 0.9, 1.0])
@settings(max_examples=8, deadline=None)
@given(length=st.integers(1, 16), landmarks=st.integers(1, 24), spare=st.integers(0, 20))
def test_scores_equal_the_brute_force(decay: float | str | None, length: int, landmarks: int, spare: int) -> None:
    layer = make("causal_data_dependent", decay, landmarks=landmarks, max_length=length + spare)
    x = inputs(2, length)
    _, scores = layer(x, return_scores=True)
    grid = landmark_indices(length + spare, landmarks).tolist()
    x_h = split_heads(x, layer.num_heads)
    q, k = (cosine(split_heads(z, layer.num_heads)) for z in layer.qk_proj(x).chunk(2, -1))
    for ours, phi, w in ((scores.e, q, layer.w_e), (scores.r, k, layer.w_r)):
        for b in range(2):
            for h in range(layer.num_heads):
                gamma = None if layer.decay is None else layer.decay[h]
                assert_close(ours[b, h], brute_force(x_h[b, h], phi[b, h], w[h], grid, gamma), SAME)


def test_the_last_token_of_a_full_sequence_sees_the_weights_of_the_non_causal_layer() -> None:
    causal, whole = make("causal_data_dependent", max_length=20), make("data_dependent")
    whole.load_state_dict(causal.state_dict())
    x = inputs(2, 20)
    assert_close(causal(x)[:, -1], whole(x)[:, -1], SAME)


def test_a_decay_of_one_is_no_decay() -> None:
    plain, fixed = make("causal_data_dependent"), make("causal_data_dependent", 1.0)
    fixed.load_state_dict(plain.state_dict())
    x = inputs(2, 20)
    assert_close(fixed(x), plain(x), SAME)


def test_the_state_is_the_projection_weights_so_far() -> None:
    layer = make("causal_data_dependent", max_length=20)
    x = inputs(1, 20)
    _, state = layer(x, return_state=True)
    rows = split_heads(x, layer.num_heads)[:, :, landmark_indices(20, layer.landmarks)]
    assert_close(state.w_e_x, rows.mT @ layer.w_e, SAME)
    assert_close(state.w_r_x, rows.mT @ layer.w_r, SAME)
    assert state.position.tolist() == [20]
