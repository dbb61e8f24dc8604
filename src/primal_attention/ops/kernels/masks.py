"""The masks of `ops.dropping` inside of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import dropping

STEP, FIRST, SECOND = (tl.constexpr(n % 2**32) for n in (dropping.STEP, dropping.FIRST, dropping.SECOND))


@triton.jit
def mixed(first, second, place):
    """`dropping.mixed`; all unsigned."""
    z = (place.to(tl.uint32, bitcast=True) ^ first) * STEP
    z = (z ^ (z >> 16)) * FIRST
    z = (z ^ (z >> 15) ^ second) * SECOND
    return z ^ (z >> 16)


@triton.jit
def halves(key):
    """Both numbers of a key."""
    return tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)


@triton.jit
def drop(x, bits, HIGH: tl.constexpr, SHARE: tl.constexpr):
    """Zero where the half of the bits says so; SHARE of 65536 are dropped. What is kept is not scaled yet."""
    if SHARE > 0:
        x = tl.where((bits >> 16 if HIGH else bits & 0xFFFF) >= SHARE, x, 0.0)
    return x
