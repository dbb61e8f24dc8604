"""Transformers that classify multivariate series, with any attention in any layer.

    paper_classifier    Linear·√d + learned positions → post-LN blocks → LN → GELU → padding zeroed → flatten → Linear
    modern_classifier   convolutional stem → pre-LN blocks with local mixing → masked mean and max → Linear

The first is the network of the paper's UEA experiments. The second has no parameter that depends on the length, so it
accepts longer series at test time. Padding is read as zeros and enters no statistic.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from primal_attention.nn.blocks import Encoder, convolve
from primal_attention.nn.objective import primal_layers

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context

NOISE = 0.1  # variance of the noise in `ScorePosterior`, as a part of the mean energy of the scores


class LinearStem(nn.Module):
    """Channels to width by a linear map scaled by √d, plus learned positions."""

    context: Context | None = None
    stride = 1

    def __init__(self, channels: int, embed_dim: int, max_length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, embed_dim)
        self.positions = nn.Parameter(torch.empty(max_length, embed_dim).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, C) → (B, N, d)
        x = self.proj(x) * math.sqrt(self.proj.out_features)
        return self.dropout(x + local_rows(self.positions, x, self.context))


def local_rows(per_position: Tensor, x: Tensor, context: Context | None) -> Tensor:
    """The rows of a (max_length, …) tensor that belong to the tokens of x (B, N, …)."""
    if context is None:
        if x.shape[1] > len(per_position):
            raise ValueError(f"the sequences have {x.shape[1]} tokens and the model was built for {len(per_position)}")
        return per_position[: x.shape[1]]
    place = context.locate(x)
    place.check_length(len(per_position), x.shape[1])
    return per_position[place.offset + torch.arange(x.shape[1], device=x.device)]


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, N, d) over the valid tokens only, so that padding changes no statistic.

    context: Ranks whose tokens are included in the statistics.
    """

    context: Context | None = None

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return self._scale(x, self.running_mean, self.running_var)
        # Statistics in float32 even under autocast: sums over a whole batch overflow half precision.
        count, mean, var = self._statistics(x if x.dtype == torch.float64 else x.float(), key_padding_mask)
        with torch.no_grad():
            keep = 1.0 - (self.momentum or 0.1)
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_mean.mul_(keep).add_(mean, alpha=1 - keep)
            self.running_var.mul_(keep).add_(unbiased, alpha=1 - keep)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return self._scale(x, mean, var)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and variance of the valid tokens."""
        if self.context is None and mask is None:
            count = torch.tensor(float(x.shape[0] * x.shape[1]), device=x.device, dtype=x.dtype)
            mean = x.mean(dim=(0, 1))
            return count, mean, (x - mean).square().mean(dim=(0, 1))  # faster than torch.var on a CPU
        add = (lambda t: t) if self.context is None else self.context.sum
        valid = torch.ones_like(x[..., :1], dtype=torch.bool) if mask is None else ~mask.unsqueeze(-1)
        count = add(valid.sum().to(x.dtype)).clamp(min=1)
        mean = add(torch.where(valid, x, 0.0).sum(dim=(0, 1))) / count
        return count, mean, add(torch.where(valid, x - mean, 0.0).square().sum(dim=(0, 1))) / count

    def _scale(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = torch.rsqrt(var + self.eps) * self.weight
        return (x - mean) * scale + self.bias


class ConvStem(nn.Module):
    """Two convolutions over time, each with batch normalisation and GELU; padding is read as zeros.

    The outputs of the first convolution are averaged over `stride` consecutive steps: long series become few tokens.
    """

    context: Context | None = None

    def __init__(
        self, channels: int, embed_dim: int, kernel_size: int = 7, dropout: float = 0.0, stride: int = 1
    ) -> None:
        super().__init__()
        self.stride = stride
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"stem_kernel must be a positive odd number (stem_kernel={kernel_size})")
        widths = (channels, embed_dim, embed_dim)
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, kernel_size, padding=kernel_size // 2, bias=False) for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(MaskedBatchNorm(embed_dim) for _ in self.convs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, C) → (B, N, d)
        if self.stride > 1 and self.context is not None:
            raise ValueError(f"a stem with stride {self.stride} needs whole sequences, not shards")
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if key_padding_mask is not None:
                x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
            # Contiguous: the backward passes of the next operations are slow on the layout of a convolution.
            x = convolve(conv, x, self.context).contiguous()  # type: ignore[arg-type]
            x = F.gelu(norm(x, key_padding_mask))
            if i == 0 and self.stride > 1:
                x = average_steps(x, key_padding_mask, self.stride)
                key_padding_mask = token_mask(key_padding_mask, self.stride)
        return self.dropout(x)


def average_steps(x: Tensor, mask: Tensor | None, stride: int) -> Tensor:
    """Average each `stride` consecutive steps without their padding, (B, N, d) → (B, ⌈N / stride⌉, d)."""
    missing = -x.shape[1] % stride
    if mask is None and missing == 0:
        return x.unflatten(1, (-1, stride)).mean(dim=2)
    valid = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else ~mask
    valid = F.pad(valid, (0, missing)).unflatten(1, (-1, stride))[..., None]  # (B, tokens, stride, 1)
    steps = F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, stride))
    return torch.where(valid, steps, 0.0).sum(dim=2) / valid.sum(dim=2).clamp(min=1)


def token_mask(mask: Tensor | None, stride: int) -> Tensor | None:
    """The mask of the tokens of `average_steps`: a token is padding if all its steps are."""
    if mask is None or stride == 1:
        return mask
    return F.pad(mask, (0, -mask.shape[1] % stride), value=True).unflatten(1, (-1, stride)).all(dim=2)


class FlattenHead(nn.Module):
    """GELU, padding zeroed, tokens concatenated, one linear map."""

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
            weight = local_rows(self.proj.weight.unflatten(1, (self.max_length, -1)).transpose(0, 1), x, self.context)
            return self.context.sum(torch.einsum("bnd,ncd->bc", x, weight)) + self.proj.bias
        x = F.pad(x, (0, 0, 0, self.max_length - x.shape[1]))
        return self.proj(x.flatten(1))


def masked_mean(x: Tensor, key_padding_mask: Tensor | None = None, context: Context | None = None) -> Tensor:
    """Mean over the valid tokens; zero for an empty sequence.

    Args:
        x: (B, N, d).
        key_padding_mask: (B, N), True at padding.
        context: the ranks that have the other tokens, if the sequence is sharded.

    Returns:
        (B, d).
    """
    if key_padding_mask is None:
        return x.mean(dim=1) if context is None else context.sum(x.sum(dim=1)) / context.locate(x).total[:, None]
    valid = ~key_padding_mask
    total, count = torch.where(valid[..., None], x, 0.0).sum(dim=1), valid.sum(dim=1)
    if context is not None:
        total, count = context.sum(total), context.locate(x, valid).total
    return total / count[:, None].clamp(min=1)


class PoolingHead(nn.Module):
    """Mean and maximum over the valid tokens (zero for an empty sequence), concatenated, one linear map."""

    context: Context | None = None

    def __init__(self, embed_dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(2 * embed_dim, classes)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, classes)
        mean = masked_mean(x, key_padding_mask, self.context)
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), -torch.inf)
        largest = x.amax(dim=1) if self.context is None else self.context.maximum(x)
        if key_padding_mask is not None:  # a sequence may be empty
            largest = torch.where(torch.isneginf(largest), 0.0, largest)
        return self.proj(self.dropout(torch.cat([mean, largest], dim=-1)))


class TimeSeriesClassifier(nn.Module):
    """Stem, encoder and head: series (B, N, channels) and a padding mask (B, N) to logits (B, classes).

    Args:
        stem: Maps (B, N, channels) to (B, N, embed_dim).
        encoder: The attention blocks.
        head: Maps (B, N, embed_dim) to logits.
        attend_to_padding: Pass no mask to the attention, as the authors' implementation does; only to reproduce it.
    """

    def __init__(
        self,
        stem: LinearStem | ConvStem,
        encoder: Encoder,
        head: FlattenHead | PoolingHead,
        *,
        attend_to_padding: bool = False,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.encoder = encoder
        self.head = head
        self.attend_to_padding = attend_to_padding

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is not None and not self.attend_to_padding:
            # Zero the padding so that NaNs there cannot propagate.
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        block_mask = None if self.attend_to_padding else key_padding_mask
        x = self.stem(x, block_mask)
        block_mask, key_padding_mask = (token_mask(m, self.stem.stride) for m in (block_mask, key_padding_mask))
        return self.head(self.encoder(x, block_mask), key_padding_mask)


def paper_classifier(
    channels: int,
    classes: int,
    max_length: int,
    *,
    embed_dim: int = 512,
    dropout: float = 0.1,
    attend_to_padding: bool = False,
    **encoder: Any,
) -> TimeSeriesClassifier:
    """Build the network of the paper's UEA experiments.

    Args:
        channels: Number of channels of a series.
        classes: Number of classes.
        max_length: The longest series.
        embed_dim: Width of the tokens.
        dropout: Dropout rate.
        attend_to_padding: Pass no mask to the attention, as the authors' implementation does.
        encoder: Further arguments of `Encoder` and its blocks. The defaults are the paper's PrimalFormer:
            attention="primal", num_heads=8, layers=2, ffn_dim=2048. attention="primal+" is its Primal.+.
    """
    settings = {"num_heads": 8, "layers": 2, "ffn_dim": 2048, "norm_first": False, **encoder}
    blocks = Encoder(embed_dim, dropout=dropout, **settings)  # first: the weights of a seed depend on the order
    stem = LinearStem(channels, embed_dim, max_length, dropout)
    head = FlattenHead(embed_dim, max_length, classes, dropout)
    return TimeSeriesClassifier(stem, blocks, head, attend_to_padding=attend_to_padding)


def modern_classifier(
    channels: int,
    classes: int,
    *,
    embed_dim: int = 128,
    dropout: float = 0.2,
    stem_kernel: int = 7,
    stride: int = 1,
    **encoder: Any,
) -> TimeSeriesClassifier:
    """Build a network with a convolutional stem, local mixing and pooling; not from the paper.

    Args:
        channels: Number of channels of a series.
        classes: Number of classes.
        embed_dim: Width of the tokens.
        dropout: Dropout rate.
        stem_kernel: Width of the convolutions of the stem.
        stride: Steps of the series that make one token.
        encoder: Further arguments of `Encoder` and its blocks; by default num_heads=8, layers=3, local_kernel=7.
    """
    settings = {"num_heads": 8, "layers": 3, "local_kernel": 7, **encoder}
    blocks = Encoder(embed_dim, dropout=dropout, **settings)  # first, as above
    stem = ConvStem(channels, embed_dim, stem_kernel, dropout, stride)
    return TimeSeriesClassifier(stem, blocks, PoolingHead(embed_dim, classes, dropout))


# Predictive uncertainty


def pooled_scores(model: nn.Module, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """The e- and r-scores of all Primal layers, averaged over the valid tokens, (B, layers · 2 · heads · rank)."""
    pools: list[Tensor] = []

    def pool(layer: nn.Module, args: tuple[Tensor, ...], keywords: dict[str, Any], _: Tensor) -> None:
        if keywords.get("return_scores"):
            return
        mask = keywords.get("key_padding_mask")
        _, scores = layer(args[0], key_padding_mask=mask, return_scores=True)
        pools.extend(masked_mean(s.transpose(1, 2).flatten(2), mask) for s in (scores.e, scores.r))  # (B, heads · rank)

    hooks = [layer.register_forward_hook(pool, with_kwargs=True) for layer in primal_layers(model).values()]
    try:
        model(x, key_padding_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(pools, dim=-1)


@dataclass(frozen=True)
class ScorePosterior:
    """Predictive variance from the singular directions of the projection scores.

    After KEP-SVGP (Y. Chen, Q. Tao, F. Tonin, J. Suykens, "Self-Attention through Kernel-Eigen Pair Sparse Variational
    Gaussian Processes", ICML 2024). There the e- and r-scores of an attention layer are the features of two sparse
    Gaussian processes whose inducing variables are the singular directions, so that the posterior covariance is
    diagonal and costs O(s).

    Here the network is trained first. Its scores ψ(x) = [e; r], averaged over the tokens and centred, are the features
    of a Bayesian linear model with prior N(0, I) on the weights and noise σ². For training scores Ψ = U D Vᵀ the
    posterior covariance is σ² (ΨᵀΨ + σ² I)⁻¹ = V diag(σ² / (d_j² + σ²)) Vᵀ. The variance of a sample is

        Σ_j (v_jᵀ ψ)² / (d_j² + σ²)

    up to a factor, which makes the mean over the training samples 1. At a solution of the kernel SVD the scores of one
    head are uncorrelated, with energies λ_j²: V is then the identity and d_j the singular values. Scores of several
    heads and of averaged tokens are correlated, hence the rotation V. Differences from the paper: no variational
    training, one posterior for the scores of both kinds and all layers, and a logit's variance instead of samples.

    Args:
        mean: Mean of the training scores, (networks, scores).
        directions: V with each column divided by the square root of its d_j² + σ², (networks, scores, scores).
    """

    mean: np.ndarray
    directions: np.ndarray

    @classmethod
    def fit(cls, scores: np.ndarray) -> ScorePosterior:
        """The posterior of training scores (networks, samples, scores)."""
        mean = scores.mean(axis=1)
        centred = scores - mean[:, None]
        energy, directions = np.linalg.eigh(centred.transpose(0, 2, 1) @ centred / scores.shape[1])
        noise = NOISE * energy.mean(axis=1, keepdims=True) + 1e-12
        inverse = 1 / (energy.clip(min=0) + noise)
        total = (energy.clip(min=0) * inverse).sum(axis=1, keepdims=True).clip(min=1e-12)
        return cls(mean, directions * np.sqrt(inverse / total)[:, None])

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The variance of each sample, averaged over the networks, (samples,)."""
        return np.square((scores - self.mean[:, None]) @ self.directions).sum(axis=2).mean(axis=0)


class ZeroRightHalf(nn.Module):
    """Parametrise a weight (p, 2s) so that its right half, the columns of the r-scores, is zero."""

    def forward(self, weight: Tensor) -> Tensor:
        rank = weight.shape[-1] // 2
        return torch.cat([weight[..., :rank], torch.zeros_like(weight[..., rank:])], dim=-1)


def without_r_scores(model: nn.Module) -> nn.Module:
    """Remove the r-scores from the outputs of all Primal layers in place: o = W_o [e; 0], the paper's ablation.

    The objective J keeps them. Parameter names change, so the weights of an ablated model fit ablated models only.
    """
    for layer in primal_layers(model).values():
        parametrize.register_parametrization(layer.score_proj, "weight", ZeroRightHalf())
    return model
