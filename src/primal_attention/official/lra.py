"""The published classifiers of Long-Range Arena."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primal_attention.models.lra import LRAClassifier
from primal_attention.official.heads import count_layers, read_heads

State = Mapping[str, Tensor]


def arena_classifier(state: State, num_heads: int | None) -> LRAClassifier:
    layers = count_layers(state, "model.transformer_")
    if layers == 0 or "seq_classifer.mlpblock.0.weight" not in state:  # their spelling
        raise ValueError("state_dict is not one of the published LRA models: it has no transformer_0 or seq_classifer")
    attention = [f"model.transformer_{i}.mha." for i in range(layers)]
    names, num_heads, primal = read_heads(state, [f"{prefix}We" for prefix in attention], num_heads)
    keywords = {"primal": primal} if primal else {}
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
        attention_kwargs=keywords,
        published_padding=True,
    )
    ours = {"stem.tokens.weight": tokens, "stem.positions.weight": positions}
    pairs = {"encoder.norm": "model.norm", "head.0": "seq_classifer.mlpblock.0", "head.2": "seq_classifer.mlpblock.2"}
    ours |= {f"{a}.{end}": state[f"{b}.{end}"] for a, b in pairs.items() for end in ("weight", "bias")}
    for i, name in enumerate(names):
        ours |= _block(state, i, name)
    model.to(tokens.dtype).load_state_dict(ours)
    return model


def _block(state: State, index: int, attention: str) -> dict[str, Tensor]:
    theirs, ours = f"model.transformer_{index}.", f"encoder.blocks.{index}."
    pairs = {
        "norm1": "norm1",
        "norm2": "norm2",
        "feed_forward.0": "mlpblock.0",
        "feed_forward.3": "mlpblock.3",
        "attention.out_proj": "mha.ff",
    }
    kinds = ("q", "k") if attention == "primal" else ("q", "k", "v")
    if attention == "primal":
        pairs["attention.score_proj"] = "mha.attn.concate_weight"
    block: dict[str, Tensor] = {}
    for end in ("weight", "bias"):
        block |= {f"{ours}{a}.{end}": state[f"{theirs}{b}.{end}"] for a, b in pairs.items()}
        joined = torch.cat([state[f"{theirs}mha.W_{kind}.{end}"] for kind in kinds])
        block[f"{ours}attention.{'qk_proj' if attention == 'primal' else 'in_proj'}.{end}"] = joined
    if attention == "primal":
        block[f"{ours}attention.w_e"] = state[f"{theirs}mha.We"]
        block[f"{ours}attention.w_r"] = state[f"{theirs}mha.Wr"]
        block[f"{ours}attention.sqrt_lambda"] = state[f"{theirs}mha.attn.Lambda"]
    return block
