"""Published checkpoints under this library's names, one loader per code base.

A loader reads the sizes from the shapes of the weights, builds the model of this library, and renames the weights.
`Block` lists the published names of a block's parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.models.image import ImageClassifier, deit, find_blocks
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.models.lra import LRAClassifier
from primal_attention.models.uea import TimeSeriesClassifier, paper_classifier

State = Mapping[str, Tensor]
Maps = Mapping[str, str | tuple[str, ...]]  # our name → the published one, or several whose rows are joined


class Layers(NamedTuple):
    """The attention of each layer by name, and the sizes of the Primal layers."""

    names: list[str]
    num_heads: int
    primal: dict[str, int]  # rank and landmarks; empty without a Primal layer

    @property
    def sizes(self) -> dict[str, Any]:
        return {"attention": tuple(self.names), "num_heads": self.num_heads, "layers": len(self.names)}


class Block(NamedTuple):
    """The published names of the parts of a block."""

    maps: Maps  # linear maps and norms of every block
    softmax: Maps  # further maps of a block with softmax attention
    primal: Maps  # further maps of a block with Primal-Attention
    weights: tuple[str, str, str]  # W_e, W_r and √Λ


def check_names(state: State, what: str, *required: str) -> None:
    """Raise if the checkpoint has no name that begins with one of these."""
    for name in required:
        if not any(key.startswith(name) for key in state):
            raise ValueError(f"state_dict is not one of the published {what}: it has no {name.rstrip('._')}")


def read_layers(state: State, prefix: str, w_e: str, num_heads: int | None) -> Layers:
    """Return the attention of each layer.

    Args:
        state: The checkpoint.
        prefix: Prefix of the names of the layers, before their number.
        w_e: The name of W_e in a Primal layer.
        num_heads: The number of heads; needed where no layer is Primal.
    """
    layer = re.compile(re.escape(prefix) + r"(\d+)\.")
    count = 1 + max(int(match[1]) for name in state if (match := layer.match(name)))
    weights = [state.get(f"{prefix}{i}.{w_e}") for i in range(count)]
    primal: dict[str, int] = {}
    for weight in weights:
        if weight is not None:
            num_heads, landmarks, rank = weight.shape
            primal = {"rank": rank, "landmarks": landmarks}
    if num_heads is None:
        raise ValueError("num_heads must be given: softmax layers alone do not determine it")
    return Layers(["softmax" if weight is None else "primal" for weight in weights], num_heads, primal)


def rename_maps(state: State, maps: Maps, ours: str = "", theirs: str = "") -> dict[str, Tensor]:
    """Return weights and biases of maps and norms; `ours` and `theirs` are prefixes of the names."""
    renamed = {}
    for new, old in maps.items():
        parts = (old,) if isinstance(old, str) else old
        for end in ("weight", "bias"):
            renamed[f"{ours}{new}.{end}"] = torch.cat([state[f"{theirs}{part}.{end}"] for part in parts])
    return renamed


def rename_blocks(state: State, prefix: str, block: Block, layers: Layers, ours: str = "blocks") -> dict[str, Tensor]:
    """Return the weights of all blocks."""
    renamed: dict[str, Tensor] = {}
    for i, attention in enumerate(layers.names):
        new, old = f"{ours}.{i}.", f"{prefix}{i}."
        is_primal = attention == "primal"
        renamed |= rename_maps(state, {**block.maps, **(block.primal if is_primal else block.softmax)}, new, old)
        if is_primal:
            names = zip(("w_e", "w_r", "sqrt_lambda"), block.weights, strict=True)
            renamed |= {f"{new}attention.{name}": state[old + published] for name, published in names}
    return renamed


# Time series

UEA = Block(
    maps={
        "norm1": "norm1",
        "norm2": "norm2",
        "feed_forward.0": "conv1",
        "feed_forward.3": "conv2",
        "attention.out_proj": "attention.out_projection",
    },
    softmax={"attention.in_proj": tuple(f"attention.{name}_projection" for name in ("query", "key", "value"))},
    primal={
        "attention.qk_proj": tuple(f"attention.{name}_projection" for name in ("query", "key")),
        "attention.score_proj": "attention.inner_attention.concate_weight",
    },
    weights=("attention.We", "attention.Wr", "attention.inner_attention.Lambda"),
)


def load_uea(state: State, num_heads: int | None) -> TimeSeriesClassifier:
    """Return a published time-series classifier."""
    prefix = "encoder.attn_layers."
    check_names(state, "UEA models", prefix, "output_layer.")
    layers = read_layers(state, prefix, UEA.weights[0], num_heads)
    max_length, _, width = state["pos_enc.pe"].shape
    model = paper_classifier(
        state["project_inp.weight"].shape[1],
        len(state["output_layer.bias"]),
        max_length,
        embed_dim=width,
        **layers.sizes,
        ffn_dim=len(state[f"{prefix}0.conv1.weight"]),
        attention_kwargs={"primal": layers.primal} if layers.primal else {},
        attend_to_padding=True,
    )
    maps = {"stem.proj": "project_inp", "encoder.norm": "encoder.norm", "head.proj": "output_layer"}
    ours = {**rename_maps(state, maps), "stem.positions": state["pos_enc.pe"].squeeze(1)}
    for name, weight in rename_blocks(state, prefix, UEA, layers, "encoder.blocks").items():
        ours[name] = weight.squeeze(-1) if "feed_forward" in name else weight  # published as convolutions of width one
    model.to(state["project_inp.weight"].dtype).load_state_dict(ours)
    return model


# Long-Range Arena

LRA = Block(
    maps={
        "norm1": "norm1",
        "norm2": "norm2",
        "feed_forward.0": "mlpblock.0",
        "feed_forward.3": "mlpblock.3",
        "attention.out_proj": "mha.ff",
    },
    softmax={"attention.in_proj": ("mha.W_q", "mha.W_k", "mha.W_v")},
    primal={"attention.qk_proj": ("mha.W_q", "mha.W_k"), "attention.score_proj": "mha.attn.concate_weight"},
    weights=("mha.We", "mha.Wr", "mha.attn.Lambda"),
)


def load_lra(state: State, num_heads: int | None) -> LRAClassifier:
    """Return a published classifier of Long-Range Arena."""
    prefix, head = "model.transformer_", "seq_classifer.mlpblock."  # spelt like this
    check_names(state, "LRA models", prefix, head)
    layers = read_layers(state, prefix, LRA.weights[0], num_heads)
    tokens, positions = (state[f"model.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
    hidden = state[f"{head}0.weight"]
    model = LRAClassifier(
        len(tokens),
        len(state[f"{head}2.bias"]),
        len(positions),
        embed_dim=tokens.shape[1],
        **layers.sizes,
        ffn_dim=len(hidden),
        pairs=hidden.shape[1] == 4 * tokens.shape[1],
        attention_kwargs={"primal": layers.primal} if layers.primal else {},
        published_padding=True,
    )
    ours = {"stem.tokens.weight": tokens, "stem.positions.weight": positions}
    ours |= rename_maps(state, {"encoder.norm": "model.norm", "head.0": f"{head}0", "head.2": f"{head}2"})
    ours |= rename_blocks(state, prefix, LRA, layers, "encoder.blocks")
    model.to(tokens.dtype).load_state_dict(ours)
    return model


# Language models

LM = Block(
    maps={
        "norm1": "self_attn_layer_norm",
        "norm2": "final_layer_norm",
        "feed_forward.0": "fc1",
        "feed_forward.3": "fc2",
        "attention.out_proj": "self_attn.out_proj",
    },
    softmax={"attention.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    primal={
        "attention.qk_proj": ("self_attn.q_proj", "self_attn.k_proj"),
        "attention.score_proj": "self_attn.concate_weight",
    },
    weights=("self_attn.We", "self_attn.Wr", "self_attn.Lambda"),
)


def load_lm(state: State, num_heads: int | None) -> LanguageModel:
    """Return a published decoder. Its vocabulary is in a file of its own."""
    prefix = "decoder.layers."
    check_names(state, "language models", prefix, "decoder.embed_tokens.")
    layers = read_layers(state, prefix, LM.weights[0], num_heads)
    embeddings = state["decoder.embed_tokens.weight"]
    config = LanguageConfig(
        len(embeddings),
        embed_dim=embeddings.shape[1],
        **layers.sizes,
        ffn_dim=len(state[f"{prefix}0.fc1.weight"]),
        activation="relu",
        primal_mode="mean",
        rank=layers.primal.get("rank", 30),
        positions="sinusoidal",
        initializer_range=None,
    )
    ours = {"embedding.weight": embeddings, **rename_maps(state, {"norm": "decoder.layer_norm"})}
    model = LanguageModel(config).to(embeddings.dtype)
    model.load_state_dict({**ours, **rename_blocks(state, prefix, LM, layers)})
    return model


# Decision Transformers

D4RL = Block(
    maps={"norm1": "ln_1", "norm2": "ln_2", "feed_forward.0": "mlp.c_fc", "feed_forward.2": "mlp.c_proj"},
    softmax={"attention.in_proj": "attn.c_attn", "attention.out_proj": "attn.c_proj"},
    primal={
        "attention.qk_proj": ("attn.att.query_projection", "attn.att.key_projection"),
        "attention.score_proj": "attn.att.concate_weight",
        "attention.out_proj": "attn.att.out_projection",
    },
    weights=("attn.att.We", "attn.att.Wr", "attn.att.Lambda"),
)


def load_d4rl(state: State, num_heads: int | None) -> DecisionTransformer:
    """Return a Decision Transformer of the research code ("transformer.") or of transformers ("encoder.")."""
    trunk = "encoder." if "encoder.ln_f.weight" in state else "transformer."
    prefix = f"{trunk}h."
    check_names(state, "Decision Transformers", prefix, "predict_action.")
    layers = read_layers(state, prefix, D4RL.weights[0], num_heads)
    action_dim, width = state["predict_action.0.weight"].shape
    model = DecisionTransformer(
        state["embed_state.weight"].shape[1],
        action_dim,
        embed_dim=width,
        **layers.sizes,
        max_episode=len(state["embed_timestep.weight"]),
        attention_kwargs={"primal": {"rank": layers.primal["rank"]}} if layers.primal else {},
    )
    maps = {"return_map": "embed_return", "state_map": "embed_state", "action_map": "embed_action"}
    maps |= {"embed_norm": "embed_ln", "norm": f"{trunk}ln_f", "action_head": "predict_action.0"}
    ours = {"time_stamps.weight": state["embed_timestep.weight"], **rename_maps(state, maps)}
    if trunk == "encoder.":
        # transformers adds the embedding of its first position to every token; the research code has no positions.
        ours["embed_norm.bias"] = ours["embed_norm.bias"] + state["encoder.wpe.weight"][0]
    is_transposed = re.compile(r"\.(c_attn|c_fc|c_proj)\.weight$").search  # GPT-2 stores (in, out)
    state = {name: weight.T if is_transposed(name) else weight for name, weight in state.items()}
    ours |= rename_blocks(state, prefix, D4RL, layers)
    model.to(ours["state_map.weight"].dtype).load_state_dict({**model.state_dict(), **ours})
    return model


# Images: the published models have timm's names

IMAGE_PRIMAL = {
    "qk.": "primal.qk_proj.",
    "proj.": "primal.out_proj.",
    "concate_weight.": "primal.score_proj.",
    "we": "primal.w_e",
    "wr": "primal.w_r",
    "Lambda": "primal.sqrt_lambda",
}
# timm's names → those of the ViT in transformers.
TIMM_TO_TRANSFORMERS = (
    (r"^cls_token", "vit.embeddings.cls_token"),
    (r"^pos_embed", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^blocks\.", "vit.layers."),
    (r"^norm\.", "vit.layernorm."),
    (r"^head\.", "classifier."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.attn\.", ".attention."),
)


def load_image(state: State, num_heads: int | None) -> ImageClassifier:
    """Return the model of a checkpoint of the research code, or of a DeiT or ViT of timm with one class token."""
    check_names(state, "image models", "blocks.", "pos_embed", "head.weight")
    layers = read_layers(state, "blocks.", "attn.we", num_heads)
    width, _, patch, _ = state["patch_embed.proj.weight"].shape
    model = deit(
        len(state["head.weight"]),
        image_size=math.isqrt(state["pos_embed"].shape[1] - 1) * patch,
        patch_size=patch,
        embed_dim=width,
        **layers.sizes,
        mlp_ratio=len(state["blocks.0.mlp.fc1.bias"]) // width,
        drop_path=0.0,
        rank=layers.primal.get("rank", 1),
        landmarks=layers.primal.get("landmarks"),
    )
    ours = {_rename_image_weight(name, layers.names): weight for name, weight in state.items()}
    if find_blocks(model.backbone) is not getattr(model.backbone, "blocks", None):
        ours = dict(item for name, weight in ours.items() for item in _for_transformers(name, weight))
    model.backbone.to(state["head.weight"].dtype).load_state_dict(ours)
    return model


def _rename_image_weight(name: str, attention: list[str]) -> str:
    """Return timm's name of a weight, or that of `primalize` in a Primal layer."""
    parts = re.match(r"(blocks\.(\d+)\.attn\.)(.*)", name)
    if not parts or attention[int(parts[2])] == "softmax":
        return name
    for theirs, ours in IMAGE_PRIMAL.items():
        if parts[3].startswith(theirs):
            return parts[1] + ours + parts[3].removeprefix(theirs)
    raise ValueError(f"state_dict has {name}, which no published image model has")


def _for_transformers(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    joint = re.match(r"(blocks\.\d+\.attn\.)qkv\.(weight|bias)$", name)
    named = [(name, weight)]
    if joint:  # one projection for q, k and v
        named = [(f"{joint[1]}{part}_proj.{joint[2]}", w) for part, w in zip("qkv", weight.chunk(3), strict=True)]
    for pattern, ours in TIMM_TO_TRANSFORMERS:
        named = [(re.sub(pattern, ours, n), w) for n, w in named]
    return named
