"""The four modes of PrimalAttention as small float64 layers: the cases that most tests of the core run over."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention import PrimalAttention

EMBED, HEADS = 12, 3
MAX_LENGTH = 24

# Name of the mode → the keywords that make it. Landmarks are few enough to leave gaps and to repeat on short input.
MODES: dict[str, dict[str, Any]] = {
    "plain": {"data_dependent": False},
    "data_dependent": {},
    "causal": {"data_dependent": False, "causal": True},
    "causal_data_dependent": {"causal": True, "max_length": MAX_LENGTH},
}
CAUSAL = [name for name, keywords in MODES.items() if keywords.get("causal")]

# (mode, decay): every mode has a decay but the data-dependent one that is not causal.
MODES_AND_DECAYS = [(name, None) for name in MODES] + [(name, "learned") for name in MODES if name != "data_dependent"]
CAUSAL_AND_DECAYS = [case for case in MODES_AND_DECAYS if case[0] in CAUSAL]


def make(mode: str, decay: Any = None, **keywords: Any) -> PrimalAttention:
    """A layer of the mode, float64 unless told otherwise, with every parameter away from zero."""
    merged = {"rank": 4, "landmarks": 6, "dtype": torch.float64, **MODES[mode], "decay": decay, **keywords}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a large rank has a test of its own
        layer = PrimalAttention(EMBED, HEADS, **merged)
    with torch.no_grad():
        layer.w_e.mul_(2.0)
        layer.w_r.mul_(2.0)
    return layer


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, EMBED, dtype=dtype)


def gradients(layer: nn.Module, loss: Tensor, *, keep_graph: bool = False) -> dict[str, Tensor]:
    """The gradient of every parameter; one that the loss does not reach counts as zero."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep_graph)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}
