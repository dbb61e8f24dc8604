"""Running sums against plain loops, and causal landmarks against the bidirectional layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.reference import running_sum, split_heads
from primal_cases import inputs, make

SAME = 1e-12  # float64, the same terms in another order


# Running sums: s_i = γ s_{i−1} + z_i


def loop(z: Tensor, decay: Tensor | None, valid: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    s = torch.zeros_like(z[:, :, 0]) if start is None else start
    gamma = torch.ones(z.shape[1], dtype=z.dtype) if decay is None else decay
    sums = []
    for i in range(z.shape[2]):
        new = gamma[None, :, None] * s + z[:, :, i]
        s = new if valid is None else torch.where(valid[:, None, i, None], new, s)
        sums.append(s)
    return torch.stack(sums, 2)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 200),
    has_decay=st.booleans(),
    has_padding=st.booleans(),
    has_start=st.booleans(),
)
def test_running_sum_equals_a_loop(
    batch: int, length: int, has_decay: bool, has_padding: bool, has_start: bool
) -> None:
    z = torch.randn(batch, 2, length, 3, dtype=torch.float64)
    decay = torch.tensor([0.3, 0.99], dtype=torch.float64) if has_decay else None
    valid = torch.rand(batch, length) < 0.7 if has_padding else None
    start = torch.randn(batch, 2, 3, dtype=torch.float64) if has_start else None
    assert_close(running_sum(z, decay, valid, start), loop(z, decay, valid, start), SAME)


def test_long_sums_and_the_gradient_of_the_decay_equal_the_loop() -> None:
    z = torch.randn(1, 2, 64 * 64 + 5, 1, dtype=torch.float64)  # chunks of chunks
    weight, results = torch.randn_like(z), []
    for function in (running_sum, loop):
        decay = torch.tensor([0.999, 0.5], dtype=torch.float64, requires_grad=True)
        sums = function(z, decay)
        results.append((sums, torch.autograd.grad((sums * weight).sum(), decay)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, SAME)


@pytest.mark.parametrize("decay", [None, torch.tensor([0.5, 1e-3])])
def test_a_nan_does_not_reach_earlier_sums_and_no_decay_makes_one(decay: Tensor | None) -> None:
    z = torch.randn(1, 2, 3000, 3)
    expected = running_sum(z, decay)
    assert torch.isfinite(expected).all()
    z[:, :, 150:] = float("nan")
    assert torch.equal(running_sum(z, decay)[:, :, :150], expected[:, :, :150])


def test_sums_of_bfloat16_are_float32() -> None:
    # 256 + 1 is 256 in bfloat16: a sum in it would stop growing.
    sums = running_sum(torch.ones(1, 1, 1000, 1, dtype=torch.bfloat16))
    assert sums.dtype == torch.float32
    assert sums[0, 0, -1, 0] == 1000


# Causal landmarks


def test_the_last_token_of_a_full_sequence_has_the_weights_of_the_bidirectional_layer() -> None:
    causal, fixed = make("causal_data_dependent", max_length=20), make("causal_data_dependent", 1.0, max_length=20)
    bidirectional, x = make("data_dependent"), inputs(2, 20)
    for layer in (bidirectional, fixed):
        layer.load_state_dict(causal.state_dict())
    y, state = causal(x, return_state=True)
    assert_close(y[:, -1], bidirectional(x)[:, -1], SAME)
    assert_close(fixed(x), y, SAME)  # γ = 1 is no decay
    rows = split_heads(x, causal.num_heads)[:, :, landmark_indices(20, causal.landmarks)]
    assert_close(state.w_e_x, rows.mT @ causal.w_e, SAME)
    assert_close(state.w_r_x, rows.mT @ causal.w_r, SAME)
    assert state.position.tolist() == [20, 20]
