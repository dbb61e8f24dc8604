"""Matrix products and transposes of the CPU path.

PyTorch on x86 computes float32 products with MKL, which does not use all vector units of processors that are not from
Intel. The oneDNN of the same PyTorch does, so it computes the large products there. The vendor decides and not a
measurement, so that repeated runs give the same bits. Both libraries follow torch.set_float32_matmul_precision.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_maps import accumulation_dtype

MIN_ONEDNN_PRODUCT = 2**22  # multiplications that repay oneDNN's set-up of about 10 µs
MIN_ONEDNN_SIDE = 128  # rows and columns of the result from which oneDNN is faster


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """Return True on x86 processors from other vendors than Intel, if PyTorch has MKL and oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and cpu_vendor() in ("AuthenticAMD", "HygonGenuine")


def cpu_vendor() -> str:
    """Return the processor's vendor string, empty if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in platform.processor()), "")
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def uses_onednn(a: Tensor, b: Tensor) -> bool:
    """Return True if oneDNN computes a bᵀ."""
    return (
        a.dtype == b.dtype == torch.float32
        and min(a.shape[0], b.shape[0]) >= MIN_ONEDNN_SIDE
        and a.shape[0] * a.shape[1] * b.shape[0] >= MIN_ONEDNN_PRODUCT
        and a.device.type == "cpu"
        and (a.is_contiguous() or a.t().is_contiguous())
        and not torch.compiler.is_compiling()
        and prefers_onednn()
        and torch._C._get_mkldnn_enabled()
    )


def linear(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a bᵀ + bias. a: (m, k), b: (n, k), either may be a transposed view; bias: (n,)."""
    if not uses_onednn(a, b):
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(_as_rows(a), b, bias, "none", [], "")


def accumulate_linear(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a bᵀ in the accumulation dtype. `total` may be overwritten."""
    if not uses_onednn(a, b):
        if total is None:
            return F.linear(a, b).to(accumulation_dtype(a.dtype))
        return total.addmm_(a, b.t()) if a.dtype == total.dtype else total.add_(F.linear(a, b))
    # oneDNN takes its first matrix in rows only. Transposing the result may cost less than transposing a.
    (m, k), n = a.shape, b.shape[0]
    if not a.is_contiguous() and m * n + (0 if b.is_contiguous() else n * k) < m * k:
        product = transpose_copy(linear(b, a)[None])[0]
        return product if total is None else total.add_(product)
    if total is None:
        return linear(a, b)
    return torch.ops.mkldnn._linear_pointwise.binary(_as_rows(a), total, b, None, "add")


def accumulate_column_sums(total: Tensor | None, rows: Tensor) -> Tensor:
    """Return total + Σ rows in the accumulation dtype. `total` may be overwritten."""
    sums = rows.sum(0, dtype=accumulation_dtype(rows.dtype))
    return sums if total is None else total.add_(sums)


def transpose_copy(matrices: Tensor) -> Tensor:
    """(g, m, n) → (g, n, m), contiguous.

    torch's channel shuffle is a vectorised transposition, several times faster than the copy of a transposed view.
    """
    g, m, n = matrices.shape
    is_plain = matrices.dtype == torch.float32 and matrices.device.type == "cpu" and matrices.numel() > 0
    if not is_plain or torch.compiler.is_compiling():
        return matrices.mT.contiguous()
    pixels = matrices.contiguous().view(g, 1, 1, m * n).permute(0, 3, 1, 2)  # a matrix is the channels of one pixel
    return torch.native_channel_shuffle(pixels, m).permute(0, 2, 3, 1).reshape(g, n, m)


def _as_rows(a: Tensor) -> Tensor:
    return a if a.is_contiguous() else transpose_copy(a.t()[None])[0]
