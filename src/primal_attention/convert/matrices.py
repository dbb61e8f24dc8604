"""The attention matrix of each layer while a model runs: softmax's from the layer itself, Primal's as two factors.

A matrix comes as K = A Bᵀ where that is how the layer knows it, and formed where the layer forms it. Rows and columns
of padding are zero, so that they add nothing but zero singular values.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn.baselines.softmax import SoftmaxAttention
from ..nn.primal import PrimalAttention
from ..ops.feature_maps import accumulation_dtype
from .masks import allowed
from .sites import StandIn


class Matrix(NamedTuple):
    """(B, H, N, N): formed, or as factors (B, H, N, p) of K = left @ right.mT."""

    kind: str
    formed: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None

    def dense(self) -> Tensor:
        if self.formed is not None:
            return self.formed
        assert self.left is not None
        assert self.right is not None
        return self.left @ self.right.mT


Seen = Callable[[str, nn.Module, Matrix], None]


@contextlib.contextmanager
def watching(model: nn.Module, seen: Seen) -> Iterator[list[str]]:
    """While the context lasts, `seen` is told every attention's matrix in every forward; gives the layers' names."""
    hooks, names = [], []
    for name, module, watch in _attentions("", model):
        hooks.append(watch(name, module, seen))
        names.append(name)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # torch's fused encoder layer would pass the attention by
    try:
        with _eager(model):
            yield names
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for hook in hooks:
            hook.remove()


Watch = Callable[[str, Any, Seen], Any]


def _attentions(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Watch]]:
    for kind, watch in WATCHES:
        if kind(module):
            yield name, module, watch
            return
    for key, child in module.named_children():
        place = name if isinstance(module, StandIn) else f"{name}.{key}" if name else key
        yield from _attentions(place, child)


def _watch_primal(name: str, module: PrimalAttention, seen: Seen) -> Any:
    def hook(layer: PrimalAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError(f"{name}: a packed batch has no single matrix; give padded batches")
        mask = args[1] if len(args) > 1 else kwargs.get("key_padding_mask")
        left, right = layer.kernel_factors(args[0], mask)
        seen(name, layer, Matrix("primal", left=left, right=right))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_softmax(name: str, module: SoftmaxAttention, seen: Seen) -> Any:
    def hook(layer: SoftmaxAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0]
        mask = args[1] if len(args) > 1 else kwargs.get("key_padding_mask")
        if mask is not None:
            x = x.masked_fill(mask[..., None], 0.0)
        q, k, _ = layer.project_in(x)
        seen(name, layer, Matrix("softmax", _softmax(q @ k.mT / q.shape[-1] ** 0.5, mask, layer.causal)))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_multihead(name: str, module: nn.MultiheadAttention, seen: Seen) -> Any:
    def hook(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        call.update(need_weights=True, average_attn_weights=False)
        weights = layer.forward(**call)[1]  # not layer(): that would call this hook again
        assert weights is not None
        weights = weights if weights.ndim == 4 else weights[None]
        mask = call.get("key_padding_mask")
        padding = None if mask is None else mask if mask.dtype == torch.bool else ~allowed(mask)
        seen(name, layer, Matrix("softmax", _without(weights, padding)))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_fused(name: str, module: Any, seen: Seen) -> Any:
    """timm's attention, which keeps its weights to itself."""

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q, k, _ = layer.qkv(args[0]).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (getattr(layer, n, nn.Identity())(t) for n, t in (("q_norm", q), ("k_norm", k)))
        scores = q @ k.mT * getattr(layer, "scale", q.shape[-1] ** -0.5)
        mask = args[1] if len(args) > 1 else kwargs.get("attn_mask")
        if mask is not None:
            scores = scores.masked_fill(~allowed(mask), -torch.inf)
        seen(name, layer, Matrix("softmax", scores.softmax(-1).nan_to_num(0.0)))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_hf(name: str, module: nn.Module, seen: Seen) -> Any:
    """An attention of transformers, which returns its weights where its implementation is the eager one."""
    signature = inspect.signature(module.forward)

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
            return  # cross-attention, or an implementation without weights
        given = signature.bind(*args, **kwargs).arguments
        mask = given.get("attention_mask", given.get("kwargs", {}).get("attention_mask"))
        padding = None if mask is None else ~allowed(mask)[:, 0, -1] if mask.ndim == 4 else ~mask.bool()
        seen(name, layer, Matrix("softmax", _without(weights, padding)))

    return module.register_forward_hook(hook, with_kwargs=True)


def _is_hf(module: nn.Module) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or "Attention" not in kind.__name__:
        return False
    if "Cross" in kind.__name__ or getattr(module, "is_cross_attention", False):
        return False
    return not any("Attention" in type(m).__name__ for m in module.modules() if m is not module)


def _is_fused(module: nn.Module) -> bool:
    return isinstance(getattr(module, "qkv", None), nn.Linear) and isinstance(getattr(module, "num_heads", None), int)


WATCHES: tuple[tuple[Callable[[nn.Module], bool], Watch], ...] = (
    (lambda m: isinstance(m, PrimalAttention), _watch_primal),
    (lambda m: isinstance(m, SoftmaxAttention), _watch_softmax),
    (lambda m: isinstance(m, nn.MultiheadAttention), _watch_multihead),
    (_is_hf, _watch_hf),
    (_is_fused, _watch_fused),
)


def _softmax(scores: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    # A row that may look at nothing is padding's.
    return _without(scores.to(accumulation_dtype(scores.dtype)).softmax(-1).nan_to_num(0.0), padding)


def _without(weights: Tensor, padding: Tensor | None) -> Tensor:
    """The matrix with zeros in padding's rows and columns."""
    if padding is None:
        return weights
    hidden = padding[:, None, :, None] | padding[:, None, None, :]
    return weights.masked_fill(hidden, 0.0)


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """transformers' eager attention for a while: the others return no weights."""
    changed: list[tuple[Any, str]] = []
    module: Any
    for module in model.modules():
        config = getattr(module, "config", None)
        before = getattr(config, "_attn_implementation", None)
        if before is not None and hasattr(module, "set_attn_implementation") and before != "eager":
            module.set_attn_implementation("eager")
            changed.append((module, before))
    try:
        yield
    finally:
        for module, before in changed:
            module.set_attn_implementation(before)
