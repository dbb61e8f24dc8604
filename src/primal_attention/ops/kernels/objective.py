"""J from the energies in one launch, and the way back in one.

    J_b = c_b Σ_{h,s} L² (E_e + E_r) − (1/H) Σ_h Tr_h,      c_b = 1 / (2 H tokens_b), or 1 / (2 H) for the sum form

E: (B, H, 2, S) float32 as the score kernels leave it; columns beyond the rank are ignored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two

SEQUENCES = 256  # of a block: a program waits for each block's loads in turn
DIRECTIONS = 32  # of a program on the way back to √Λ


@triton.jit
def _objective(
    energy, sqrt_lambda, trace, tokens, j, length,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
    RAGGED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    s, h = tl.arange(0, BS), tl.arange(0, BH)
    total = tl.zeros((BS,), tl.float32)
    for head in range(HEADS):
        root = tl.load(sqrt_lambda + head * RANK + s, mask=s < RANK, other=0.0).to(tl.float32)
        place = energy + (sequence * HEADS + head) * (2 * S) + s
        both = tl.load(place, mask=s < RANK, other=0.0) + tl.load(place + S, mask=s < RANK, other=0.0)
        total += root * root * both
    count = tl.maximum(tl.load(tokens + sequence), 1).to(tl.float32) if RAGGED else length
    scale = 0.5 / HEADS if SUM else 0.5 / (HEADS * count)
    traces = tl.load(trace + h, mask=h < HEADS, other=0.0)
    tl.store(j + sequence, tl.sum(total, 0) * scale - tl.sum(traces, 0) / HEADS)


@triton.jit
def _objective_backward(
    grad, energy, sqrt_lambda, tokens, grad_energy, grad_lambda, grad_trace, length, batch,
    HEADS: tl.constexpr, RANK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    RAGGED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The first B programs write dE of a sequence, the others dL of a few directions of a head, and dTr."""
    program = tl.program_id(0)
    if program < batch:
        s = tl.arange(0, BS)
        count = tl.maximum(tl.load(tokens + program), 1).to(tl.float32) if RAGGED else length
        scale = tl.load(grad + program) * (0.5 / HEADS if SUM else 0.5 / (HEADS * count))
        for head in range(HEADS):
            root = tl.load(sqrt_lambda + head * RANK + s, mask=s < RANK, other=0.0).to(tl.float32)
            place = grad_energy + (program * HEADS + head) * (2 * S) + s
            tl.store(place, root * root * scale, mask=s < S)
            tl.store(place + S, root * root * scale, mask=s < S)
    else:
        head, block = (program - batch) % HEADS, (program - batch) // HEADS
        few = block * BD + tl.arange(0, BD)
        total = tl.zeros((BB, BD), tl.float32)
        grads = tl.zeros((BB,), tl.float32)
        for first in range(0, batch, BB):
            sequence = first + tl.arange(0, BB)
            there = sequence < batch
            g = tl.load(grad + sequence, mask=there, other=0.0)
            grads += g
            if RAGGED and not SUM:
                g /= tl.maximum(tl.load(tokens + sequence, mask=there, other=1), 1).to(tl.float32)
            source = energy + (sequence * HEADS + head)[:, None] * (2 * S) + few[None]
            inside = there[:, None] & (few < RANK)[None]
            both = tl.load(source, mask=inside, other=0.0) + tl.load(source + S, mask=inside, other=0.0)
            total += both * g[:, None]
        over = 1.0 / HEADS if SUM or RAGGED else 1.0 / (HEADS * length)
        own = tl.load(sqrt_lambda + head * RANK + few, mask=few < RANK, other=0.0).to(tl.float32)
        of_root = tl.sum(total, 0) * own * over
        tl.store(grad_lambda + head * RANK + few, of_root.to(grad_lambda.dtype.element_ty), mask=few < RANK)
        if block == 0:
            tl.store(grad_trace + head, -tl.sum(grads, 0) / HEADS)


def objective_forward(energy: Tensor, sqrt_lambda: Tensor, trace: Tensor, tokens: Tensor | int, summed: bool) -> Tensor:
    """J (B,). tokens: (B,) or one number for all; trace: (H,) float32."""
    batch, heads, _, stored = energy.shape
    j = torch.empty(batch, dtype=torch.float32, device=energy.device)
    ragged = isinstance(tokens, Tensor)
    if batch:
        _objective[(batch,)](
            energy, sqrt_lambda, trace, tokens if ragged else energy, j, 0.0 if ragged else float(max(tokens, 1)),
            HEADS=heads, RANK=sqrt_lambda.shape[1], S=stored, BS=power_of_two(stored), BH=power_of_two(heads),
            RAGGED=ragged, SUM=summed, num_warps=1,
        )  # fmt: skip
    return j


def objective_backward(
    grad: Tensor, energy: Tensor, sqrt_lambda: Tensor, tokens: Tensor | int, summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the energies, of √Λ and of the traces."""
    batch, heads, _, stored = energy.shape
    grad_energy, grad_lambda = torch.empty_like(energy), torch.empty_like(sqrt_lambda)
    grad_trace = torch.empty(heads, dtype=torch.float32, device=energy.device)
    ragged = isinstance(tokens, Tensor)
    _objective_backward[(batch + heads * ceil_div(stored, DIRECTIONS),)](
        grad, energy, sqrt_lambda, tokens if ragged else energy, grad_energy, grad_lambda, grad_trace,
        0.0 if ragged else float(max(tokens, 1)), batch,
        HEADS=heads, RANK=sqrt_lambda.shape[1], S=stored, BS=power_of_two(stored), BB=SEQUENCES, BD=DIRECTIONS,
        RAGGED=ragged, SUM=summed, num_warps=8,
    )  # fmt: skip
    return grad_energy, grad_lambda, grad_trace
