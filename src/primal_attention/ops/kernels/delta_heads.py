"""The scores of a delta layer on their way to W_o, in one pass: one size in each head, a gate, and their energies.

    o = w ⊙ x / √(mean(x²) + ε) ⊙ g sigmoid(g),   x = [e; r] of a token and head,   energies Σ_i x_i²

x (B, N, H, 2s) is read once and once more on the way back, where the energies' gradient joins the output's. Sums over
tokens are partial sums, added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import ceil_div, power_of_two

ROWS = 128  # tokens of a program


@triton.jit
def _run(length, HEADS: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """Of a program's run of tokens: its sequence, the first of them, and where its partial sums go."""
    runs = tl.cdiv(length, RUN)
    batch, first = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs * RUN
    return batch, first, (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * WIDTH


@triton.jit
def _block(batch, first, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Places of a block of tokens of one head, and which are there."""
    t, w = tl.arange(0, BT), tl.arange(0, BW)
    place = ((batch * length + first) * HEADS + tl.program_id(1)) * WIDTH + t[:, None] * (HEADS * WIDTH) + w[None]
    return place, (first + t < length)[:, None] & (w[None] < WIDTH)


@triton.jit
def _gated(
    x, gate, norm, out, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, RUN: tl.constexpr,
    GATE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    batch, begin, part = _run(length, HEADS, WIDTH, RUN)
    w = tl.arange(0, BW)
    scale = tl.load(norm + w, mask=w < WIDTH, other=0.0).to(tl.float32)[None]
    energy = tl.zeros((BT, BW), tl.float32)
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        place, inside = _block(batch, first, length, HEADS, WIDTH, BT, BW)
        score = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        energy += score * score
        result = score * tl.rsqrt(tl.sum(score * score, 1) / WIDTH + EPS)[:, None] * scale
        if GATE:
            g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
            result *= g * tl.sigmoid(g)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    tl.store(parts + part + w, tl.sum(energy, 0), mask=w < WIDTH)


@triton.jit
def _gated_backward(
    x, gate, norm, grad_out, grad_energy, grad_x, grad_gate, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, RUN: tl.constexpr,
    GATE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    batch, begin, part = _run(length, HEADS, WIDTH, RUN)
    w = tl.arange(0, BW)
    scale = tl.load(norm + w, mask=w < WIDTH, other=0.0).to(tl.float32)[None]
    twice = 2.0 * tl.load(grad_energy + (batch * HEADS + tl.program_id(1)) * WIDTH + w, mask=w < WIDTH, other=0.0)[None]
    sums = tl.zeros((BT, BW), tl.float32)
    for first in range(begin, tl.minimum(begin + RUN, length), BT):
        place, inside = _block(batch, first, length, HEADS, WIDTH, BT, BW)
        score = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(score * score, 1) / WIDTH + EPS)[:, None]
        unit = score * inverse
        if GATE:
            g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
            bend = tl.sigmoid(g)
            grad_g = grad * unit * scale * bend * (1.0 + g * (1.0 - bend))
            tl.store(grad_gate + place, grad_g.to(grad_gate.dtype.element_ty), mask=inside)
            grad *= g * bend
        sums += grad * unit
        grad *= scale
        grad = (grad - unit * (tl.sum(grad * unit, 1) / WIDTH)[:, None]) * inverse + twice * score
        tl.store(grad_x + place, grad.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + part + w, tl.sum(sums, 0), mask=w < WIDTH)


def _launch(kernel: Any, x: Tensor, gate: Tensor | None, norm: Tensor, eps: float, *others: Tensor) -> Tensor:
    """Run one of the kernels; the partial sums that it leaves, (B, runs, H, 2s)."""
    batch, length, heads, width = x.shape
    block, runs = power_of_two(width), ceil_div(length, ROWS)
    parts = torch.empty((batch, runs, heads, width), dtype=torch.float32, device=x.device)
    if parts.numel():
        kernel[(batch * runs, heads)](
            x, x if gate is None else gate, norm, *others, parts, length, HEADS=heads, WIDTH=width, BW=block,
            BT=1024 // block, RUN=ROWS, GATE=gate is not None, EPS=eps, num_warps=4,
        )  # fmt: skip
    return parts


def gated_forward(x: Tensor, gate: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """o like x, and the energies (B, H, 2s) float32. gate: like x, before SiLU."""
    out = torch.empty_like(x)
    return out, _launch(_gated, x, gate, norm, eps, out).sum(1)


def gated_backward(
    x: Tensor, gate: Tensor | None, norm: Tensor, eps: float, grad_out: Tensor, grad_energy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the gate and of the norm's weight."""
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(x if gate is None else gate)
    parts = _launch(_gated_backward, x, gate, norm, eps, grad_out, grad_energy, grad_x, grad_gate)
    return grad_x, grad_gate, parts.sum((0, 1, 2)).to(norm.dtype)
