"""The second half of a narrow pre-LN block in one pass over the tokens, and the way back in one.

    x₁ = x + D(a),    y = x₁ + D(W₂ D(gelu(W₁ LN(x₁) + b₁)) + b₂)

x: (rows, d) the residual stream, a: (rows, d) what attention says, D: dropout (`ops.dropping`). At widths of 64 and 128
each of these steps waits for memory, and both weight matrices fit a program: here x and a are read, y is written, and
nothing else is kept. The way back computes everything again, masks included. Its programs add up the gradients of the
weights over their tokens and leave partial sums, which are added in a fixed order.

The norm's own weights are inside of W₁ and b₁ (`folding`): the kernels normalise, and know G = Σ dh uᵀ and g = Σ dh.
Hidden numbers are taken in two halves, for the registers' sake. Two numbers share a place in the hash of dropout: the
same of both halves, and the same of a and of the output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dropping
from .config import INTERPRETED, ceil_div, precision, shared_memory
from .folding import folded, unfolded
from .gaussian import gaussian
from .masks import drop, halves, mixed
from .products import dot


class Shape(NamedTuple):
    """How a kernel runs: tokens of a block, warps, programs on one multiprocessor, stages of its loop."""

    tokens: int
    warps: int
    programs: int
    stages: int


FORWARD, BACKWARD = Shape(64, 4, 8, 1), Shape(128, 8, 1, 2)  # measured on an H200
ROOM = 216 * 2**10  # bytes of shared memory that the way back needs for its second stage


@triton.jit
def _normalised(x, D: tl.constexpr, EPS: tl.constexpr):
    """(x − mean) / deviation, row by row, and 1 / deviation."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    return centred * inverse[:, None], inverse


@triton.jit
def _residual(
    x, a, block, rows, first, second,
    D: tl.constexpr, C: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A block of tokens: which are there, where, the bits of their outer and inner masks, and x₁ = x + D(a)."""
    row, d, c = block * BT + tl.arange(0, BT), tl.arange(0, D), tl.arange(0, C)
    live, here = (row < rows)[:, None], row.to(tl.int64)[:, None] * D + d[None]
    outer = mixed(first, second, row[:, None] * (D + C) + d[None])
    inner = mixed(first, second, row[:, None] * (D + C) + D + c[None])
    said = tl.load(a + here, mask=live, other=0.0).to(tl.float32)
    stream = tl.load(x + here, mask=live, other=0.0).to(tl.float32) + drop(said, outer, 0, SHARE) * SCALE
    return live, here, outer, inner, stream


@triton.jit
def _weights(into, bias, out_of, HALF: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Half of W₁γ (C, d), of its bias, and of W₂ (d, C). Read where they are used: kept, they would fill registers."""
    d, f = tl.arange(0, D), HALF * C + tl.arange(0, C)
    w = tl.load(into + f[:, None] * D + d[None])
    return w, tl.load(bias + f)[None], tl.load(out_of + d[:, None] * (2 * C) + f[None])


@triton.jit
def _close(
    x, a, y, key, into, hidden_bias, out_of, b2, rows,
    D: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    first, second = halves(key)
    bias = tl.load(b2 + d).to(tl.float32) * SCALE
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BT), tl.num_programs(0), num_stages=STAGES):
        live, here, outer, inner, stream = _residual(x, a, block, rows, first, second, D, C, SHARE, SCALE, BT)
        unit = _normalised(stream, D, EPS)[0].to(into.dtype.element_ty)
        z = tl.zeros((BT, D), tl.float32)
        for half in tl.static_range(2):
            w, b, v = _weights(into, hidden_bias, out_of, half, D, C)
            h = dot(unit, tl.trans(w), PRECISION) + b
            u = drop(h * gaussian(h)[0], inner, half, SHARE).to(unit.dtype)
            z += dot(u, tl.trans(v), PRECISION)
        z = stream + drop(z * (SCALE * SCALE) + bias[None], outer, 1, SHARE)
        tl.store(y + here, z.to(y.dtype.element_ty), mask=live)


@triton.jit
def _hidden_backward(
    unit, dz, into, hidden_bias, out_of, bits, du,
    HALF: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Half of the hidden numbers: u, dh, its sum over the tokens, and du with its part."""
    w, b, v = _weights(into, hidden_bias, out_of, HALF, D, C)
    h = dot(unit, tl.trans(w), PRECISION) + b
    share, bell = gaussian(h)
    u = drop(h * share, bits, HALF, SHARE).to(unit.dtype)
    slope = drop((share + h * (bell * 0.39894228)) * SCALE, bits, HALF, SHARE)
    dh = dot(dz, v, PRECISION) * slope
    dh16 = dh.to(unit.dtype)
    return u, dh16, tl.sum(dh, 0), du + dot(dh16, w, PRECISION)


@triton.jit
def _side_by_side(a, b):
    """(n, m) twice → (n, 2m)."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _close_backward(
    grad, x, a, grad_x, grad_a, parts, key, into, hidden_bias, out_of, rows,
    D: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of a program: G (2C, d), dW₂ transposed but for its scale, g (2C), db₂ (d)."""
    d, c, f = tl.arange(0, D), tl.arange(0, C), tl.arange(0, 2 * C)
    first, second = halves(key)
    of_w1, of_w2 = tl.zeros((2 * C, D), tl.float32), tl.zeros((2 * C, D), tl.float32)
    b1_0, b1_1, of_b2 = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((D,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BT), tl.num_programs(0), num_stages=STAGES):
        live, here, outer, inner, stream = _residual(x, a, block, rows, first, second, D, C, SHARE, SCALE, BT)
        g = tl.load(grad + here, mask=live, other=0.0).to(tl.float32)
        unit, inverse = _normalised(stream, D, EPS)
        u16 = unit.to(into.dtype.element_ty)
        dz = drop(g * SCALE, outer, 1, SHARE)
        of_b2 += tl.sum(dz, 0)
        dz16, du = dz.to(u16.dtype), tl.zeros((BT, D), tl.float32)
        u0, dh0, sum0, du = _hidden_backward(
            u16, dz16, into, hidden_bias, out_of, inner, du, 0, D, C, SHARE, SCALE, PRECISION
        )
        u1, dh1, sum1, du = _hidden_backward(
            u16, dz16, into, hidden_bias, out_of, inner, du, 1, D, C, SHARE, SCALE, PRECISION
        )
        b1_0 += sum0
        b1_1 += sum1
        of_w2 += dot(tl.trans(_side_by_side(u0, u1)), dz16, PRECISION)
        of_w1 += dot(tl.trans(_side_by_side(dh0, dh1)), u16, PRECISION)
        along, mean = tl.sum(du * unit, 1) / D, tl.sum(du, 1) / D
        g += (du - unit * along[:, None] - mean[:, None]) * inverse[:, None]
        tl.store(grad_x + here, g.to(grad_x.dtype.element_ty), mask=live)
        tl.store(grad_a + here, (drop(g, outer, 0, SHARE) * SCALE).to(grad_a.dtype.element_ty), mask=live)
    parts += tl.program_id(0) * (4 * D * C + 2 * C + D)
    tl.store(parts + f[:, None] * D + d[None], of_w1)
    tl.store(parts + 2 * C * D + f[:, None] * D + d[None], of_w2)
    parts += 4 * C * D
    tl.store(parts + c, b1_0)
    tl.store(parts + C + c, b1_1)
    tl.store(parts + 2 * C + d, of_b2)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _programs(x: Tensor, shape: Shape) -> int:
    return max(1, min(ceil_div(len(x), shape.tokens), shape.programs * _multiprocessors(x.device)))


def _settings(w1: Tensor, dtype: torch.dtype, p: float, eps: float, shape: Shape) -> dict[str, Any]:
    share = dropping.coarse(p)
    return {
        "D": w1.shape[1],
        "C": w1.shape[0] // 2,
        "EPS": eps,
        "SHARE": share,
        "SCALE": 2**16 / (2**16 - share),
        "BT": shape.tokens,
        "STAGES": shape.stages,
        "PRECISION": precision(dtype),
        "num_warps": shape.warps,
    }


def close(
    x: Tensor, a: Tensor, key: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
    p: float, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y (rows, d) of x's type; x, a: (rows, d); key: `dropping.draw_key`; dtype: of the products' factors."""
    y = torch.empty_like(x)
    weights = folded(gain, shift, w1, b1, w2, dtype)
    settings = _settings(w1, dtype, p, eps, FORWARD)
    _close[(_programs(x, FORWARD),)](x, a, y, key, *weights, b2, len(x), **settings)
    return y


def close_backward(
    grad: Tensor, x: Tensor, a: Tensor, key: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor,
    b2: Tensor, p: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, a, the gain, the shift, W₁, b₁, W₂ and b₂."""
    grad_x, grad_a = torch.empty_like(x), torch.empty_like(a)
    shape = BACKWARD if shared_memory(x.device) >= ROOM else BACKWARD._replace(stages=1)
    (f, d), programs = w1.shape, _programs(x, shape)
    weights = folded(gain, shift, w1, b1, w2, dtype)
    settings = _settings(w1, dtype, p, eps, shape)
    parts = torch.empty((programs, 2 * d * f + f + d), dtype=torch.float32, device=x.device)
    _close_backward[(programs,)](grad, x, a, grad_x, grad_a, parts, key, *weights, len(x), **settings)
    return grad_x, grad_a, *unfolded(parts, gain, shift, w1, b1, w2, b2, settings["SCALE"])
