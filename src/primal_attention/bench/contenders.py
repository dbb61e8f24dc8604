"""The layers to time: Primal and SDPA with every backend, the authors' Primal, the baselines, optional packages."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.bench import memory
from primal_attention.bench.published import PublishedPrimal
from primal_attention.bench.settings import BenchError, Case, primal_keywords
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.baselines.softmax import SoftmaxAttention
from primal_attention.nn.padding import Tokens
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.primal import is_interpreting
from primal_attention.utils.provenance import installed

Kind = Literal["softmax", "primal", "published", "baseline", "fla"]
PRIMAL_BACKENDS = ("fused", "cpu", "compiled", "reference")
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
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
    softmax = [sdpa(), *(sdpa(backend) for backend in SDPA_BACKENDS), *_flash_attention_4()]
    everybody = [*softmax, *(primal(backend) for backend in PRIMAL_BACKENDS), published(), *_baselines(), *_fla()]
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


def sdpa(backend: str | None = None) -> Contender:
    """Softmax attention by torch, with the backend that torch chooses or with the one of this name."""
    if backend is None:
        return Contender("sdpa", "softmax (SDPA)", "softmax", lambda case: _named("softmax", case))
    return Contender(f"sdpa-{backend}", f"softmax (SDPA, {backend})", "softmax", lambda c: _build_sdpa(c, backend))


class ForcedBackend(nn.Module):
    """A layer whose SDPA calls use one backend."""

    def __init__(self, layer: nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.layer, self.backend = layer, backend

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return self.layer(x)  # type: ignore[no-any-return]


def _build_sdpa(case: Case, backend: str) -> nn.Module:
    layer = ForcedBackend(_named("softmax", case), SDPA_BACKENDS[backend])
    x = torch.zeros(1, 16, case.embed_dim, device=case.device, dtype=case.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons against each backend
            layer(x)
    except RuntimeError as error:
        if memory.is_out_of_memory(error):
            raise
        raise CannotRunError(f"torch has no {backend} kernel for this device, precision and head width") from None
    return layer


class FlashAttention4(SoftmaxAttention):
    """Softmax attention by the package flash-attn-4."""

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
        q, k, v = (t.transpose(1, 2) for t in self.project_in(x))  # (B, N, H, p)
        y = function(q, k, v, causal=self.causal)
        # Some versions return the log-sum-exp too.
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)  # type: ignore[no-any-return]


def _flash_attention_4() -> list[Contender]:
    if installed("flash-attn-4") is None:
        return []

    def build(case: Case) -> nn.Module:
        keywords: dict[str, Any] = {"causal": case.causal, "device": case.device, "dtype": case.dtype}
        return without_checks(FlashAttention4(case.embed_dim, case.num_heads, **keywords))

    return [Contender("flash-attn-4", "softmax (flash-attn-4)", "softmax", build)]


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
