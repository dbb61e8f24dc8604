"""Load checkpoints of the published research code: `load_official(state_dict, kind)`.

The published attention reads padding. A loaded model does the same and so gives the published numbers. Set
`model.attend_to_padding = False` (uea) or `model.published_padding = False` (lra) to respect masks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from primal_attention.official.checkpoints import State, load_d4rl, load_image, load_lm, load_lra, load_uea

# The kinds have the names of the published code bases.
LOADERS: dict[str, Callable[[State, int | None], nn.Module]] = {
    "uea": load_uea,
    "lra": load_lra,
    "cv": load_image,
    "rl": load_d4rl,
    "nlp": load_lm,
}


def load_official(state_dict: State, kind: str, *, num_heads: int | None = None) -> nn.Module:
    """Return the model of this library that computes what a published checkpoint computes.

    Args:
        state_dict: The tensors of the checkpoint by name.
        kind: The published code base: "uea", "lra", "cv" (DeiT, also timm's with one class token), "nlp" (a
            decoder-only language model) or "rl" (a Decision Transformer, also a DecisionTransformerModel of
            transformers; the moments of the states are not in it, see `set_state_moments`).
        num_heads: Needed only where no layer is Primal, since softmax weights do not determine it.

    Returns:
        The model, with the dtype of the checkpoint.
    """
    if kind not in LOADERS:
        raise ValueError(f"kind must be one of {', '.join(LOADERS)} (got {kind!r})")
    return LOADERS[kind](state_dict, num_heads)
