"""The normal distribution inside of kernels, for gelu and its slope."""

from __future__ import annotations

import triton
import triton.language as tl

from .config import INTERPRETED

APPROXIMATE = tl.constexpr(not INTERPRETED)  # the GPU's own reciprocal and power, good to the last bit or two


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
def gaussian(h):
    """The normal distribution's Φ(h), to 8e-8, and exp(−h²/2), by Hastings' approximation of the error function."""
    t = _reciprocal(1.0 + 0.23164189 * tl.abs(h))
    bell = _power_of_two(h * h * -0.72134752)
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = series * bell
    return tl.where(h < 0, tail, 1.0 - tail), bell
