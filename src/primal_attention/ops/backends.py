"""Which implementation serves a call, and why.

reference   the equations, any dtype and device
compiled    torch.compile of the equations
lean        the equations as few passes that keep little for the way back; what "auto" takes on a CPU for all but
            small input. Its gradients cannot be differentiated again: ask for "reference" where a loss holds a gradient
fused       Triton kernels on a GPU
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .modes import FeatureMap, Mode, State

SMALL = 2**17  # numbers in x below which on a CPU the number of calls counts, not what they compute

WIDEST = 256  # heads and ranks that the kernels take
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


TRITON_MISSING = None if find_spec("triton") else "Triton is not installed"


def triton_missing() -> str | None:
    """Why Triton cannot be used, or None."""
    return TRITON_MISSING


def interpreting() -> bool:
    """Triton's interpreter runs kernels on the CPU, to test them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_capability = cache(torch.cuda.get_device_capability)  # asked at every call, and torch takes its time to answer


def _old_gpu(index: int) -> str | None:
    # Compiled code asks once anyway, and says so of caches that it looks through.
    asked = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _capability
    major, minor = asked(index)
    return None if major >= 8 else f"the GPU's compute capability {major}.{minor} is below 8.0"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors' own, where a model sits on another one.

    On the way back autograd sees to that, and compiled code does so by itself.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def unfit(feature_map: FeatureMap) -> str | None:
    """What of the call itself only the equations can do, or None."""
    if not feature_map.scale_free:
        return "only the cosine feature map has a fast path"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func transforms and forward derivatives need the equations"
    return None


def cannot_lean(mode: Mode, feature_map: FeatureMap) -> str | None:
    """Why the lean path cannot serve this call, or None."""
    if mode.causal and mode.data_dependent:
        return "the causal data-dependent mode has no lean path"
    return unfit(feature_map)


def cannot_fuse(
    x: Tensor, rank: int, mode: Mode, feature_map: FeatureMap, state: State | None, need_state: bool = False
) -> str | None:
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
    streams = state is not None or need_state
    if streams and torch.is_grad_enabled():
        return "gradients through a streaming state need the equations (torch.no_grad() has none)"
    growing, head_dim = mode.causal and mode.data_dependent, x.shape[-1] // mode.heads
    if growing and streams:
        return "the causal data-dependent mode streams through the equations"
    if max(head_dim, rank) > WIDEST:
        return f"head width {head_dim} and rank {rank} must not exceed {WIDEST}"
    return unfit(feature_map)


def choose(
    backend: str,
    x: Tensor,
    rank: int,
    mode: Mode,
    feature_map: FeatureMap,
    state: State | None,
    need_state: bool = False,
) -> str:
    """The backend for this call; raises where the caller insisted on one that cannot."""
    if backend == "fused":
        if (why := cannot_fuse(x, rank, mode, feature_map, state, need_state)) is not None:
            raise ValueError(f"backend='fused' cannot serve this call: {why} (backend='auto' falls back by itself)")
        return "fused"
    if backend == "lean":
        if (why := cannot_lean(mode, feature_map)) is not None:
            raise ValueError(f"backend='lean' cannot serve this call: {why} (backend='auto' falls back by itself)")
        return "lean"
    if backend != "auto":
        return backend
    if x.is_cuda:
        return "fused" if cannot_fuse(x, rank, mode, feature_map, state, need_state) is None else "reference"
    # torch.compile fuses the equations by itself, and tracers record them better than one opaque node.
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing() or x.numel() < SMALL:
        return "reference"
    return "lean" if cannot_lean(mode, feature_map) is None else "reference"
