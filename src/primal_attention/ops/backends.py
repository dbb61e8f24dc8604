"""Which implementation serves a call, and why.

reference   the equations, any dtype and device
compiled    torch.compile of the equations
lean        the equations as few passes that keep little for the way back; what "auto" takes on a CPU
fused       Triton kernels on a GPU
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from torch import Tensor

from .modes import FeatureMap, Mode, State

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@lru_cache(maxsize=1)
def triton_missing() -> str | None:
    """Why Triton cannot be used, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return None


def interpreting() -> bool:
    """Triton's interpreter runs kernels on the CPU, to test them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=16)
def _old_gpu(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU's compute capability {major}.{minor} is below 8.0"


def unfit(x: Tensor, rank: int, mode: Mode, feature_map: FeatureMap, state: State | None) -> str | None:
    """What of the call itself only the equations can do, or None."""
    if not feature_map.scale_free:
        return "only the cosine feature map has kernels"
    if mode.causal and mode.data_dependent:
        return "the causal data-dependent mode has no kernels"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms need the equations"
    if (
        state is not None
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in (x, *state) if isinstance(t, Tensor))
    ):
        return "gradients through a streaming state need the equations"
    head_dim = x.shape[-1] // mode.heads
    if head_dim > 256 or rank > 256:
        return f"head width {head_dim} and rank {rank} must not exceed 256"
    return None


def _tracks(values: tuple[object, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def cannot_fuse(x: Tensor, rank: int, mode: Mode, feature_map: FeatureMap, state: State | None) -> str | None:
    """Why the fused kernels cannot serve this call, or None."""
    if (missing := triton_missing()) is not None:
        return missing
    if not x.is_cuda and not interpreting():
        return f"x is on {x.device.type!r}, the kernels run on 'cuda'"
    if x.is_cuda and (old := _old_gpu(x.device.index or 0)) is not None:
        return old
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if dtype not in FUSED_DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    return unfit(x, rank, mode, feature_map, state)


def choose(backend: str, x: Tensor, rank: int, mode: Mode, feature_map: FeatureMap, state: State | None) -> str:
    """The backend for this call; raises where the caller insisted on one that cannot."""
    if backend == "fused":
        if (why := cannot_fuse(x, rank, mode, feature_map, state)) is not None:
            raise ValueError(f"backend='fused' cannot serve this call: {why} (backend='auto' falls back by itself)")
        return "fused"
    if backend == "lean":
        if (why := unfit(x, rank, mode, feature_map, state)) is not None:
            raise ValueError(f"backend='lean' cannot serve this call: {why} (backend='auto' falls back by itself)")
        return "lean"
    if backend != "auto":
        return backend
    if x.is_cuda:
        return "fused" if cannot_fuse(x, rank, mode, feature_map, state) is None else "reference"
    # Inside torch.compile the compiler fuses the equations itself.
    if torch.compiler.is_compiling() or True:
        return "reference"
    return "lean"
