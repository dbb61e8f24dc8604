"""Published Decision Transformers, with or without Primal-Attention, by the names of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.official.heads import count_layers, read_heads

State = Mapping[str, Tensor]


def decision_transformer(state: State, num_heads: int | None) -> DecisionTransformer:
    """The model of a checkpoint of the research code (trunk "transformer.") or of transformers ("encoder.")."""
    trunk = "encoder." if "encoder.ln_f.weight" in state else "transformer."
    layers = count_layers(state, f"{trunk}h.")
    if layers == 0 or "predict_action.0.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published Decision Transformers: it has no transformer.h or predict_action"
        )
    attention = [f"{trunk}h.{i}.attn." for i in range(layers)]
    names, num_heads, primal = read_heads(state, [f"{prefix}att.We" for prefix in attention], num_heads)
    keywords = {"primal": {"rank": primal["rank"]}} if primal else {}
    action_dim, width = state["predict_action.0.weight"].shape
    model = DecisionTransformer(
        state["embed_state.weight"].shape[1],
        action_dim,
        attention=names,
        embed_dim=width,
        num_heads=num_heads,
        layers=layers,
        max_episode=len(state["embed_timestep.weight"]),
        attention_kwargs=keywords,
    )
    ours = {"time_stamps.weight": state["embed_timestep.weight"]}
    pairs = {"return_map": "embed_return", "state_map": "embed_state", "action_map": "embed_action"}
    pairs |= {"embed_norm": "embed_ln", "norm": f"{trunk}ln_f", "action_head": "predict_action.0"}
    ours |= {f"{a}.{end}": state[f"{b}.{end}"] for a, b in pairs.items() for end in ("weight", "bias")}
    if trunk == "encoder.":
        # transformers adds its first position's embedding to every token; the research code has no positions there.
        ours["embed_norm.bias"] = ours["embed_norm.bias"] + state["encoder.wpe.weight"][0]
    for i, name in enumerate(names):
        ours |= _block(state, f"{trunk}h.{i}.", f"blocks.{i}.", name)
    model.to(ours["state_map.weight"].dtype).load_state_dict({**model.state_dict(), **ours})
    return model


def _block(state: State, theirs: str, ours: str, attention: str) -> dict[str, Tensor]:
    linear = {"norm1": "ln_1", "norm2": "ln_2"}
    transposed = {"feed_forward.0": "mlp.c_fc", "feed_forward.2": "mlp.c_proj"}  # GPT-2 stores (in, out)
    if attention == "primal":
        linear |= {"attention.out_proj": "attn.att.out_projection", "attention.score_proj": "attn.att.concate_weight"}
    else:
        transposed |= {"attention.in_proj": "attn.c_attn", "attention.out_proj": "attn.c_proj"}
    block = {f"{ours}{a}.{end}": state[f"{theirs}{b}.{end}"] for a, b in linear.items() for end in ("weight", "bias")}
    block |= {f"{ours}{a}.weight": state[f"{theirs}{b}.weight"].T for a, b in transposed.items()}
    block |= {f"{ours}{a}.bias": state[f"{theirs}{b}.bias"] for a, b in transposed.items()}
    if attention == "primal":
        for end in ("weight", "bias"):
            kinds = [state[f"{theirs}attn.att.{kind}_projection.{end}"] for kind in ("query", "key")]
            block[f"{ours}attention.qk_proj.{end}"] = torch.cat(kinds)
        block |= {
            f"{ours}attention.{a}": state[f"{theirs}attn.att.{b}"]
            for a, b in (("w_e", "We"), ("w_r", "Wr"), ("sqrt_lambda", "Lambda"))
        }
    return block
