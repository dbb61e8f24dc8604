"""The compiled library: loading it, and calling it on tensors."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from .build import BuildError, built

TENSORS = (
    "starts", "places",
    "x", "w_qk", "b_qk", "w_e", "w_r", "w_o", "b_o", "w_out", "b_out", "sqrt_lambda",
    "kept", "y", "objective", "score_rows",
    "grad_y", "grad_objective", "grad_scores",
    "grad_x", "grad_w_qk", "grad_b_qk", "grad_w_e", "grad_w_r", "grad_w_o", "grad_b_o", "grad_w_out", "grad_b_out",
    "grad_sqrt_lambda", "scratch",
    "z", "scores", "inverse",  # where C notes what it finds in `kept`
)  # fmt: skip
REALS = {torch.float32: "float", torch.float64: "double"}
_loading = Lock()


class Sizes(NamedTuple):
    """The numbers that a pass begins with; `Pass` in layer.h has them in this order, then the tensors' addresses."""

    sequences: int
    tokens: int
    width: int
    heads: int
    rank: int
    landmarks: int
    threads: int
    folded: bool
    mean: bool
    projected_trace: bool


_PLACES = {name: place for place, name in enumerate(TENSORS, len(Sizes._fields))}
_Record = ctypes.c_int64 * (len(Sizes._fields) + len(TENSORS))


class Library:
    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path, mode=os.RTLD_NOW)
        self._kept, self._scratch = loaded.primal_kept, loaded.primal_scratch
        self._passes = loaded.primal_forward, loaded.primal_backward
        self._kept.restype, self._kept.argtypes = ctypes.c_int64, [_Record]
        self._scratch.restype, self._scratch.argtypes = ctypes.c_int64, [_Record, ctypes.c_int64]
        for call in self._passes:
            call.restype, call.argtypes = None, [_Record]
        self.kept = lru_cache(maxsize=256)(self._count_kept)

    def _count_kept(self, sizes: Sizes) -> int:
        """How many numbers the pass forward leaves for the way back."""
        return self._kept(_Record(*sizes))  # type: ignore[no-any-return]

    def run(self, sizes: Sizes, back: bool, **tensors: Tensor | None) -> None:
        """A pass over tensors by the names that layer.h gives them; None and what is not named is not there."""
        record = [*sizes, *[0] * len(TENSORS)]
        for name, tensor in tensors.items():
            if tensor is not None:
                record[_PLACES[name]] = tensor.data_ptr()
        given = _Record(*record)
        scratch = torch.empty(self._scratch(given, back), dtype=torch.uint8)
        given[_PLACES["scratch"]] = scratch.data_ptr()
        self._passes[back](given)


_found: dict[torch.dtype, Library | str] = {}


def library(dtype: torch.dtype) -> Library | str:
    """That for tensors of this type, or the reason why there is none; found out once."""
    if dtype not in _found:
        with _loading:
            if dtype not in _found:
                _found[dtype] = _load(dtype)
    return _found[dtype]


def _load(dtype: torch.dtype) -> Library | str:
    if os.environ.get("PRIMAL_NATIVE", "1") == "0":
        return "PRIMAL_NATIVE=0 asks for PyTorch's operations"
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
