"""Transformer encoder blocks that take any attention by name, layer by layer.

    post-LN (the original Transformer):  x = LN(x + A(x));  x = LN(x + F(x))
    pre-LN:                              x = x + A(LN x);   x = x + F(LN x)

F is a GELU network of two linear maps. A is `make_attention(name, …)`, with an optional depthwise convolution beside it
that mixes neighbours while attention mixes the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from primal_attention.nn.dropout import Dropout
from primal_attention.nn.rivals import make_attention

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context


def attention_names(attention: str | Sequence[str], layers: int) -> tuple[str, ...]:
    """One attention name per layer.

    A single name fills all layers: "primal" is the PrimalFormer. A name with a plus stands in the last layer only, with
    softmax attention before it: "primal+" is the paper's Primal.+. A sequence is taken as it is.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1 (layers={layers})")
    if isinstance(attention, str):
        if attention.endswith("+"):
            return ("softmax",) * (layers - 1) + (attention[:-1],)
        return (attention,) * layers
    names = tuple(attention)
    if len(names) == 1:
        return attention_names(names[0], layers)
    if len(names) != layers:
        raise ValueError(f"attention must name one kind or one per layer (got {len(names)} names for layers={layers})")
    return names


def convolve(conv: nn.Conv1d, x: Tensor, context: Context | None = None) -> Tensor:
    """A convolution over time that keeps the length, (B, N, C) → (B, N, d).

    On a shard the neighbours' tokens stand where at the ends of a sequence zeros do.
    """
    if context is None:
        return conv(x.transpose(1, 2)).transpose(1, 2)
    reach = conv.kernel_size[0] // 2
    seen = context.halo(x, reach, reach).transpose(1, 2)
    return F.conv1d(seen, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2)


class LocalMixing(nn.Module):
    """Depthwise convolution over time: each channel mixes with its neighbours; padding reads as zeros."""

    context: Context | None = None

    def __init__(self, embed_dim: int, kernel_size: int) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"the convolution's kernel must be a positive odd number (kernel_size={kernel_size})")
        self.conv = nn.Conv1d(embed_dim, embed_dim, kernel_size, padding=kernel_size // 2, groups=embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        return convolve(self.conv, x, self.context)


class FeedForward(nn.Sequential):
    """Linear, GELU, Linear, with dropout after each."""

    def __init__(self, embed_dim: int, hidden_dim: int, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(embed_dim, hidden_dim),
            nn.GELU(),
            Dropout(dropout),
            nn.Linear(hidden_dim, embed_dim),
            Dropout(dropout),
        )


class EncoderBlock(nn.Module):
    """One Transformer block. `attention` is a name for `make_attention` or a module with the same call."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: str | nn.Module = "primal",
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        local_kernel: int | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.attention: nn.Module = (
            make_attention(attention, embed_dim, num_heads, **(attention_kwargs or {}))
            if isinstance(attention, str)
            else attention
        )
        self.local = LocalMixing(embed_dim, local_kernel) if local_kernel else None
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.feed_forward = FeedForward(embed_dim, ffn_dim or 4 * embed_dim, dropout)
        self.dropout = Dropout(dropout)
        self.norm_first = norm_first

    def mix(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """What the tokens learn from each other: attention, plus the local convolution where there is one."""
        mixed = self.attention(x, key_padding_mask=key_padding_mask)
        if self.local is not None:
            mixed = mixed + self.local(x, key_padding_mask)
        return self.dropout(mixed)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, N, d)
        if self.norm_first:
            x = x + self.mix(self.norm1(x), key_padding_mask)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.mix(x, key_padding_mask))
        return self.norm2(x + self.feed_forward(x))


class Encoder(nn.Module):
    """A stack of blocks and a final LayerNorm.

    attention: a name, a name with a plus (last layer only), or one name per layer; see `attention_names`.
    attention_kwargs: keywords by attention name, for example `{"primal": {"rank": 30, "landmarks": 150}}`.
    block: the class of the blocks, for a model that mixes its tokens in another way.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layers: int,
        attention: str | Sequence[str] = "primal",
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        local_kernel: int | None = None,
        attention_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        block: type[EncoderBlock] = EncoderBlock,
    ) -> None:
        super().__init__()
        self.attention_names = attention_names(attention, layers)
        keywords = attention_kwargs or {}
        self.blocks = nn.ModuleList(
            block(
                embed_dim,
                num_heads,
                name,
                ffn_dim=ffn_dim,
                dropout=dropout,
                norm_first=norm_first,
                local_kernel=local_kernel,
                attention_kwargs=keywords.get(name),
            )
            for name in self.attention_names
        )
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, N, d)
        for block in self.blocks:
            x = block(x, key_padding_mask)
        return self.norm(x)


def masked_mean(x: Tensor, key_padding_mask: Tensor | None = None, context: Context | None = None) -> Tensor:
    """Mean over the valid tokens, (B, N, d) → (B, d); zero where a row has none."""
    if key_padding_mask is None:
        return x.mean(dim=1) if context is None else context.sum(x.sum(dim=1)) / context.at(x).total
    valid = ~key_padding_mask.unsqueeze(-1)
    total, count = torch.where(valid, x, 0.0).sum(dim=1), valid.sum(dim=1)
    if context is not None:
        total, count = context.sum(total), context.at(x, ~key_padding_mask).total[:, None]
    return total / count.clamp(min=1)


def masked_max(x: Tensor, key_padding_mask: Tensor | None = None, context: Context | None = None) -> Tensor:
    """Maximum over the valid tokens, (B, N, d) → (B, d); zero where a row has none."""
    if key_padding_mask is not None:
        x = x.masked_fill(key_padding_mask.unsqueeze(-1), -torch.inf)
    best = x.amax(dim=1) if context is None else context.maximum(x)
    return best if key_padding_mask is None else torch.where(torch.isneginf(best), 0.0, best)
