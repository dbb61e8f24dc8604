"""Published language models, with or without Primal-Attention, by the names of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.official.heads import count_layers, read_heads

State = Mapping[str, Tensor]


def language_model(state: State, num_heads: int | None) -> LanguageModel:
    """The decoder of a checkpoint; its vocabulary is a file of its own."""
    layers = count_layers(state, "decoder.layers.")
    if layers == 0 or "decoder.embed_tokens.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published language models: it has no decoder.layers or decoder.embed_tokens"
        )
    attention = [f"decoder.layers.{i}.self_attn." for i in range(layers)]
    names, num_heads, primal = read_heads(state, [f"{prefix}We" for prefix in attention], num_heads)
    rank = primal.get("rank", 30)
    embeddings = state["decoder.embed_tokens.weight"]
    config = LanguageConfig(
        len(embeddings),
        attention=tuple(names),
        embed_dim=embeddings.shape[1],
        num_heads=num_heads,
        layers=layers,
        ffn_dim=len(state["decoder.layers.0.fc1.weight"]),
        activation="relu",
        rank=rank,
        positions="sinusoidal",
    )
    ours = {"embedding.weight": embeddings}
    ours |= {f"norm.{end}": state[f"decoder.layer_norm.{end}"] for end in ("weight", "bias")}
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
    kinds, joined = (("q", "k"), "qk_proj") if attention == "primal" else (("q", "k", "v"), "in_proj")
    if attention == "primal":
        pairs["attention.score_proj"] = "self_attn.concate_weight"
    block: dict[str, Tensor] = {}
    for end in ("weight", "bias"):
        block |= {f"{ours}{a}.{end}": state[f"{theirs}{b}.{end}"] for a, b in pairs.items()}
        parts = [state[f"{theirs}self_attn.{kind}_proj.{end}"] for kind in kinds]
        block[f"{ours}attention.{joined}.{end}"] = torch.cat(parts)
    if attention == "primal":
        for a, b in (("w_e", "We"), ("w_r", "Wr"), ("sqrt_lambda", "Lambda")):
            block[f"{ours}attention.{a}"] = state[f"{theirs}self_attn.{b}"]
    return block
