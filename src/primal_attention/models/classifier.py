"""Transformers that classify multivariate series, with any attention in any layer.

    paper_classifier    Linear·√d + learned positions → post-LN blocks → LN → GELU → padding zeroed → flatten → Linear
    modern_classifier   convolutional stem → pre-LN blocks with local mixing → masked mean and max → Linear

The first is the network of the paper's UEA experiments. The second has no parameter that depends on the length, so a
longer series at test time is no problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.models.stems import ConvStem, LinearStem, own_part
from primal_attention.models.stems import MaskedBatchNorm as MaskedBatchNorm
from primal_attention.nn.blocks import Encoder, masked_max, masked_mean

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context


class FlattenHead(nn.Module):
    """GELU, zeros on the padding, all tokens side by side, one linear map."""

    context: Context | None = None

    def __init__(self, embed_dim: int, max_length: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.max_length = max_length
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(embed_dim * max_length, classes)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, classes)
        x = self.dropout(F.gelu(x))
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        if self.context is not None:
            weight = own_part(self.proj.weight.unflatten(1, (self.max_length, -1)).transpose(0, 1), x, self.context)
            return self.context.sum(torch.einsum("bnd,ncd->bc", x, weight)) + self.proj.bias
        x = F.pad(x, (0, 0, 0, self.max_length - x.shape[1]))
        return self.proj(x.flatten(1))


class PoolingHead(nn.Module):
    """Mean and maximum over the valid tokens side by side, one linear map."""

    context: Context | None = None

    def __init__(self, embed_dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(2 * embed_dim, classes)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, classes)
        pools = [pool(x, key_padding_mask, self.context) for pool in (masked_mean, masked_max)]
        pooled = torch.cat(pools, dim=-1)
        return self.proj(self.dropout(pooled))


class TimeSeriesClassifier(nn.Module):
    """Stem, encoder and head: series (B, N, channels) and a padding mask (B, N) to logits (B, classes).

    attend_to_padding: the published research code gives its UEA attention no mask. Off here; on only to reproduce it.
    """

    def __init__(self, stem: nn.Module, encoder: Encoder, head: nn.Module, *, attend_to_padding: bool = False) -> None:
        super().__init__()
        self.stem = stem
        self.encoder = encoder
        self.head = head
        self.attend_to_padding = attend_to_padding

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is not None and not self.attend_to_padding:
            # Whatever stands in the padding, NaN included, must not reach a sum that zeros would not undo.
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        seen = None if self.attend_to_padding else key_padding_mask
        x = self.encoder(self.stem(x, seen), seen)
        return self.head(x, key_padding_mask)


def paper_classifier(
    channels: int,
    classes: int,
    max_length: int,
    *,
    attention: str | Sequence[str] = "primal",
    embed_dim: int = 512,
    num_heads: int = 8,
    layers: int = 2,
    ffn_dim: int = 2048,
    dropout: float = 0.1,
    attention_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    attend_to_padding: bool = False,
) -> TimeSeriesClassifier:
    """The network of the paper's UEA experiments. attention "primal" is its PrimalFormer, "primal+" its Primal.+."""
    encoder = Encoder(
        embed_dim,
        num_heads,
        layers,
        attention,
        ffn_dim=ffn_dim,
        dropout=dropout,
        norm_first=False,
        attention_kwargs=attention_kwargs,
    )
    stem = LinearStem(channels, embed_dim, max_length, dropout)
    head = FlattenHead(embed_dim, max_length, classes, dropout)
    return TimeSeriesClassifier(stem, encoder, head, attend_to_padding=attend_to_padding)


def modern_classifier(
    channels: int,
    classes: int,
    *,
    attention: str | Sequence[str] = "primal",
    embed_dim: int = 128,
    num_heads: int = 8,
    layers: int = 3,
    ffn_dim: int | None = None,
    dropout: float = 0.2,
    stem_kernel: int = 7,
    differences: bool = False,
    local_kernel: int | None = 7,
    attention_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> TimeSeriesClassifier:
    """A network of this library: the same attention with a stem, local mixing and pooling that series profit from."""
    encoder = Encoder(
        embed_dim,
        num_heads,
        layers,
        attention,
        ffn_dim=ffn_dim,
        dropout=dropout,
        norm_first=True,
        local_kernel=local_kernel,
        attention_kwargs=attention_kwargs,
    )
    stem = ConvStem(channels, embed_dim, stem_kernel, dropout, differences=differences)
    return TimeSeriesClassifier(stem, encoder, PoolingHead(embed_dim, classes, dropout))
