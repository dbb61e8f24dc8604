"""The published language models, with or without Primal-Attention."""

from __future__ import annotations

from torch import Tensor

from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.official.state import (
    State,
    count_layers,
    join_projections,
    read_heads,
    rename_maps,
    rename_primal,
)


def load_lm(state: State, num_heads: int | None) -> LanguageModel:
    """Return the decoder of a checkpoint. Its vocabulary is in a file of its own."""
    layers = count_layers(state, "decoder.layers.")
    if layers == 0 or "decoder.embed_tokens.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published language models: it has no decoder.layers or decoder.embed_tokens"
        )
    weights = [f"decoder.layers.{i}.self_attn.We" for i in range(layers)]
    names, num_heads, primal = read_heads(state, weights, num_heads)
    embeddings = state["decoder.embed_tokens.weight"]
    config = LanguageConfig(
        len(embeddings),
        attention=tuple(names),
        embed_dim=embeddings.shape[1],
        num_heads=num_heads,
        layers=layers,
        ffn_dim=len(state["decoder.layers.0.fc1.weight"]),
        activation="relu",
        primal_mode="mean",
        rank=primal.get("rank", 30),
        positions="sinusoidal",
        initializer_range=None,
    )
    ours = {"embedding.weight": embeddings, **rename_maps(state, {"norm": "decoder.layer_norm"})}
    for i, name in enumerate(names):
        ours |= _block(state, f"decoder.layers.{i}.", f"blocks.{i}.", name)
    model = LanguageModel(config).to(embeddings.dtype)
    model.load_state_dict(ours)
    return model


def _block(state: State, theirs: str, ours: str, attention: str) -> dict[str, Tensor]:
    pairs = {
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "feed_forward.0": "fc1",
        "feed_forward.3": "fc2",
        "attention.out_proj": "self_attn.out_proj",
    }
    if attention == "primal":
        pairs["attention.score_proj"] = "self_attn.concate_weight"
    block = rename_maps(state, pairs, ours, theirs)
    inputs, joined = ("qk", "qk_proj") if attention == "primal" else ("qkv", "in_proj")
    block |= join_projections(state, f"{ours}attention.{joined}", [f"{theirs}self_attn.{name}_proj" for name in inputs])
    if attention == "primal":
        published = (f"{theirs}self_attn.{name}" for name in ("We", "Wr", "Lambda"))
        block |= rename_primal(state, f"{ours}attention.", *published)
    return block
