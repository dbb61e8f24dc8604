"""The published time-series classifiers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primal_attention.models.uea import TimeSeriesClassifier, paper_classifier
from primal_attention.official.heads import count_layers, read_heads

State = Mapping[str, Tensor]


def time_series_classifier(state: State, num_heads: int | None) -> TimeSeriesClassifier:
    layers = count_layers(state, "encoder.attn_layers.")
    if layers == 0 or "output_layer.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published UEA models: it has no encoder.attn_layers or output_layer"
        )
    attention = [f"encoder.attn_layers.{i}.attention." for i in range(layers)]
    names, num_heads, primal = read_heads(state, [f"{prefix}We" for prefix in attention], num_heads)
    keywords = {"primal": primal} if primal else {}
    max_length, _, width = state["pos_enc.pe"].shape
    model = paper_classifier(
        state["project_inp.weight"].shape[1],
        len(state["output_layer.bias"]),
        max_length,
        attention=names,
        embed_dim=width,
        num_heads=num_heads,
        layers=layers,
        ffn_dim=state["encoder.attn_layers.0.conv1.weight"].shape[0],
        attention_kwargs=keywords,
        attend_to_padding=True,
    )
    ours = _ends(state)
    for i, name in enumerate(names):
        ours |= _block(state, i, name)
    model.to(ours["stem.proj.weight"].dtype).load_state_dict(ours)
    return model


def _ends(state: State) -> dict[str, Tensor]:
    pairs = {"stem.proj": "project_inp", "encoder.norm": "encoder.norm", "head.proj": "output_layer"}
    ours = {f"{a}.{end}": state[f"{b}.{end}"] for a, b in pairs.items() for end in ("weight", "bias")}
    return {**ours, "stem.positions": state["pos_enc.pe"].squeeze(1)}


def _block(state: State, index: int, attention: str) -> dict[str, Tensor]:
    theirs, ours = f"encoder.attn_layers.{index}.", f"encoder.blocks.{index}."
    block: dict[str, Tensor] = {}
    for end in ("weight", "bias"):
        for norm in ("norm1", "norm2"):
            block[f"{ours}{norm}.{end}"] = state[f"{theirs}{norm}.{end}"]
        # Their feed-forward maps are convolutions of width one.
        for place, conv in ((0, "conv1"), (3, "conv2")):
            weight = state[f"{theirs}{conv}.{end}"]
            block[f"{ours}feed_forward.{place}.{end}"] = weight.squeeze(-1) if end == "weight" else weight
        kinds = ("query", "key") if attention == "primal" else ("query", "key", "value")
        joined = torch.cat([state[f"{theirs}attention.{kind}_projection.{end}"] for kind in kinds])
        block[f"{ours}attention.{'qk_proj' if attention == 'primal' else 'in_proj'}.{end}"] = joined
        block[f"{ours}attention.out_proj.{end}"] = state[f"{theirs}attention.out_projection.{end}"]
        if attention == "primal":
            scores = state[f"{theirs}attention.inner_attention.concate_weight.{end}"]
            block[f"{ours}attention.score_proj.{end}"] = scores
    if attention == "primal":
        block[f"{ours}attention.w_e"] = state[f"{theirs}attention.We"]
        block[f"{ours}attention.w_r"] = state[f"{theirs}attention.Wr"]
        block[f"{ours}attention.sqrt_lambda"] = state[f"{theirs}attention.inner_attention.Lambda"]
    return block
