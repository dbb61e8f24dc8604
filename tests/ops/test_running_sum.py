"""s_i = γ·s_{i−1} + z_i against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from primal_attention.ops.reference import running_sum

# float64: doubling adds the same terms in a tree instead of a chain.
SAME = 1e-12


def loop(z: Tensor, decay: Tensor | None, valid: Tensor | None, start: Tensor | None) -> Tensor:
    s = torch.zeros_like(z[:, :, 0]) if start is None else start
    gamma = torch.ones(z.shape[1], dtype=z.dtype) if decay is None else decay
    sums = []
    for i in range(z.shape[2]):
        new = gamma[None, :, None] * s + z[:, :, i]
        s = new if valid is None else torch.where(valid[:, None, i, None], new, s)
        sums.append(s)
    return torch.stack(sums, 2)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 200),
    fades=st.booleans(),
    padded=st.booleans(),
    resumed=st.booleans(),
)
def test_running_sum_equals_a_loop(batch: int, length: int, fades: bool, padded: bool, resumed: bool) -> None:
    z = torch.randn(batch, 2, length, 3, dtype=torch.float64)
    decay = torch.tensor([0.3, 0.99], dtype=torch.float64) if fades else None
    valid = torch.rand(batch, length) < 0.7 if padded else None
    start = torch.randn(batch, 2, 3, dtype=torch.float64) if resumed else None
    assert_close(running_sum(z, decay, valid, start), loop(z, decay, valid, start), SAME)


def test_the_gradient_of_the_decay_equals_the_loops() -> None:
    z = torch.randn(2, 2, 13, 3, dtype=torch.float64)
    weigh = torch.randn_like(z)
    grads = []
    for function in (running_sum, loop):
        decay = torch.tensor([0.5, 0.95], dtype=torch.float64, requires_grad=True)
        grads.append(torch.autograd.grad((function(z, decay, None, None) * weigh).sum(), decay)[0])
    assert_close(grads[0], grads[1], SAME)


def test_sums_of_narrow_numbers_are_float32() -> None:
    # In bfloat16, 256 + 1 is 256: a sum kept there would stop growing.
    z = torch.ones(1, 1, 1000, 1, dtype=torch.bfloat16)
    sums = running_sum(z)
    assert sums.dtype == torch.float32
    assert sums[0, 0, -1, 0] == 1000


@pytest.mark.parametrize("decay", [None, torch.tensor([0.5, 0.9])])
def test_a_nan_does_not_reach_the_past(decay: Tensor | None) -> None:
    z = torch.randn(1, 2, 300, 3)
    expected = running_sum(z, decay)
    z[:, :, 150:] = float("nan")
    assert torch.equal(running_sum(z, decay)[:, :, :150], expected[:, :, :150])


def test_long_sequences_use_chunks_of_chunks() -> None:
    z = torch.randn(1, 2, 64 * 64 + 5, 1, dtype=torch.float64)
    decay = torch.tensor([0.999, 0.5], dtype=torch.float64)
    assert_close(running_sum(z, decay), loop(z, decay, None, None), SAME)


def test_the_past_fades_to_nothing_without_turning_into_nan() -> None:
    z = torch.randn(1, 1, 3000, 2)
    assert torch.isfinite(running_sum(z, torch.tensor([1e-3]))).all()
