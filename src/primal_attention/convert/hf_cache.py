"""A layer's place in transformers' cache that holds Primal-Attention's state instead of keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicLayer


class PrimalSlot(DynamicLayer):
    """The state after `length` tokens: tensors of B rows, nested in any way. Beam search may reorder it; tokens
    cannot be taken back."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.length = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a Primal-Attention layer keeps no keys and values")

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.state, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a Primal-Attention layer cannot take tokens back: use no assisted generation")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda t: t[indices])

    def _each(self, change: Any) -> None:
        if self.state is not None:
            self.state = tree_map_only(Tensor, change, self.state)


def slot(cache: Any, layer_idx: int | None) -> PrimalSlot:
    """The place of a layer in a cache, made one for Primal-Attention at its first use."""
    cache = getattr(cache, "self_attention_cache", cache)
    if layer_idx is None:
        raise ValueError("this layer has no number in its model, so a cache has no place for it: use_cache=False")
    while len(cache.layers) <= layer_idx:
        cache.layers.append(DynamicLayer())
    held = cache.layers[layer_idx]
    if not isinstance(held, PrimalSlot):
        if type(held) is not DynamicLayer:
            raise ValueError(f"a Primal-Attention layer needs a dynamic cache (got {type(held).__name__})")
        held = cache.layers[layer_idx] = PrimalSlot()
    return held
