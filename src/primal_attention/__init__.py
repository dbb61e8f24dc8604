"""Primal-Attention: self-attention as an asymmetric kernel SVD in its primal form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .nn.objective import ksvd_loss
from .nn.primal import PrimalAttention

if TYPE_CHECKING:
    from .convert import load_primalized, primalize
    from .convert.distill import distill
    from .convert.spectrum import spectrum
    from .engine.timeseries.estimator import PrimalClassifier
    from .ksvd import KernelSVD
    from .nn.rivals import attention_names, make_attention
    from .official import load_official
    from .parallel import context_parallel

__version__ = "0.1.0"

# Names that need an extra, or that few people need at once, are loaded when somebody asks for them.
_LAZY = {
    "KernelSVD": ("primal_attention.ksvd", "ksvd"),
    "PrimalClassifier": ("primal_attention.engine.timeseries.estimator", "timeseries"),
    "distill": ("primal_attention.convert.distill", "ksvd"),
    "context_parallel": ("primal_attention.parallel", "train"),
    "attention_names": ("primal_attention.nn.rivals", "dev"),
    "load_official": ("primal_attention.official", "dev"),
    "load_primalized": ("primal_attention.convert", "hf"),
    "make_attention": ("primal_attention.nn.rivals", "dev"),
    "primalize": ("primal_attention.convert", "hf"),
    "spectrum": ("primal_attention.convert.spectrum", "ksvd"),
}

__all__ = [
    "KernelSVD",
    "PrimalAttention",
    "PrimalClassifier",
    "__version__",
    "attention_names",
    "context_parallel",
    "distill",
    "ksvd_loss",
    "load_official",
    "load_primalized",
    "make_attention",
    "primalize",
    "spectrum",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'primal_attention' has no attribute {name!r}")
    import importlib

    module, extra = _LAZY[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        raise ImportError(f"{name} needs {missing.name!r}: pip install 'primal-attention[{extra}]'") from missing


def __dir__() -> list[str]:
    return sorted(__all__)
