"""What the published checkpoints of all kinds say about their attention, read from the names and shapes in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """The attention of each layer by name, and what makes the Primal ones."""

    names: list[str]
    num_heads: int
    primal: dict[str, int]  # rank, and landmarks where the weights have rows for them


def count_layers(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many layers stand under a prefix such as "encoder.attn_layers."."""
    layer = re.compile(re.escape(prefix) + r"(\d+)\.")
    return 1 + max((int(m[1]) for name in state if (m := layer.match(name))), default=-1)


def read_heads(state: Mapping[str, Tensor], weights: Sequence[str], num_heads: int | None) -> Heads:
    """weights: the name that W_e would have in each layer; only Primal layers have it."""
    names = ["primal" if name in state else "softmax" for name in weights]
    primal: dict[str, int] = {}
    if "primal" in names:
        num_heads, landmarks, rank = state[weights[names.index("primal")]].shape
        primal = {"rank": rank, "landmarks": landmarks}
    if num_heads is None:
        raise ValueError("num_heads must be given: a checkpoint with softmax layers only does not tell it")
    return Heads(names, num_heads, primal)
