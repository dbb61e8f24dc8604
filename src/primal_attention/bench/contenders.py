"""The layers to time: Primal with every backend, SDPA, the authors' Primal, the baselines, flash-linear-attention."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from primal_attention.bench.published import PublishedPrimal
from primal_attention.bench.settings import BenchError, Case, primal_keywords
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.primal import is_interpreting

Kind = Literal["softmax", "primal", "published", "baseline", "fla"]
PRIMAL_BACKENDS = ("fused", "cpu", "compiled", "reference")
# Layers of flash-linear-attention by the names it gives them; all are causal.
FLA_LAYERS = {
    "fla-linear": "LinearAttention",
    "fla-gla": "GatedLinearAttention",
    "fla-retention": "MultiScaleRetention",
    "fla-deltanet": "GatedDeltaNet",
}


class CannotRunError(Exception):
    """A contender that this machine or this case rules out; the message says why."""


@dataclass(frozen=True)
class Contender:
    """A layer by name. `gated`: it claims to be Primal-Attention, and must prove it before it is timed."""

    name: str
    label: str
    kind: Kind
    build: Callable[[Case], nn.Module]
    gated: bool = False


def contenders(*, baselines: bool = False, only: Sequence[str] = ()) -> list[Contender]:
    """All contenders, or the subset named in `only` (a name or a kind: primal, baseline, fla)."""
    everybody = [sdpa(), *(primal(backend) for backend in PRIMAL_BACKENDS), published(), *_baselines(), *_fla()]
    if not only:
        return [c for c in everybody if baselines or c.kind != "baseline"]
    names = {c.name for c in everybody} | {c.kind for c in everybody} | {"fla"}
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BenchError(f"--only {name}: nobody has this name; {hint}known are {', '.join(sorted(names))}")
    chosen = [c for c in everybody if c.name in only or c.kind in only or (baselines and c.kind == "baseline")]
    if not chosen:
        raise BenchError("flash-linear-attention is not installed (package fla): nothing is left to time")
    return chosen


def sdpa() -> Contender:
    return Contender("sdpa", "softmax (SDPA)", "softmax", lambda case: _named("softmax", case))


def primal(backend: str) -> Contender:
    return Contender(f"primal-{backend}", f"Primal ({backend})", "primal", lambda c: build_primal(c, backend), True)


def published() -> Contender:
    return Contender("published", "Primal (as published)", "published", _build_published, True)


def build_primal(case: Case, backend: str) -> PrimalAttention:
    if backend == "fused" and case.device.type == "cpu" and is_interpreting():
        raise CannotRunError("Triton's interpreter is for testing kernels: its times mean nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a large rank is odd, not wrong
        keywords: dict[str, Any] = {**primal_keywords(case), "backend": backend}
        return PrimalAttention(case.embed_dim, case.num_heads, **keywords, device=case.device, dtype=case.dtype)


def plain_reason(message: str) -> str:
    """Why a backend cannot serve a call, without the advice around it."""
    return re.sub(r"^backend='\w+' cannot serve this call: | \(backend='auto' falls back by itself\)$", "", message)


def _build_published(case: Case) -> nn.Module:
    if case.decay is not None:
        raise CannotRunError("the published code has no decay")
    keywords = {k: v for k, v in primal_keywords(case).items() if k != "decay"}
    return PublishedPrimal(case.embed_dim, case.num_heads, **keywords, device=case.device, dtype=case.dtype)


def _named(name: str, case: Case) -> nn.Module:
    """A baseline with its paper's settings. Random features are drawn once: a draw is not part of the layer."""
    traits = attention_traits(name)
    if case.causal and not traits.supports_causal:
        raise CannotRunError(f"{name} has no causal form")
    keywords: dict[str, Any] = {"causal": case.causal, "device": case.device, "dtype": case.dtype}
    if name == "linformer" or (name == "cosformer" and case.causal):
        keywords["max_length"] = case.length
    if traits.stochastic:
        keywords |= {"seed": 0, "redraw_every": None}
    return without_checks(make_attention(name, case.embed_dim, case.num_heads, **keywords))


def without_checks(layer: nn.Module) -> nn.Module:
    """Time the mechanism alone."""
    layer.isolates_non_finite = False  # type: ignore[assignment]
    return layer


def _baselines() -> list[Contender]:
    names = [name for name in attention_names() if name not in ("softmax", "primal")]
    return [Contender(name, name, "baseline", lambda case, name=name: _named(name, case)) for name in names]  # type: ignore[misc]


class FirstOutput(nn.Module):
    """A layer that returns a tuple, as one that returns its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def _fla() -> list[Contender]:
    if importlib.util.find_spec("fla") is None:
        return []
    return [
        Contender(name, f"{layer} (fla)", "fla", lambda case, layer=layer: _build_fla(layer, case))  # type: ignore[misc]
        for name, layer in FLA_LAYERS.items()
    ]


def _build_fla(name: str, case: Case) -> nn.Module:
    if not case.causal:
        raise CannotRunError("flash-linear-attention's layers are causal only (add --causal)")
    if case.device.type != "cuda":
        raise CannotRunError("flash-linear-attention's kernels need a GPU")
    layers = importlib.import_module("fla.layers")
    if not hasattr(layers, name):
        raise CannotRunError(f"this version of flash-linear-attention has no {name}")
    sizes = {"hidden_size": case.embed_dim, "num_heads": case.num_heads}
    if name == "GatedDeltaNet":
        sizes["head_dim"] = case.embed_dim // case.num_heads
    layer = getattr(layers, name)(**sizes)
    return FirstOutput(layer.to(case.device, case.dtype))
