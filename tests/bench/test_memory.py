"""Bytes kept for the backward pass, and allocations that cannot fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from primal_attention.bench import memory
from primal_attention.bench.settings import Case
from primal_attention.bench.step import Step

CPU = torch.device("cpu")


def step_of(layer: nn.Module, **changes) -> Step:
    return Step.of(layer, Case(**{"embed_dim": 8, "num_heads": 2, "batch": 2, "length": 16, **changes}))


def test_a_linear_map_keeps_its_input_and_no_parameter():
    assert memory.kept_bytes(step_of(nn.Linear(8, 8))) == 2 * 16 * 8 * 4


def test_a_view_keeps_the_whole_storage_and_counts_once():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(8, 16)

        def forward(self, x):
            a, b = self.wide(x).chunk(2, dim=-1)
            return a * b

    x, wide = 2 * 16 * 8 * 4, 2 * 16 * 16 * 4
    assert memory.kept_bytes(step_of(Halves())) == x + wide


def test_the_step_still_gives_gradients_afterwards():
    step = step_of(nn.Linear(8, 8))
    memory.kept_bytes(step)
    grads = step.backward(step.forward())
    assert all(g is not None and g.isfinite().all() for g in grads)


def test_too_much_memory_is_an_error_and_not_the_end():
    with pytest.raises(RuntimeError) as caught, memory.refusing_too_much(CPU):
        torch.empty(1 << 44, dtype=torch.uint8).fill_(1)
    assert memory.is_out_of_memory(caught.value)
    torch.empty(1 << 20).fill_(1)  # the limit is lifted again


def test_errors_of_memory_are_told_from_others():
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(RuntimeError("shapes do not match"))
    assert not memory.is_out_of_memory(ValueError("out of memory"))
