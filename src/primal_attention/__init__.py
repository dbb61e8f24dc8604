"""Primal-Attention: self-attention as an asymmetric kernel SVD in its primal form."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes longer to import than this file
if TYPE_CHECKING:
    from typing import Any

    from primal_attention.convert import load_primalized, primalize
    from primal_attention.convert.distill import distill
    from primal_attention.convert.spectrum import spectrum
    from primal_attention.ksvd import KernelSVD
    from primal_attention.nn.baselines import attention_names, make_attention
    from primal_attention.nn.objective import ksvd_loss, record_objective
    from primal_attention.nn.primal import PrimalAttention
    from primal_attention.official import load_official
    from primal_attention.parallel import context_parallel
    from primal_attention.train.estimator import PrimalClassifier
    from primal_attention.utils.pretrained import pretrained_names, pretrained_path

__version__ = "0.2.0"

# Loaded on first use: the command starts without torch, and some names need an extra.
_LAZY = {
    "KernelSVD": "primal_attention.ksvd",
    "PrimalAttention": "primal_attention.nn.primal",
    "PrimalClassifier": "primal_attention.train.estimator",
    "attention_names": "primal_attention.nn.baselines",
    "context_parallel": "primal_attention.parallel",
    "distill": "primal_attention.convert.distill",
    "ksvd_loss": "primal_attention.nn.objective",
    "load_official": "primal_attention.official",
    "load_primalized": "primal_attention.convert",
    "make_attention": "primal_attention.nn.baselines",
    "pretrained_names": "primal_attention.utils.pretrained",
    "pretrained_path": "primal_attention.utils.pretrained",
    "primalize": "primal_attention.convert",
    "record_objective": "primal_attention.nn.objective",
    "spectrum": "primal_attention.convert.spectrum",
}
_SUBPACKAGES = ("nn", "ops")

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
    "pretrained_names",
    "pretrained_path",
    "primalize",
    "record_objective",
    "spectrum",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBPACKAGES:
        return importlib.import_module(f"primal_attention.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'primal_attention' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as missing:
        from primal_attention.utils.errors import install_hint

        raise ImportError(f"{name} needs {missing.name!r}: {install_hint(missing.name)}") from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
