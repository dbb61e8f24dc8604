"""Read published checkpoints: the attention of each layer, and weights under this library's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class Heads(NamedTuple):
    """The attention of each layer by name, and the sizes of the Primal layers."""

    names: list[str]
    num_heads: int
    primal: dict[str, int]  # rank and landmarks


def count_layers(state: State, prefix: str) -> int:
    """Return the number of layers under a prefix such as "encoder.attn_layers."."""
    layer = re.compile(re.escape(prefix) + r"(\d+)\.")
    return 1 + max((int(m[1]) for name in state if (m := layer.match(name))), default=-1)


def read_heads(state: State, weights: Sequence[str], num_heads: int | None) -> Heads:
    """Return the attention of each layer.

    Args:
        state: The checkpoint.
        weights: The name that W_e has in each layer, if the layer is Primal.
        num_heads: The number of heads; needed where no layer is Primal.
    """
    names = ["primal" if name in state else "softmax" for name in weights]
    primal: dict[str, int] = {}
    if "primal" in names:
        num_heads, landmarks, rank = state[weights[names.index("primal")]].shape
        primal = {"rank": rank, "landmarks": landmarks}
    if num_heads is None:
        raise ValueError("num_heads must be given: softmax layers alone do not determine it")
    return Heads(names, num_heads, primal)


def rename_maps(state: State, pairs: Mapping[str, str], ours: str = "", theirs: str = "") -> dict[str, Tensor]:
    """Return weights and biases of maps and norms; pairs: our name → the published one, after the prefixes."""
    return {
        f"{ours}{new}.{end}": state[f"{theirs}{old}.{end}"] for new, old in pairs.items() for end in ("weight", "bias")
    }


def join_projections(state: State, name: str, published: Sequence[str]) -> dict[str, Tensor]:
    """Return one projection whose rows are those of several published ones: q, k and, for softmax, v."""
    return {f"{name}.{end}": torch.cat([state[f"{old}.{end}"] for old in published]) for end in ("weight", "bias")}


def rename_primal(state: State, ours: str, w_e: str, w_r: str, sqrt_lambda: str) -> dict[str, Tensor]:
    """Return the parameters of a Primal layer that are not maps."""
    return {f"{ours}w_e": state[w_e], f"{ours}w_r": state[w_r], f"{ours}sqrt_lambda": state[sqrt_lambda]}
