"""The attentions that the paper compares with, under one contract: `make_attention(name, embed_dim, num_heads, …)`.

The contract: y = attn(x, key_padding_mask=None), x and y (B, N, embed_dim), mask (B, N) bool with True at padding,
which may be anywhere. Outputs at padding are zero and do not depend on its values.
"""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from ..primal import PrimalAttention
from .base import AttentionTraits
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

_CLASSES: dict[str, type[nn.Module]] = {
    "softmax": SoftmaxAttention,
    "primal": PrimalAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "reformer": ReformerAttention,
    "longformer": LongformerAttention,
    "linformer": LinformerAttention,
    "nystrom": NystromAttention,
    "yoso": YosoAttention,
    "cosformer": CosformerAttention,
    "soft": SoftAttention,
    "flow": FlowAttention,
}
_PRIMAL = AttentionTraits(supports_causal=True, streams=True)


def attention_names() -> tuple[str, ...]:
    """Return all names of `make_attention`, softmax and primal first."""
    return tuple(_CLASSES)


def attention_traits(name: str) -> AttentionTraits:
    """Return the properties of the attention of this name, without building it.

    Args:
        name: one of `attention_names()`.
    """
    _check_name(name)
    return getattr(_CLASSES[name], "traits", _PRIMAL)


def make_attention(name: str, embed_dim: int, num_heads: int, **settings: Any) -> nn.Module:
    """Build an attention by name.

    Args:
        name: one of `attention_names()`.
        embed_dim: width of the tokens.
        num_heads: number of heads.
        settings: arguments of the class: causal, bias, dropout, device, dtype, and those that the class adds.

    Returns:
        The layer. Every layer takes (x, key_padding_mask) and returns y of the shape of x.

    Examples:
        >>> import torch
        >>> from primal_attention import attention_names, make_attention
        >>> attention_names()[:4]
        ('softmax', 'primal', 'linear', 'performer')
        >>> make_attention("performer", 64, 4, features=32)(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """
    _check_name(name)
    return _CLASSES[name](embed_dim, num_heads, **settings)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of an attention must be a text (got {name!r})")
    if name in _CLASSES:
        return
    near = difflib.get_close_matches(name, attention_names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown attention {name!r}: {hint}known are {', '.join(attention_names())}")
