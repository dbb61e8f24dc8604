"""The objective J from the energies: one launch forward, one backward.

    J_b = c_b Σ_{h,s} Λ (E_e + E_r) − (1/H) Σ_h Tr_h,   c_b = 1 / (2 H tokens_b), or 1 / (2 H) for the sum form
                                                                              (reference: `reference.objective`)

E: (B, H, 2, S) float32 as the score kernels write it; columns beyond the rank are ignored. Plain operators would take
many small launches per layer and step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .common import ceil_div, forbid_double_backward, jit_kernel, power_of_two

SEQUENCES = 256  # of a block in the backward pass
DIRECTIONS = 32  # of a program that computes the gradient of √Λ


@jit_kernel
def _objective_kernel(
    energy, sqrt_lambda, trace, tokens, j, length,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
    IS_RAGGED: tl.constexpr, IS_SUM: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    s, h = tl.arange(0, BS), tl.arange(0, BH)
    total = tl.zeros((BS,), tl.float32)
    for head in range(HEADS):
        root = tl.load(sqrt_lambda + head * RANK + s, mask=s < RANK, other=0.0).to(tl.float32)
        place = energy + (sequence * HEADS + head) * (2 * S) + s
        energies = tl.load(place, mask=s < RANK, other=0.0) + tl.load(place + S, mask=s < RANK, other=0.0)
        total += root * root * energies
    count = (tl.load(tokens + sequence) if IS_RAGGED else length) * 1.0
    scale = 0.5 / HEADS if IS_SUM else 0.5 / (HEADS * tl.maximum(count, 1.0))
    traces = tl.load(trace + h, mask=h < HEADS, other=0.0)
    tl.store(j + sequence, tl.sum(total, 0) * scale - tl.sum(traces, 0) / HEADS)


@jit_kernel
def _objective_backward_kernel(
    grad, energy, sqrt_lambda, tokens, grad_energy, grad_lambda, grad_trace, length, batch,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    IS_RAGGED: tl.constexpr, IS_SUM: tl.constexpr,
):  # fmt: skip
    """The first B programs write dE of a sequence, the others d√Λ of some directions of a head, and dTr."""
    program = tl.program_id(0)
    if program < batch:
        s = tl.arange(0, BS)
        count = (tl.load(tokens + program) if IS_RAGGED else length) * 1.0
        scale = tl.load(grad + program) * (0.5 / HEADS if IS_SUM else 0.5 / (HEADS * tl.maximum(count, 1.0)))
        for head in range(HEADS):
            root = tl.load(sqrt_lambda + head * RANK + s, mask=s < RANK, other=0.0).to(tl.float32)
            place = grad_energy + (program * HEADS + head) * (2 * S) + s
            tl.store(place, root * root * scale, mask=s < S)
            tl.store(place + S, root * root * scale, mask=s < S)
    else:
        head, block = (program - batch) % HEADS, (program - batch) // HEADS
        direction = block * BD + tl.arange(0, BD)
        total = tl.zeros((BB, BD), tl.float32)
        grads = tl.zeros((BB,), tl.float32)
        for first in range(0, batch, BB):
            sequence = first + tl.arange(0, BB)
            exists = sequence < batch
            g = tl.load(grad + sequence, mask=exists, other=0.0)
            grads += g
            if not IS_SUM:
                count = tl.load(tokens + sequence, mask=exists, other=1) if IS_RAGGED else length
                g /= tl.maximum(count * 1.0, 1.0)
            source = energy + (sequence * HEADS + head)[:, None] * (2 * S) + direction[None]
            inside = exists[:, None] & (direction < RANK)[None]
            energies = tl.load(source, mask=inside, other=0.0) + tl.load(source + S, mask=inside, other=0.0)
            total += energies * g[:, None]
        root = tl.load(sqrt_lambda + head * RANK + direction, mask=direction < RANK, other=0.0).to(tl.float32)
        value = root * tl.sum(total, 0) / HEADS
        place = grad_lambda + head * RANK + direction
        tl.store(place, value.to(grad_lambda.dtype.element_ty), mask=direction < RANK)
        if block == 0:
            tl.store(grad_trace + head, -tl.sum(grads, 0) / HEADS)


class Objective(torch.autograd.Function):
    """J (B,) of energies (B, H, 2, S), √Λ (H, s) and traces (H,). `lengths` (B,) if the sequences differ in length."""

    @staticmethod
    def forward(
        ctx: Any,
        energy: Tensor,
        sqrt_lambda: Tensor,
        trace: Tensor,
        lengths: Tensor | None,
        length: int,
        is_sum: bool,
    ) -> Tensor:
        batch, heads, _, stored = energy.shape
        j = torch.empty(batch, dtype=torch.float32, device=energy.device)
        _objective_kernel[(batch,)](
            energy, sqrt_lambda, trace, energy if lengths is None else lengths, j, length,
            HEADS=heads, RANK=sqrt_lambda.shape[1], S=stored, BS=power_of_two(stored), BH=power_of_two(heads),
            IS_RAGGED=lengths is not None, IS_SUM=is_sum, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(energy, sqrt_lambda, lengths)
        ctx.settings = (length, is_sum)
        return j

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward()
        energy, sqrt_lambda, lengths = ctx.saved_tensors
        length, is_sum = ctx.settings
        batch, heads, _, stored = energy.shape
        grad_energy, grad_lambda = torch.empty_like(energy), torch.empty_like(sqrt_lambda)
        grad_trace = torch.empty(heads, dtype=torch.float32, device=energy.device)
        _objective_backward_kernel[(batch + heads * ceil_div(stored, DIRECTIONS),)](
            grad.contiguous(), energy, sqrt_lambda, energy if lengths is None else lengths,
            grad_energy, grad_lambda, grad_trace, length, batch,
            HEADS=heads, RANK=sqrt_lambda.shape[1], S=stored, BS=power_of_two(stored), BB=SEQUENCES, BD=DIRECTIONS,
            IS_RAGGED=lengths is not None, IS_SUM=is_sum, num_warps=8,
        )  # fmt: skip
        return grad_energy, grad_lambda, grad_trace, None, None, None
