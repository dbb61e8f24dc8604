"""The language model's streaming state as a cache of transformers: one place per block, nothing that grows but the keys
and values of softmax layers. Beam search, repeated and selected rows work on all of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from primal_attention.convert.hf_cache import PrimalSlot
from primal_attention.hf.configuration import PrimalConfig
from primal_attention.models.lm import LanguageState


class PrimalCache(Cache):
    """A place holds its block's state and how many tokens each sequence has read; its length counts padding too."""

    layers: list[PrimalSlot]  # type: ignore[assignment]

    def __init__(self, config: PrimalConfig) -> None:
        super().__init__(layers=[PrimalSlot() for _ in range(config.num_hidden_layers)])

    @property
    def state(self) -> LanguageState | None:
        """As `LanguageModel` takes it; None before the first token."""
        held: list[Any] = [place.state for place in self.layers]
        if held[0] is None:
            return None
        position: Tensor = held[0][1]
        return LanguageState(tuple(block for block, _ in held), position)

    def keep(self, state: LanguageState, columns: int) -> None:
        """Hold the state after `columns` more columns of input."""
        for place, block in zip(self.layers, state.blocks, strict=True):
            place.state = (block, state.position)
            place.length += columns
