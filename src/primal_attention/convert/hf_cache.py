"""The cache layer of transformers that stores the state of Primal-Attention instead of keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicLayer


class PrimalSlot(DynamicLayer):
    """The state of a layer after `length` tokens: nested tensors with B rows.

    Beam search can reorder the rows. Tokens cannot be removed.
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.length = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a Primal-Attention layer has no keys and values")

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.state, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a Primal-Attention layer cannot remove tokens: assisted generation is not supported")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda t: t[indices])

    def _apply(self, change: Any) -> None:
        if self.state is not None:
            self.state = tree_map_only(Tensor, change, self.state)


def find_slot(cache: Any, layer_idx: int | None) -> PrimalSlot:
    """Return the slot of a layer in a cache; the first call creates it."""
    cache = getattr(cache, "self_attention_cache", cache)
    if layer_idx is None:
        raise ValueError("this layer has no layer_idx and cannot use a cache: pass use_cache=False")
    while len(cache.layers) <= layer_idx:
        cache.layers.append(DynamicLayer())
    layer = cache.layers[layer_idx]
    if not isinstance(layer, PrimalSlot):
        if type(layer) is not DynamicLayer:
            raise ValueError(f"a Primal-Attention layer needs a dynamic cache (got {type(layer).__name__})")
        layer = cache.layers[layer_idx] = PrimalSlot()
    return layer
