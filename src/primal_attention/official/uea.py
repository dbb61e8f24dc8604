"""The published time-series classifiers."""

from __future__ import annotations

from torch import Tensor

from primal_attention.models.uea import TimeSeriesClassifier, paper_classifier
from primal_attention.official.state import (
    State,
    count_layers,
    join_projections,
    read_heads,
    rename_maps,
    rename_primal,
)


def load_uea(state: State, num_heads: int | None) -> TimeSeriesClassifier:
    layers = count_layers(state, "encoder.attn_layers.")
    if layers == 0 or "output_layer.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published UEA models: it has no encoder.attn_layers or output_layer"
        )
    weights = [f"encoder.attn_layers.{i}.attention.We" for i in range(layers)]
    names, num_heads, primal = read_heads(state, weights, num_heads)
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
        attention_kwargs={"primal": primal} if primal else {},
        attend_to_padding=True,
    )
    pairs = {"stem.proj": "project_inp", "encoder.norm": "encoder.norm", "head.proj": "output_layer"}
    ours = {**rename_maps(state, pairs), "stem.positions": state["pos_enc.pe"].squeeze(1)}
    for i, name in enumerate(names):
        ours |= _block(state, f"encoder.attn_layers.{i}.", f"encoder.blocks.{i}.", name)
    model.to(ours["stem.proj.weight"].dtype).load_state_dict(ours)
    return model


def _block(state: State, theirs: str, ours: str, attention: str) -> dict[str, Tensor]:
    pairs = {"norm1": "norm1", "norm2": "norm2", "attention.out_proj": "attention.out_projection"}
    if attention == "primal":
        pairs["attention.score_proj"] = "attention.inner_attention.concate_weight"
    block = rename_maps(state, pairs, ours, theirs)
    for index, conv in ((0, "conv1"), (3, "conv2")):  # the published feed-forward maps are convolutions of width one
        block[f"{ours}feed_forward.{index}.weight"] = state[f"{theirs}{conv}.weight"].squeeze(-1)
        block[f"{ours}feed_forward.{index}.bias"] = state[f"{theirs}{conv}.bias"]
    inputs = ("query", "key") if attention == "primal" else ("query", "key", "value")
    joined = f"{ours}attention.{'qk_proj' if attention == 'primal' else 'in_proj'}"
    block |= join_projections(state, joined, [f"{theirs}attention.{name}_projection" for name in inputs])
    if attention == "primal":
        published = (f"{theirs}attention.{name}" for name in ("We", "Wr", "inner_attention.Lambda"))
        block |= rename_primal(state, f"{ours}attention.", *published)
    return block
