"""The matrix products of the lean path, and who computes them.

PyTorch's own float32 products on x86 are MKL's, which on processors of other makers than Intel is slower than oneDNN,
shipped in the same PyTorch (python benchmarks/cpu_attention.py shows both). So oneDNN gets the large products there.
Whose processor it is decides, not a measurement: a choice that differs between two runs would take the last bits of the
results with it. Everywhere else (Intel's processors, Arm, GPUs, other types, a PyTorch without the operator,
torch.backends.mkldnn switched off) they are torch's own.

Both engines obey torch.set_float32_matmul_precision; its default is full float32 in both.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..reference import wide

LARGE = 2**22  # multiplications from which oneDNN's set-up, some 10 µs, is repaid
WIDE = 128  # rows and columns of a result from which it is the quicker one


@lru_cache(maxsize=1)
def _onednn_is_quicker() -> bool:
    """An x86 processor that is not Intel's, under a PyTorch with MKL and with the operator that calls oneDNN."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and _maker() in ("AuthenticAMD", "HygonGenuine")


def _maker() -> str:
    """The processor's vendor string, empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in platform.processor()), "")
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def _for_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype == torch.float32
        and min(a.shape[0], b.shape[0]) >= WIDE
        and a.shape[0] * a.shape[1] * b.shape[0] >= LARGE
        and a.device.type == "cpu"
        and (a.is_contiguous() or a.t().is_contiguous())
        and not torch.compiler.is_compiling()
        and _onednn_is_quicker()
        and torch._C._get_mkldnn_enabled()
    )


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a bᵀ + bias. a: (m, k), b: (n, k), both maybe transposed views, bias: (n,)."""
    if not _for_onednn(a, b):
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(_in_rows(a), b, bias, "none", [], "")


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a bᵀ, the total wide and not to be used any more; only the product is rounded to the type of a and b."""
    if not _for_onednn(a, b):
        if total is None:
            return F.linear(a, b).to(wide(a.dtype))
        return total.addmm_(a, b.t()) if a.dtype == total.dtype else total.add_(F.linear(a, b))
    # oneDNN's operator wants its first matrix in rows and the second as it may be: turning the result can be less work.
    (m, k), n = a.shape, b.shape[0]
    if not a.is_contiguous() and m * n + (0 if b.is_contiguous() else n * k) < m * k:
        found = turned(product(b, a)[None])[0]
        return found if total is None else total.add_(found)
    if total is None:
        return product(a, b)
    return torch.ops.mkldnn._linear_pointwise.binary(_in_rows(a), total, b, None, "add")


def _in_rows(a: Tensor) -> Tensor:
    return a if a.is_contiguous() else turned(a.t()[None])[0]


def turned(matrices: Tensor) -> Tensor:
    """(g, m, n) → (g, n, m), copied.

    A shuffle of channels in groups is a transposition, and torch's is vectorised: several times as fast as its copy of
    a transposed view, which goes number by number.
    """
    g, m, n = matrices.shape
    plain = matrices.dtype == torch.float32 and matrices.device.type == "cpu" and matrices.numel() > 0
    if not plain or torch.compiler.is_compiling():
        return matrices.mT.contiguous()
    pixels = matrices.contiguous().view(g, 1, 1, m * n).permute(0, 3, 1, 2)  # the channels of one pixel are a matrix
    return torch.native_channel_shuffle(pixels, m).permute(0, 2, 3, 1).reshape(g, n, m)
