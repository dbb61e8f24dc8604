"""The matrix product of all kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_tf32(x):
    """float32 to the nearest number of TF32. The GPU cuts the last 13 bits off, which makes every operand smaller:
    what is a sum of squares, an energy for one, would come out a thousandth too small."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, added up in float32; see `config.precision` for how."""
    if PRECISION == "widened":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif PRECISION == "tf32":
        result = tl.dot(nearest_tf32(a), nearest_tf32(b), input_precision=PRECISION)
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result
