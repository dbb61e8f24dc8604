"""The matrix product of all kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .config import INTERPRETED

CUTS = tl.constexpr(not INTERPRETED)  # a GPU's product of TF32 leaves an operand's last 13 bits out by itself


@triton.jit
def _half_more(x):
    """float32 plus half of TF32's last bit: what is left of it without its last 13 bits is x to the nearest."""
    # Not `cvt.rna.tf32.f32`: ptxas 12.8 leaves out warp-group products whose sums only that instruction reads.
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def nearest_tf32(x):
    """float32 to the nearest number of TF32, halves away from zero."""
    return (_half_more(x).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """An operand of one pass of TF32. Left to itself the product would cut bits off, and every operand be too small."""
    return _half_more(x) if CUTS else nearest_tf32(x)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, added up in float32; see `config.precision` for how."""
    if PRECISION == "widened":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif PRECISION == "rounded":
        result = tl.dot(_rounded(a), _rounded(b), input_precision="tf32")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def dot_ones(a, b, PRECISION: tl.constexpr):
    """a @ b for a of zeros and ones, which every type holds: where b would be rounded, what that takes follows."""
    if PRECISION == "rounded":
        near = nearest_tf32(b)
        result = tl.dot(a, near, input_precision="tf32") + dot(a, b - near, PRECISION)
    else:
        result = dot(a, b, PRECISION)
    return result
