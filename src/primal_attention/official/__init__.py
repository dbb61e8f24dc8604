"""Checkpoints of the published research code, brought over: `load_official(state_dict, kind)`.

The published attention sees padding; a model loaded here does the same, so that its numbers are the published ones. Set
`model.attend_to_padding = False` (uea) or `model.published_padding = False` (lra) to respect masks from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from primal_attention.official.cv import vision_transformer
from primal_attention.official.lra import arena_classifier
from primal_attention.official.nlp import language_model
from primal_attention.official.rl import decision_transformer
from primal_attention.official.uea import time_series_classifier

State = Mapping[str, Tensor]


def load_official(state_dict: State, kind: str, *, num_heads: int | None = None) -> nn.Module:
    """The model of this library that computes what the published checkpoint computes.

    kind: which of the published code bases wrote it: "uea", "lra", "cv" (DeiT, also timm's own with one class token),
        "nlp" (a decoder-only language model) or "rl" (a Decision Transformer, also in the form of transformers'
        DecisionTransformerModel; it does not hold the states' moments, see `set_state_moments`).
    num_heads: needed only where no layer is Primal, as softmax weights do not tell it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)} (got {kind!r})")
    return KINDS[kind](state_dict, num_heads)


KINDS: dict[str, Callable[[State, int | None], nn.Module]] = {
    "uea": time_series_classifier,
    "lra": arena_classifier,
    "cv": vision_transformer,
    "rl": decision_transformer,
    "nlp": language_model,
}
