"""The compiled library: loading it, and calling it on tensors."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from .build import BuildError, built

SIZES = (
    "sequences", "tokens", "width", "heads", "rank", "landmarks", "threads", "folded", "mean", "projected_trace",
)  # fmt: skip
TENSORS = (
    "starts", "places",
    "x", "w_qk", "b_qk", "w_e", "w_r", "w_o", "b_o", "w_out", "b_out", "sqrt_lambda",
    "kept", "y", "objective", "score_rows",
    "grad_y", "grad_objective", "grad_scores",
    "grad_x", "grad_w_qk", "grad_b_qk", "grad_w_e", "grad_w_r", "grad_w_o", "grad_b_o", "grad_w_out", "grad_b_out",
    "grad_sqrt_lambda", "scratch",
    "z", "scores", "inverse",
)  # fmt: skip
REALS = {torch.float32: "float", torch.float64: "double"}
_loading = Lock()


class Pass(ctypes.Structure):
    """A pass over the layer as layer.h has it; tensors by their addresses, 0 for what is not there."""

    _fields_ = [*((name, ctypes.c_int64) for name in SIZES), *((name, ctypes.c_void_p) for name in TENSORS)]

    def hold(self, **tensors: Tensor | None) -> None:
        """Enter the addresses; keeping the tensors alive is up to the caller."""
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self, name, tensor.data_ptr())


class Library:
    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path, mode=os.RTLD_NOW)
        self._kept, self._scratch = loaded.primal_kept, loaded.primal_scratch
        self._forward, self._backward = loaded.primal_forward, loaded.primal_backward
        self._kept.restype, self._kept.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self._scratch.restype, self._scratch.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
        for call in (self._forward, self._backward):
            call.restype, call.argtypes = None, [ctypes.c_void_p]

    def kept(self, given: Pass) -> int:
        """How many numbers the pass forward leaves for the way back."""
        return self._kept(ctypes.addressof(given))  # type: ignore[no-any-return]

    def run(self, given: Pass, back: bool) -> None:
        scratch = torch.empty(self._scratch(ctypes.addressof(given), back), dtype=torch.uint8)
        given.scratch = scratch.data_ptr()
        (self._backward if back else self._forward)(ctypes.addressof(given))


def library(dtype: torch.dtype) -> Library | str:
    """That for tensors of this type, or the reason why there is none."""
    if os.environ.get("PRIMAL_NATIVE", "1") == "0":
        return "PRIMAL_NATIVE=0 asks for PyTorch's operations"
    with _loading:
        return _loaded(dtype)


@cache
def _loaded(dtype: torch.dtype) -> Library | str:
    if dtype not in REALS:
        return f"{dtype} is not one of float32, float64"
    try:
        return Library(str(built(REALS[dtype])))
    except (BuildError, OSError, AttributeError) as error:
        return str(error)


def missing(dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no library for this type, or None."""
    found = library(dtype)
    return found if isinstance(found, str) else None
