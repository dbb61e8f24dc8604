"""Every attention that the paper compares with, under one contract: `make_attention(name, embed_dim, num_heads, …)`.

The contract: y = attn(x, key_padding_mask=None), x and y (B, N, embed_dim), mask (B, N) bool with True at padding,
which may stand anywhere; outputs at padding are zero, and what stands there never matters.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torch import nn

from .base import RivalAttention
from .cosformer import CosformerAttention
from .flow import FlowAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .longformer import LongformerAttention
from .nystrom import NystromAttention
from .performer import PerformerAttention
from .reformer import ReformerAttention
from .soft import SoftAttention
from .softmax import SoftmaxAttention
from .yoso import YosoAttention

__all__ = ["AttentionTraits", "attention_names", "attention_traits", "make_attention"]

_RIVALS: dict[str, type[RivalAttention]] = {
    rival.name: rival
    for rival in (
        SoftmaxAttention,
        LinearAttention,
        PerformerAttention,
        ReformerAttention,
        LongformerAttention,
        LinformerAttention,
        NystromAttention,
        YosoAttention,
        CosformerAttention,
        SoftAttention,
        FlowAttention,
    )
}


@dataclass(frozen=True)
class AttentionTraits:
    """What an attention can do, for code that iterates over all of them; see `RivalAttention` for each."""

    complexity: str
    linear_memory: bool
    supports_causal: bool
    streams: bool
    stochastic: bool
    exact_gradient: bool


_PRIMAL = AttentionTraits("O(N)", True, True, True, stochastic=False, exact_gradient=True)


def attention_names() -> tuple[str, ...]:
    """All names that `make_attention` knows, softmax and primal first."""
    return ("softmax", "primal", *(name for name in _RIVALS if name != "softmax"))


def attention_traits(name: str) -> AttentionTraits:
    """What the attention of this name can do, without building it."""
    _check_name(name)
    if name == "primal":
        return _PRIMAL
    rival = _RIVALS[name]
    return AttentionTraits(
        rival.complexity,
        rival.linear_memory,
        rival.supports_causal,
        rival.streams,
        rival.stochastic,
        rival.exact_gradient,
    )


def make_attention(name: str, embed_dim: int, num_heads: int, **settings: Any) -> nn.Module:
    """Attention by name. `settings` go to its class: causal, bias, dropout, device, dtype, and what is its own."""
    _check_name(name)
    if name == "primal":
        from ..primal import PrimalAttention

        return PrimalAttention(embed_dim, num_heads, **settings)
    return _RIVALS[name](embed_dim, num_heads, **settings)


def _check_name(name: str) -> None:
    if name == "primal" or name in _RIVALS:
        return
    near = difflib.get_close_matches(name, attention_names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown attention {name!r}: {hint}known are {', '.join(attention_names())}")
