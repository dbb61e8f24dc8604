"""What stands before the encoder of a series classifier: channels (B, N, C) to tokens (B, N, d).

    LinearStem    a linear map scaled by √d, plus learned positions: the paper's
    ConvStem      convolutions over time with batch normalisation, on the series and, if asked, on its differences

Padding reads as zeros and moves no statistic.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.nn.blocks import convolve

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context


class LinearStem(nn.Module):
    """Channels to width by a linear map scaled by √d, plus learned positions."""

    context: Context | None = None

    def __init__(self, channels: int, embed_dim: int, max_length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, embed_dim)
        self.positions = nn.Parameter(torch.empty(max_length, embed_dim).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, C) → (B, N, d)
        if x.shape[1] > len(self.positions):
            raise ValueError(f"the series have {x.shape[1]} steps and the model was built for {len(self.positions)}")
        x = self.proj(x) * math.sqrt(self.proj.out_features)
        return self.dropout(x + own_part(self.positions, x, self.context))


def own_part(per_position: Tensor, x: Tensor, context: Context | None) -> Tensor:
    """The rows of a (max_length, …) tensor that belong to the tokens of x (B, N, …)."""
    if context is None:
        return per_position[: x.shape[1]]
    place = context.locate(x)
    place.check_length(len(per_position), x.shape[1])
    return per_position[place.offset + torch.arange(x.shape[1], device=x.device)]


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, N, d) over the valid tokens only, so that padding changes no statistic.

    context: ranks whose tokens count too, those of other sequences included.
    """

    context: Context | None = None

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return self._scale(x, self.running_mean, self.running_var)
        # Statistics in float32 even under autocast: sums over a whole batch overflow half precision.
        full = x if x.dtype == torch.float64 else x.float()
        if self.context is not None:
            count, mean, var = self._shared_statistics(full, key_padding_mask, self.context)
        elif key_padding_mask is None:
            count = torch.tensor(float(x.shape[0] * x.shape[1]), device=x.device, dtype=full.dtype)
            mean = full.mean(dim=(0, 1))
            var = full.var(dim=(0, 1), unbiased=False)
        else:
            valid = ~key_padding_mask.unsqueeze(-1)
            count = valid.sum().clamp(min=1).to(full.dtype)
            mean = torch.where(valid, full, 0.0).sum(dim=(0, 1)) / count
            var = torch.where(valid, full - mean, 0.0).square().sum(dim=(0, 1)) / count
        with torch.no_grad():
            keep = 1.0 - (self.momentum or 0.1)
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_mean.mul_(keep).add_(mean, alpha=1 - keep)
            self.running_var.mul_(keep).add_(unbiased, alpha=1 - keep)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return self._scale(x, mean, var)

    @staticmethod
    def _shared_statistics(x: Tensor, mask: Tensor | None, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        valid = torch.ones_like(x[..., :1], dtype=torch.bool) if mask is None else ~mask.unsqueeze(-1)
        count = context.sum(valid.sum().to(x.dtype)).clamp(min=1)
        mean = context.sum(torch.where(valid, x, 0.0).sum(dim=(0, 1))) / count
        var = context.sum(torch.where(valid, x - mean, 0.0).square().sum(dim=(0, 1))) / count
        return count, mean, var

    def _scale(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = torch.rsqrt(var + self.eps) * self.weight
        return (x - mean) * scale + self.bias


class Differences(nn.Module):
    """Steps from one value to the next, standardised, as further channels: (B, N, C) → (B, N, 2 C).

    An offset of a channel, such as a person's size or a sensor's rest, vanishes in them. They are zero where there is
    no valid step before.
    """

    context: Context | None = None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = MaskedBatchNorm(channels)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        valid = torch.ones_like(x[..., :1]) if key_padding_mask is None else (~key_padding_mask).unsqueeze(-1).to(x)
        marked = torch.cat([x, valid], dim=-1)  # the mark travels with the value, to a neighbour's shard too
        seen = F.pad(marked, (0, 0, 1, 0)) if self.context is None else self.context.halo(marked, 1, 0)
        steps = (x - seen[:, :-1, :-1]) * (valid * seen[:, :-1, -1:])
        return torch.cat([x, self.norm(steps, key_padding_mask)], dim=-1)


class ConvStem(nn.Module):
    """Two convolutions over time, each with batch normalisation and GELU; padding reads as zeros."""

    context: Context | None = None

    def __init__(
        self, channels: int, embed_dim: int, kernel_size: int = 7, dropout: float = 0.0, *, differences: bool = False
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"stem_kernel must be a positive odd number (stem_kernel={kernel_size})")
        self.differences = Differences(channels) if differences else None
        widths = (2 * channels if differences else channels, embed_dim, embed_dim)
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, kernel_size, padding=kernel_size // 2, bias=False) for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(MaskedBatchNorm(embed_dim) for _ in self.convs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, C) → (B, N, d)
        if self.differences is not None:
            x = self.differences(x, key_padding_mask)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if key_padding_mask is not None:
                x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
            x = convolve(conv, x, self.context)  # type: ignore[arg-type]
            x = F.gelu(norm(x, key_padding_mask))
        return self.dropout(x)
