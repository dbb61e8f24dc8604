"""Checkpoints of the authors' Decision Transformer load into `DecisionTransformer`."""

from __future__ import annotations

import torch
from torch import Tensor

from closeness import assert_close
from primal_attention.official import load_official

STATE, ACTION = 5, 3
TIGHT = 1e-11  # float64 through two small layers


def published_checkpoint(rank: int) -> dict[str, Tensor]:
    """The names and shapes of the research code's Primal.+DT, with random values."""
    d, heads, generator = 16, 2, torch.Generator().manual_seed(3)
    shapes = {"embed_timestep.weight": (40, d), "embed_ln.weight": (d,), "embed_ln.bias": (d,)}
    for name, width in (("return", 1), ("state", STATE), ("action", ACTION)):
        shapes |= {f"embed_{name}.weight": (d, width), f"embed_{name}.bias": (d,)}
    for name, width in (("state", STATE), ("return", 1), ("action.0", ACTION)):
        shapes |= {f"predict_{name}.weight": (width, d), f"predict_{name}.bias": (width,)}
    shapes |= {"transformer.wte.weight": (1, d), "transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    for i in range(2):
        h = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{h}{norm}.weight": (d,), f"{h}{norm}.bias": (d,)}
        for part, a, b in (("mlp.c_fc", d, 4 * d), ("mlp.c_proj", 4 * d, d)):
            shapes |= {f"{h}{part}.weight": (a, b), f"{h}{part}.bias": (b,)}
    for part, a, b in (("c_attn", d, 3 * d), ("c_proj", d, d)):
        shapes |= {f"transformer.h.0.attn.{part}.weight": (a, b), f"transformer.h.0.attn.{part}.bias": (b,)}
    shapes |= {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}
    att = "transformer.h.1.attn.att."
    for part in ("query_projection", "key_projection", "out_projection"):
        shapes |= {f"{att}{part}.weight": (d, d), f"{att}{part}.bias": (d,)}
    p = d // heads
    shapes |= {f"{att}concate_weight.weight": (p, 2 * rank), f"{att}concate_weight.bias": (p,)}
    shapes |= {f"{att}We": (heads, p, rank), f"{att}Wr": (heads, p, rank), f"{att}Lambda": (heads, rank)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) * 0.3 for k, s in shapes.items()}


def test_a_published_checkpoint_loads_and_its_primal_layer_is_as_written():
    state = published_checkpoint(rank=4)
    model = load_official(state, "rl").eval()
    assert model.attention_names == ("softmax", "primal")
    # The published layer by its equations: running means, unit length, W_e and W_r, one map, the output map.
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    att, scores = "transformer.h.1.attn.att.", []
    for kind, weight in (("query", "We"), ("key", "Wr")):
        z = x @ state[f"{att}{kind}_projection.weight"].T + state[f"{att}{kind}_projection.bias"]
        z = z.unflatten(-1, (2, 8)).transpose(1, 2).cumsum(2) / torch.arange(1, 10)[:, None]
        scores.append(torch.nn.functional.normalize(z, dim=-1) @ state[f"{att}{weight}"])
    heads = torch.cat(scores, -1) @ state[f"{att}concate_weight.weight"].T + state[f"{att}concate_weight.bias"]
    joined = heads.transpose(1, 2).flatten(2)
    expected = joined @ state[f"{att}out_projection.weight"].T + state[f"{att}out_projection.bias"]
    assert_close(model.blocks[1].attention(x), expected, TIGHT)
