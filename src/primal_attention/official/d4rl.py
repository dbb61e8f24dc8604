"""The published Decision Transformers, with or without Primal-Attention."""

from __future__ import annotations

from torch import Tensor

from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.official.state import (
    State,
    count_layers,
    join_projections,
    read_heads,
    rename_maps,
    rename_primal,
)


def load_d4rl(state: State, num_heads: int | None) -> DecisionTransformer:
    """Return the model of a checkpoint of the research code ("transformer.") or of transformers ("encoder.")."""
    trunk = "encoder." if "encoder.ln_f.weight" in state else "transformer."
    layers = count_layers(state, f"{trunk}h.")
    if layers == 0 or "predict_action.0.weight" not in state:
        raise ValueError(
            "state_dict is not one of the published Decision Transformers: it has no transformer.h or predict_action"
        )
    weights = [f"{trunk}h.{i}.attn.att.We" for i in range(layers)]
    names, num_heads, primal = read_heads(state, weights, num_heads)
    action_dim, width = state["predict_action.0.weight"].shape
    model = DecisionTransformer(
        state["embed_state.weight"].shape[1],
        action_dim,
        attention=names,
        embed_dim=width,
        num_heads=num_heads,
        layers=layers,
        max_episode=len(state["embed_timestep.weight"]),
        attention_kwargs={"primal": {"rank": primal["rank"]}} if primal else {},
    )
    pairs = {"return_map": "embed_return", "state_map": "embed_state", "action_map": "embed_action"}
    pairs |= {"embed_norm": "embed_ln", "norm": f"{trunk}ln_f", "action_head": "predict_action.0"}
    ours = {"time_stamps.weight": state["embed_timestep.weight"], **rename_maps(state, pairs)}
    if trunk == "encoder.":
        # transformers adds the embedding of its first position to every token; the research code has no positions.
        ours["embed_norm.bias"] = ours["embed_norm.bias"] + state["encoder.wpe.weight"][0]
    for i, name in enumerate(names):
        ours |= _block(state, f"{trunk}h.{i}.", f"blocks.{i}.", name)
    model.to(ours["state_map.weight"].dtype).load_state_dict({**model.state_dict(), **ours})
    return model


def _block(state: State, theirs: str, ours: str, attention: str) -> dict[str, Tensor]:
    pairs = {"norm1": "ln_1", "norm2": "ln_2"}
    transposed = {"feed_forward.0": "mlp.c_fc", "feed_forward.2": "mlp.c_proj"}  # GPT-2 stores (in, out)
    if attention == "primal":
        pairs |= {"attention.out_proj": "attn.att.out_projection", "attention.score_proj": "attn.att.concate_weight"}
    else:
        transposed |= {"attention.in_proj": "attn.c_attn", "attention.out_proj": "attn.c_proj"}
    block = rename_maps(state, {**pairs, **transposed}, ours, theirs)
    for name in transposed:
        block[f"{ours}{name}.weight"] = block[f"{ours}{name}.weight"].T
    if attention == "primal":
        inputs = [f"{theirs}attn.att.{name}_projection" for name in ("query", "key")]
        block |= join_projections(state, f"{ours}attention.qk_proj", inputs)
        published = (f"{theirs}attn.att.{name}" for name in ("We", "Wr", "Lambda"))
        block |= rename_primal(state, f"{ours}attention.", *published)
    return block
