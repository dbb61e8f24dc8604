"""spectrum: singular values of a model's attention matrices, by layer and head.

Softmax: K = softmax(QKᵀ/√p).   Primal: K = φ′_q φ′_kᵀ, from the QR decompositions of its factors, never formed.
Rows and columns of padding are zero, so they only add zero singular values.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ksvd.spectrum import cumulative_explained_variance, effective_rank, low_rank_singular_values
from ..nn.baselines.softmax import SoftmaxAttention
from ..nn.primal import PrimalAttention
from ..ops.feature_maps import accumulation_dtype
from .adapters import Replacement, is_cross_attention, is_transformers_attention, visible_pairs


@dataclass(frozen=True)
class LayerSpectrum:
    """Singular values of one layer's attention matrices, (samples, H, N), largest first, padded with zeros."""

    name: str
    kind: str
    singular_values: Tensor

    @property
    def explained(self) -> Tensor:
        """Cumulative explained variance, (samples, H, N)."""
        return cumulative_explained_variance(self.singular_values)

    @property
    def effective_rank(self) -> Tensor:
        """Effective rank, (samples, H)."""
        return effective_rank(self.singular_values)

    def curve(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the explained variance over samples and heads, (N,) each."""
        share = self.explained.flatten(0, 1)
        return share.mean(0), share.std(0, correction=0)

    def directions(self, share: float = 0.9) -> float:
        """Return the mean number of directions that explain this share of the variance."""
        # With rounding errors a matrix of rank r must not need r + 1.
        return float(((self.explained < share - 1e-6).sum(-1) + 1).double().mean())


class Spectrum(dict[str, LayerSpectrum]):
    """One `LayerSpectrum` per attention, by name, in the order of the model; str() is a table."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per layer and index, for a CSV file."""
        for number, layer in enumerate(self.values()):
            sigma = layer.singular_values / layer.singular_values[..., :1].clamp(min=1e-300)
            relative, value = sigma.flatten(0, 1).mean(0), layer.singular_values.flatten(0, 1).mean(0)
            mean, deviation = layer.curve()
            columns = {"value": value, "value_over_largest": relative}
            columns |= {"explained_mean": mean, "explained_deviation": deviation}
            for i in range(mean.shape[0]):
                row = {"layer": number, "name": layer.name, "kind": layer.kind, "index": i + 1}
                yield row | {name: float(values[i]) for name, values in columns.items()}

    def __str__(self) -> str:
        width = max([len(name) for name in self] + [5])
        lines = [f"{'layer':<{width}}  {'kind':<8} effective rank      directions for 90 % of the variance"]
        for layer in self.values():
            rank = layer.effective_rank
            spread = f"{rank.mean():8.2f} ± {rank.std(correction=0):<6.2f}"
            lines.append(f"{layer.name:<{width}}  {layer.kind:<8} {spread}   {layer.directions():8.1f}")
        return "\n".join(lines)


def spectrum(
    model: nn.Module, inputs: Any, *, dtype: torch.dtype | None = None, step: Callable[[], object] = lambda: None
) -> Spectrum:
    """Compute the singular values of each layer's and head's attention matrix.

    Args:
        model: with softmax attention (transformers, nn.MultiheadAttention, timm, this library's) or PrimalAttention.
            It runs in evaluation mode on its device and is not changed.
        inputs: a batch, or an iterable of batches; a batch is a tensor, a tuple of arguments or a dict of keywords.
        dtype: dtype of the computation; None is that of the matrices, at least float32.
        step: called after each batch.

    Returns:
        A dict of `LayerSpectrum` by layer name.

    Examples:
        >>> import torch
        >>> from primal_attention import PrimalAttention, spectrum
        >>> attn = PrimalAttention(64, 4, rank=8, landmarks=16)
        >>> for name, layer in spectrum(attn, torch.randn(2, 50, 64)).items():
        ...     print(layer.kind, tuple(layer.singular_values.shape))  # (samples, heads, tokens)
        primal (2, 4, 50)
    """
    attentions = list(_find_attentions("", model))
    if not attentions:
        raise ValueError(f"{type(model).__name__} has no softmax attention or Primal-Attention")
    batches: Iterable[Any] = [inputs] if isinstance(inputs, (Tensor, Mapping, tuple)) else inputs
    values: dict[str, list[Tensor]] = {name: [] for name, _, _ in attentions}

    def record(name: str, read: Reader, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if matrix := read(module, args, kwargs, output):
            values[name].append(_singular_values(matrix, dtype).cpu())

    fast_path = torch.backends.mha.get_fastpath_enabled()
    with evaluation_mode(model), torch.no_grad(), _eager_attention(model), contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)  # torch's fused encoder layer does not call the attention
        for name, module, read in attentions:
            hook = module.register_forward_hook(partial(record, name, read), with_kwargs=True)
            stack.callback(hook.remove)
        for batch in batches:
            run_model(model, batch)
            step()
    kinds = {name: "primal" if read is _read_primal else "softmax" for name, _, read in attentions if values[name]}
    if not kinds:
        raise ValueError("inputs has no batch, or the model's attention modules were not called")
    return Spectrum({name: LayerSpectrum(name, kind, _stack(values[name])) for name, kind in kinds.items()})


def _singular_values(matrix: Matrix, dtype: torch.dtype | None) -> Tensor:
    """Return the singular values (B, H, N) of K (B, H, N, N), or of two factors (B, H, N, p), K = left @ right.mT."""
    tensors = [t.to(dtype or accumulation_dtype(t.dtype)) for t in matrix]
    if len(tensors) == 1:
        return torch.linalg.svdvals(tensors[0])
    sigma = low_rank_singular_values(*tensors)
    return F.pad(sigma, (0, tensors[0].shape[-2] - sigma.shape[-1]))  # zeros beyond the rank that the factors allow


def _stack(parts: list[Tensor]) -> Tensor:
    longest = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, longest - part.shape[-1])) for part in parts])


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch, which is moved to the model's device."""
    device = next((p.device for p in model.parameters()), None)

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return model(**{key: move(value) for key, value in batch.items()})
    return model(*map(move, batch)) if isinstance(batch, tuple) else model(move(batch))


@contextlib.contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode; restore the mode of every module afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# Attention matrices of a call. A reader returns K, two factors of it, or nothing for a call without a square matrix.

Matrix = tuple[Tensor, ...]
Reader = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Matrix]  # module, arguments, keywords, output


def _find_attentions(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Reader]]:
    for is_known, read in READERS:
        if is_known(module):
            yield name, module, read
            return
    for key, child in module.named_children():
        place = name if isinstance(module, Replacement) else f"{name}.{key}" if name else key
        yield from _find_attentions(place, child)


def _read_primal(layer: PrimalAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Matrix:
    if kwargs.get("cu_seqlens") is not None:
        raise ValueError("a packed batch has no single matrix; pass padded batches")
    mask = args[1] if len(args) > 1 else kwargs.get("key_padding_mask")
    rotary = {key: value for key, value in kwargs.items() if key == "rotation"}
    return layer.kernel_factors(args[0], mask, **rotary)  # K = left @ right.mT


def _read_softmax(layer: SoftmaxAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Matrix:
    mask = args[1] if len(args) > 1 else kwargs.get("key_padding_mask")
    x = args[0] if mask is None else args[0].masked_fill(mask[..., None], 0.0)
    q, k, _ = layer.project_in(x)
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    visible = visible.tril() if layer.causal else visible
    visible = visible if mask is None else visible & ~mask[:, None, None, :]
    return (_zero_padding(_softmax_weights(q, k, q.shape[-1] ** -0.5, visible), mask),)


def _read_torch(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Matrix:
    call = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    call.update(need_weights=True, average_attn_weights=False)
    weights = layer.forward(**call)[1]  # layer() would call the hook again
    assert weights is not None
    mask = call.get("key_padding_mask")
    padding = None if mask is None else mask if mask.dtype == torch.bool else ~visible_pairs(mask)
    return (_zero_padding(weights if weights.ndim == 4 else weights[None], padding),)


def _read_timm(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Matrix:
    """timm's attention does not return its weights: compute them from its maps."""
    q, k, _ = layer.qkv(args[0]).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (getattr(layer, n, nn.Identity())(t) for n, t in (("q_norm", q), ("k_norm", k)))
    mask = args[1] if len(args) > 1 else kwargs.get("attn_mask")
    scale, visible = getattr(layer, "scale", q.shape[-1] ** -0.5), None if mask is None else visible_pairs(mask)
    return (_softmax_weights(q, k, scale, visible),)


def _softmax_weights(q: Tensor, k: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores = (q @ k.mT * scale).to(accumulation_dtype(q.dtype))
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)  # NaN: rows of padding


def _read_transformers(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Matrix:
    """Attentions of transformers return their weights if their implementation is "eager"."""
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
        return ()  # cross-attention, or an implementation without weights
    call = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    mask = call.get("attention_mask", call.get("kwargs", {}).get("attention_mask"))
    padding = None if mask is None else ~visible_pairs(mask)[:, 0, -1] if mask.ndim == 4 else ~mask.bool()
    return (_zero_padding(weights, padding),)


def _is_transformers(module: nn.Module) -> bool:
    is_container = any("Attention" in type(m).__name__ for m in module.modules() if m is not module)
    return is_transformers_attention(module) and not (is_container or is_cross_attention(module))


def _is_timm(module: nn.Module) -> bool:
    return isinstance(getattr(module, "qkv", None), nn.Linear) and isinstance(getattr(module, "num_heads", None), int)


READERS: tuple[tuple[Callable[[nn.Module], bool], Reader], ...] = (
    (lambda m: isinstance(m, PrimalAttention), _read_primal),
    (lambda m: isinstance(m, SoftmaxAttention), _read_softmax),
    (lambda m: isinstance(m, nn.MultiheadAttention), _read_torch),
    (_is_transformers, _read_transformers),
    (_is_timm, _read_timm),
)


def _zero_padding(weights: Tensor, padding: Tensor | None) -> Tensor:
    """Zero the rows and columns of padding."""
    if padding is None:
        return weights
    return weights.masked_fill(padding[:, None, :, None] | padding[:, None, None, :], 0.0)


@contextlib.contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    """Use the eager attention of transformers inside the context: other implementations return no weights."""
    changed: list[tuple[Any, str]] = []
    module: Any
    for module in model.modules():
        before = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if before is not None and hasattr(module, "set_attn_implementation") and before != "eager":
            module.set_attn_implementation("eager")
            changed.append((module, before))
    try:
        yield
    finally:
        for module, before in changed:
            module.set_attn_implementation(before)
