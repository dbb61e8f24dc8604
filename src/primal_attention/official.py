"""Checkpoints of the published research code, brought over: `load_official(state_dict, kind)`.

The published attention sees padding; a model loaded here does the same, so that its numbers are the published ones. Set
`model.attend_to_padding = False` (uea) or `model.published_padding = False` (lra) to respect masks from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from primal_attention.models.classifier import TimeSeriesClassifier, paper_classifier
from primal_attention.models.lra import LRAClassifier
from primal_attention.official_cv import vision_transformer
from primal_attention.official_nlp import language_model
from primal_attention.official_rl import decision_transformer

State = Mapping[str, Tensor]


def load_official(state_dict: State, kind: str, *, num_heads: int | None = None) -> nn.Module:
    """The model of this library that computes what the published checkpoint computes.

    kind: which of the published code bases wrote it: "uea", "lra", "cv" (DeiT, also timm's own with one class token),
        "nlp" (a decoder-only language model) or "rl" (a Decision Transformer, also in the form of transformers'
        DecisionTransformerModel; it does not hold the states' moments, see `set_state_moments`).
    num_heads: needed only where no layer is Primal, as softmax weights do not tell it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)} (got {kind!r})")
    return KINDS[kind](state_dict, num_heads)


def _uea(state: State, num_heads: int | None) -> TimeSeriesClassifier:
    layer = re.compile(r"encoder\.attn_layers\.(\d+)\.")
    layers = 1 + max((int(m[1]) for name in state if (m := layer.match(name))), default=-1)
    if layers == 0 or "output_layer.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published UEA models: it has no encoder.attn_layers or output_layer"
        )
    attention = [f"encoder.attn_layers.{i}.attention." for i in range(layers)]
    names = ["primal" if f"{prefix}We" in state else "softmax" for prefix in attention]
    keywords = {}
    if "primal" in names:
        num_heads, landmarks, rank = state[f"{attention[names.index('primal')]}We"].shape
        keywords = {"primal": {"rank": rank, "landmarks": landmarks}}
    if num_heads is None:
        raise ValueError("num_heads must be given: a checkpoint with softmax layers only does not tell it")
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
    ours = _uea_ends(state)
    for i, name in enumerate(names):
        ours |= _uea_block(state, i, name)
    model.to(ours["stem.proj.weight"].dtype).load_state_dict(ours)
    return model


def _uea_ends(state: State) -> dict[str, Tensor]:
    pairs = {"stem.proj": "project_inp", "encoder.norm": "encoder.norm", "head.proj": "output_layer"}
    ours = {f"{a}.{end}": state[f"{b}.{end}"] for a, b in pairs.items() for end in ("weight", "bias")}
    return {**ours, "stem.positions": state["pos_enc.pe"].squeeze(1)}


def _uea_block(state: State, index: int, attention: str) -> dict[str, Tensor]:
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


def _lra(state: State, num_heads: int | None) -> LRAClassifier:
    layer = re.compile(r"model\.transformer_(\d+)\.")
    layers = 1 + max((int(m[1]) for name in state if (m := layer.match(name))), default=-1)
    if layers == 0 or "seq_classifer.mlpblock.0.weight" not in state:  # their spelling
        raise ValueError("state_dict is not one of the published LRA models: it has no transformer_0 or seq_classifer")
    attention = [f"model.transformer_{i}.mha." for i in range(layers)]
    names = ["primal" if f"{prefix}We" in state else "softmax" for prefix in attention]
    keywords = {}
    if "primal" in names:
        num_heads, landmarks, rank = state[f"{attention[names.index('primal')]}We"].shape
        keywords = {"primal": {"rank": rank, "landmarks": landmarks}}
    if num_heads is None:
        raise ValueError("num_heads must be given: a checkpoint with softmax layers only does not tell it")
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
        ours |= _lra_block(state, i, name)
    model.to(tokens.dtype).load_state_dict(ours)
    return model


def _lra_block(state: State, index: int, attention: str) -> dict[str, Tensor]:
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


KINDS: dict[str, Callable[[State, int | None], nn.Module]] = {
    "uea": _uea,
    "lra": _lra,
    "cv": vision_transformer,
    "rl": decision_transformer,
    "nlp": language_model,
}
