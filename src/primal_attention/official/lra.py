"""The published classifiers of Long-Range Arena."""

from __future__ import annotations

from torch import Tensor

from primal_attention.models.lra import LRAClassifier
from primal_attention.official.state import (
    State,
    count_layers,
    join_projections,
    read_heads,
    rename_maps,
    rename_primal,
)


def load_lra(state: State, num_heads: int | None) -> LRAClassifier:
    layers = count_layers(state, "model.transformer_")
    if layers == 0 or "seq_classifer.mlpblock.0.weight" not in state:  # spelt like this
        raise ValueError("state_dict is not one of the published LRA models: it has no transformer_0 or seq_classifer")
    weights = [f"model.transformer_{i}.mha.We" for i in range(layers)]
    names, num_heads, primal = read_heads(state, weights, num_heads)
    tokens, positions = (state[f"model.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
    hidden = state["seq_classifer.mlpblock.0.weight"]
    model = LRAClassifier(
        len(tokens),
        len(state["seq_classifer.mlpblock.2.bias"]),
        len(positions),
        attention=names,
        embed_dim=tokens.shape[1],
        num_heads=num_heads,
        layers=layers,
        ffn_dim=len(hidden),
        pairs=hidden.shape[1] == 4 * tokens.shape[1],
        attention_kwargs={"primal": primal} if primal else {},
        published_padding=True,
    )
    pairs = {"encoder.norm": "model.norm", "head.0": "seq_classifer.mlpblock.0", "head.2": "seq_classifer.mlpblock.2"}
    ours = {"stem.tokens.weight": tokens, "stem.positions.weight": positions, **rename_maps(state, pairs)}
    for i, name in enumerate(names):
        ours |= _block(state, f"model.transformer_{i}.", f"encoder.blocks.{i}.", name)
    model.to(tokens.dtype).load_state_dict(ours)
    return model


def _block(state: State, theirs: str, ours: str, attention: str) -> dict[str, Tensor]:
    pairs = {
        "norm1": "norm1",
        "norm2": "norm2",
        "feed_forward.0": "mlpblock.0",
        "feed_forward.3": "mlpblock.3",
        "attention.out_proj": "mha.ff",
    }
    if attention == "primal":
        pairs["attention.score_proj"] = "mha.attn.concate_weight"
    block = rename_maps(state, pairs, ours, theirs)
    inputs, joined = ("qk", "qk_proj") if attention == "primal" else ("qkv", "in_proj")
    block |= join_projections(state, f"{ours}attention.{joined}", [f"{theirs}mha.W_{name}" for name in inputs])
    if attention == "primal":
        published = (f"{theirs}mha.{name}" for name in ("We", "Wr", "attn.Lambda"))
        block |= rename_primal(state, f"{ours}attention.", *published)
    return block
