"""The matrix product of all kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_tf32(x):
    """float32 to the nearest number of TF32, by the GPU's own conversion. Its products would cut the last bits off."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, added up in float32; see `config.precision` for how."""
    if PRECISION == "widened":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif PRECISION == "rounded":
        result = tl.dot(nearest_tf32(a), nearest_tf32(b), input_precision="tf32")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def dot_ones(a, b, PRECISION: tl.constexpr):
    """a @ b for a of zeros and ones, which every type holds: where b would be rounded, what that takes follows."""
    result = dot(a, b, PRECISION)
    if PRECISION == "rounded":
        result += dot(a, b - nearest_tf32(b), PRECISION)
    return result
