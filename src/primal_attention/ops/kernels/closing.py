"""The second half of a narrow pre-LN block in one pass over the tokens, and the way back in one.

    x₁ = x + D(a),    y = x₁ + D(W₂ D(gelu(W₁ LN(x₁) + b₁)) + b₂)

x: (rows, d) the residual stream, a: (rows, d) what attention says, D: dropout (`ops.dropping`). At widths of 64 and 128
each of these steps waits for memory, and both weight matrices fit a program: here x and a are read, y is written, and
nothing else is kept. The way back computes everything again, masks included. Its programs add up the gradients of the
weights over their tokens and leave partial sums, which are added in a fixed order.

With u = (x₁ − mean) / deviation and the norm's gain γ and shift β inside the weights, W₁ LN(x₁) + b₁ = (W₁γ) u + c.
Then G = Σ dh uᵀ and g = Σ dh hold what the first layer needs: dW₁ = Gγ + g βᵀ, dγ = Σ_f W₁ G, dβ = W₁ᵀ g, db₁ = g.

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
from .config import INTERPRETED, ceil_div, precision
from .products import dot
from .segments import column_sum

STEP, FIRST, SECOND = (tl.constexpr(n % 2**32) for n in (dropping.STEP, dropping.FIRST, dropping.SECOND))
APPROXIMATE = tl.constexpr(not INTERPRETED)  # the GPU's own reciprocal and power, good to the last bit or two


class Shape(NamedTuple):
    """How a kernel runs: tokens of a block, warps, programs on one multiprocessor, stages of its loop."""

    tokens: int
    warps: int
    programs: int
    stages: int


FORWARD, BACKWARD = Shape(64, 4, 2, 1), Shape(128, 8, 1, 1)


@triton.jit
def _mixed(first, second, place):
    """`dropping.mixed`; all unsigned."""
    z = (place.to(tl.uint32, bitcast=True) ^ first) * STEP
    z = (z ^ (z >> 16)) * FIRST
    z = (z ^ (z >> 15) ^ second) * SECOND
    return z ^ (z >> 16)


@triton.jit
def _halves(key):
    """Both numbers of a key."""
    return tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)


@triton.jit
def _drop(x, bits, HIGH: tl.constexpr, SHARE: tl.constexpr):
    """Zero where the half of the bits says so; SHARE of 65536 are dropped. What is kept is not scaled yet."""
    if SHARE > 0:
        x = tl.where((bits >> 16 if HIGH else bits & 0xFFFF) >= SHARE, x, 0.0)
    return x


@triton.jit
def _reciprocal(x):
    if APPROXIMATE:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def _power_of_two(x):
    if APPROXIMATE:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def _gaussian(h):
    """The normal distribution's Φ(h), to 8e-8, and exp(−h²/2), by Hastings' approximation of the error function."""
    t = _reciprocal(1.0 + 0.23164189 * tl.abs(h))
    bell = _power_of_two(h * h * -0.72134752)
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = series * bell
    return tl.where(h < 0, tail, 1.0 - tail), bell


@triton.jit
def _normalised(x, D: tl.constexpr, EPS: tl.constexpr):
    """(x − mean) / deviation, row by row, and 1 / deviation."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    return centred * inverse[:, None], inverse


@triton.jit
def _fold_norm(
    gain, shift, w1, b1, w2, into, bias, out_of,
    D: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """W₁γ and W₂ in the type of the products, and b₁ + W₁β."""
    d, f = tl.arange(0, D), tl.program_id(0) * BF + tl.arange(0, BF)
    w, v = tl.load(w1 + f[:, None] * D + d[None]).to(tl.float32), tl.load(w2 + d[:, None] * F + f[None])
    c = tl.load(b1 + f).to(tl.float32) + tl.sum(w * tl.load(shift + d).to(tl.float32)[None], 1)
    w *= tl.load(gain + d).to(tl.float32)[None]
    tl.store(into + f[:, None] * D + d[None], w.to(into.dtype.element_ty))
    tl.store(out_of + d[:, None] * F + f[None], v.to(out_of.dtype.element_ty))
    tl.store(bias + f, c)


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
    t, d, c = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, C)
    first, second = _halves(key)
    bias = tl.load(b2 + d).to(tl.float32) * SCALE
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BT), tl.num_programs(0), num_stages=STAGES):
        row = block * BT + t
        live, here = (row < rows)[:, None], row.to(tl.int64)[:, None] * D + d[None]
        outer = _mixed(first, second, row[:, None] * (D + C) + d[None])
        inner = _mixed(first, second, row[:, None] * (D + C) + D + c[None])
        said = tl.load(a + here, mask=live, other=0.0).to(tl.float32)
        stream = tl.load(x + here, mask=live, other=0.0).to(tl.float32) + _drop(said, outer, 0, SHARE) * SCALE
        unit = _normalised(stream, D, EPS)[0].to(into.dtype.element_ty)
        z = tl.zeros((BT, D), tl.float32)
        for half in tl.static_range(2):
            w, b, v = _weights(into, hidden_bias, out_of, half, D, C)
            h = dot(unit, tl.trans(w), PRECISION) + b
            u = _drop(h * _gaussian(h)[0], inner, half, SHARE).to(unit.dtype)
            z += dot(u, tl.trans(v), PRECISION)
        z = stream + _drop(z * (SCALE * SCALE) + bias[None], outer, 1, SHARE)
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
    share, bell = _gaussian(h)
    u = _drop(h * share, bits, HALF, SHARE).to(unit.dtype)
    slope = _drop((share + h * (bell * 0.39894228)) * SCALE, bits, HALF, SHARE)
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
    t, d, c, f = tl.arange(0, BT), tl.arange(0, D), tl.arange(0, C), tl.arange(0, 2 * C)
    first, second = _halves(key)
    of_w1, of_w2 = tl.zeros((2 * C, D), tl.float32), tl.zeros((2 * C, D), tl.float32)
    b1_0, b1_1, of_b2 = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((D,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BT), tl.num_programs(0), num_stages=STAGES):
        row = block * BT + t
        live, here = (row < rows)[:, None], row.to(tl.int64)[:, None] * D + d[None]
        outer = _mixed(first, second, row[:, None] * (D + C) + d[None])
        inner = _mixed(first, second, row[:, None] * (D + C) + D + c[None])
        said = tl.load(a + here, mask=live, other=0.0).to(tl.float32)
        stream = tl.load(x + here, mask=live, other=0.0).to(tl.float32) + _drop(said, outer, 0, SHARE) * SCALE
        g = tl.load(grad + here, mask=live, other=0.0).to(tl.float32)
        unit, inverse = _normalised(stream, D, EPS)
        u16 = unit.to(into.dtype.element_ty)
        dz = _drop(g * SCALE, outer, 1, SHARE)
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
        tl.store(grad_a + here, (_drop(g, outer, 0, SHARE) * SCALE).to(grad_a.dtype.element_ty), mask=live)
    parts += tl.program_id(0) * (4 * D * C + 2 * C + D)
    tl.store(parts + f[:, None] * D + d[None], of_w1)
    tl.store(parts + 2 * C * D + f[:, None] * D + d[None], of_w2)
    parts += 4 * C * D
    tl.store(parts + c, b1_0)
    tl.store(parts + C + c, b1_1)
    tl.store(parts + 2 * C + d, of_b2)


@triton.jit
def _unfold_norm(
    sums, gain, shift, w1, of_gain, of_shift, of_w1, of_b1, of_w2, of_b2,
    D: tl.constexpr, F: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The added sums of `_close_backward` → the gradients of all weights."""
    d, f = tl.arange(0, D), tl.arange(0, F)
    here = f[:, None] * D + d[None]
    outer, hidden = tl.load(sums + here), tl.load(sums + 2 * D * F + f)
    w = tl.load(w1 + here).to(tl.float32)
    scaled = outer * tl.load(gain + d).to(tl.float32)[None]
    scaled += hidden[:, None] * tl.load(shift + d).to(tl.float32)[None]
    tl.store(of_w1 + here, scaled.to(of_w1.dtype.element_ty))
    tl.store(of_gain + d, tl.sum(w * outer, 0).to(of_gain.dtype.element_ty))
    tl.store(of_shift + d, tl.sum(w * hidden[:, None], 0).to(of_shift.dtype.element_ty))
    tl.store(of_b1 + f, hidden.to(of_b1.dtype.element_ty))
    second = tl.load(sums + D * F + here) * SCALE
    tl.store(of_w2 + d[None] * F + f[:, None], second.to(of_w2.dtype.element_ty))
    tl.store(of_b2 + d, tl.load(sums + 2 * D * F + F + d).to(of_b2.dtype.element_ty))


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


def _folded(
    gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """W₁γ, its bias and W₂ as the kernels read them."""
    (f, d), block = w1.shape, 16
    into, bias = torch.empty_like(w1, dtype=dtype), torch.empty_like(b1, dtype=torch.float32)
    out_of = torch.empty_like(w2, dtype=dtype)
    _fold_norm[(f // block,)](gain, shift, w1, b1, w2, into, bias, out_of, D=d, F=f, BF=block)
    return into, bias, out_of


def close(
    x: Tensor, a: Tensor, key: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
    p: float, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y (rows, d) of x's type; x, a: (rows, d); key: `dropping.draw_key`; dtype: of the products' factors."""
    y = torch.empty_like(x)
    weights = _folded(gain, shift, w1, b1, w2, dtype)
    settings = _settings(w1, dtype, p, eps, FORWARD)
    _close[(_programs(x, FORWARD),)](x, a, y, key, *weights, b2, len(x), **settings)
    return y


def close_backward(
    grad: Tensor, x: Tensor, a: Tensor, key: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor,
    b2: Tensor, p: float, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, a, the gain, the shift, W₁, b₁, W₂ and b₂."""
    grad_x, grad_a = torch.empty_like(x), torch.empty_like(a)
    (f, d), programs = w1.shape, _programs(x, BACKWARD)
    weights = _folded(gain, shift, w1, b1, w2, dtype)
    settings = _settings(w1, dtype, p, eps, BACKWARD)
    parts = torch.empty((programs, 2 * d * f + f + d), dtype=torch.float32, device=x.device)
    _close_backward[(programs,)](grad, x, a, grad_x, grad_a, parts, key, *weights, len(x), **settings)
    of_gain, of_shift, of_w1, of_b1, of_w2, of_b2 = (torch.empty_like(t) for t in (gain, shift, w1, b1, w2, b2))
    _unfold_norm[(1,)](
        column_sum(parts, torch.float32), gain, shift, w1, of_gain, of_shift, of_w1, of_b1, of_w2, of_b2,
        D=d, F=f, SCALE=settings["SCALE"], num_warps=8,
    )  # fmt: skip
    return grad_x, grad_a, of_gain, of_shift, of_w1, of_b1, of_w2, of_b2
