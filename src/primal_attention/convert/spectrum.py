"""spectrum: how fast the singular values of a model's attention matrices fall, layer by layer and head by head.

Softmax: K = softmax(QKᵀ/√p).   Primal: K = φ′_q φ′_kᵀ, from the QR decompositions of its factors, never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ksvd.spectrum import cumulative_explained_variance, effective_rank, low_rank_singular_values
from ..ops.feature_maps import accumulation_dtype
from .matrices import Matrix, watching


@dataclass(frozen=True)
class LayerSpectrum:
    """The singular values of one layer's attention matrices, (cases, H, N), largest first; zero beyond their number."""

    name: str
    kind: str
    singular_values: Tensor

    @property
    def explained(self) -> Tensor:
        """Cumulative explained variance, (cases, H, N)."""
        return cumulative_explained_variance(self.singular_values)

    @property
    def effective_rank(self) -> Tensor:
        """(cases, H)."""
        return effective_rank(self.singular_values)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the cumulative explained variance over cases and heads, (N,) each."""
        share = self.explained.flatten(0, 1)
        return share.mean(0), share.std(0, correction=0)

    def directions(self, share: float = 0.9) -> float:
        """How many directions explain this share of the variance, mean over cases and heads."""
        # Half a rounding error below the share: a matrix of rank r must not need r + 1.
        return float(((self.explained < share - 1e-6).sum(-1) + 1).double().mean())


class Spectrum(dict[str, LayerSpectrum]):
    """One `LayerSpectrum` per attention, by its name, in the model's order; str() is a table."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per layer and index, for a CSV file, which the report's page can read in a run folder."""
        for number, layer in enumerate(self.values()):
            sigma = layer.singular_values / layer.singular_values[..., :1].clamp(min=1e-300)
            relative, value = sigma.flatten(0, 1).mean(0), layer.singular_values.flatten(0, 1).mean(0)
            mean, deviation = layer.curve()
            for i in range(mean.shape[0]):
                yield {
                    "layer": number,
                    "name": layer.name,
                    "kind": layer.kind,
                    "index": i + 1,
                    "value": float(value[i]),
                    "value_over_largest": float(relative[i]),
                    "explained_mean": float(mean[i]),
                    "explained_deviation": float(deviation[i]),
                }

    def __str__(self) -> str:
        width = max([len(name) for name in self] + [5])
        lines = [f"{'layer':<{width}}  {'kind':<8} effective rank      directions for 90 % of the variance"]
        for layer in self.values():
            rank = layer.effective_rank
            spread = f"{rank.mean():8.2f} ± {rank.std(correction=0):<6.2f}"
            lines.append(f"{layer.name:<{width}}  {layer.kind:<8} {spread}   {layer.directions():8.1f}")
        return "\n".join(lines)


@torch.no_grad()
def spectrum(
    model: nn.Module, inputs: Any, *, dtype: torch.dtype | None = None, step: Callable[[], object] = lambda: None
) -> Spectrum:
    """Singular values of each layer's and head's attention matrix.

    Args:
        model: with softmax attention (transformers, nn.MultiheadAttention, timm, this library's) or PrimalAttention.
            It runs in evaluation mode, where it is, and is left as it was.
        inputs: a batch, or an iterable of batches; a batch is a tensor, a tuple of arguments or a dict of keywords.
        dtype: in which the values are computed; None is the matrices' own, but at least float32.
        step: called after each batch.

    Returns:
        A dict of `LayerSpectrum` by the layers' names.
    """
    found: dict[str, list[Tensor]] = {}
    kinds: dict[str, str] = {}

    def seen(name: str, layer: nn.Module, matrix: Matrix) -> None:
        found.setdefault(name, []).append(singular_values(matrix, dtype).cpu())
        kinds[name] = matrix.kind

    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with watching(model, seen) as names:
            if not names:
                raise ValueError(f"{type(model).__name__} has no softmax attention or Primal-Attention to look at")
            for batch in batches(inputs):
                call(model, batch)
                step()
    finally:
        for module, training in was_training.items():
            module.training = training
    if not found:
        raise ValueError("inputs holds no batch, or the model's attentions were not called")
    return Spectrum({name: LayerSpectrum(name, kinds[name], _stack(found[name])) for name in names if name in found})


def singular_values(matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
    """Of K, (B, H, N), zeros behind the last that the factors allow."""

    def widened(t: Tensor | None) -> Tensor:
        assert t is not None
        return t.to(dtype or accumulation_dtype(t.dtype))

    if matrix.formed is not None:
        return torch.linalg.svdvals(widened(matrix.formed))
    left, right = widened(matrix.left), widened(matrix.right)
    sigma = low_rank_singular_values(left, right)
    return F.pad(sigma, (0, left.shape[-2] - sigma.shape[-1]))


def batches(inputs: Any) -> Iterable[Any]:
    return [inputs] if isinstance(inputs, (Tensor, Mapping, tuple)) else inputs


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch, which is moved to the model's device."""
    device = next((p.device for p in model.parameters()), None)

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return model(**{key: move(value) for key, value in batch.items()})
    return model(*map(move, batch)) if isinstance(batch, tuple) else model(move(batch))


def _stack(parts: list[Tensor]) -> Tensor:
    longest = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, longest - part.shape[-1])) for part in parts])
