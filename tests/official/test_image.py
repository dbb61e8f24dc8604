"""Checkpoints of the authors' image models give the authors' attention and logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from golden_files import load, storage_ratio
from primal_attention import PrimalAttention
from primal_attention.nn.objective import primal_layers
from primal_attention.official import load_official


def published_state(golden: dict[str, Tensor], meta: dict) -> dict[str, Tensor]:
    """A published checkpoint of one softmax layer and one Primal layer, the latter with the golden weights."""
    tokens, width = meta["N"], meta["H"] * meta["head_dim"]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = {
        "cls_token": draw(1, 1, width),
        "pos_embed": draw(1, tokens, width),
        "patch_embed.proj.weight": draw(width, 3, 2, 2),
        "patch_embed.proj.bias": draw(width),
    }
    for i in range(2):
        for name, shape in (("norm1", (width,)), ("norm2", (width,)), ("mlp.fc1", (4 * width, width)),
                            ("mlp.fc2", (width, 4 * width))):  # fmt: skip
            state |= {f"blocks.{i}.{name}.weight": draw(*shape), f"blocks.{i}.{name}.bias": draw(shape[0])}
    state |= {"blocks.0.attn.qkv.weight": draw(3 * width, width), "blocks.0.attn.qkv.bias": draw(3 * width)}
    state |= {"blocks.0.attn.proj.weight": draw(width, width), "blocks.0.attn.proj.bias": draw(width)}
    names = {"qk.weight": "Wqk", "qk.bias": "bqk", "we": "We", "wr": "Wr", "Lambda": "Lambda"}
    names |= {"concate_weight.weight": "Wo", "concate_weight.bias": "bo", "proj.weight": "Wout", "proj.bias": "bout"}
    state |= {f"blocks.1.attn.{theirs}": golden[f"p_{key}"] for theirs, key in names.items()}
    state |= {"norm.weight": draw(width), "norm.bias": draw(width)}
    return state | {"head.weight": draw(7, width), "head.bias": draw(7)}


def by_hand(state: dict[str, Tensor], images: Tensor, heads: int, primal: PrimalAttention) -> Tensor:
    """The published network in plain torch, in timm's layout."""
    F = nn.functional
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=2)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x.flatten(2).mT], 1) + state["pos_embed"]
    width = x.shape[-1]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    for i in range(2):
        y = norm(f"blocks.{i}.norm1", x)
        if i:
            y = primal(y)
        else:
            q, k, v = linear("blocks.0.attn.qkv", y).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            y = linear("blocks.0.attn.proj", F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + y
        x = x + linear(f"blocks.{i}.mlp.fc2", F.gelu(linear(f"blocks.{i}.mlp.fc1", norm(f"blocks.{i}.norm2", x))))
    return linear("head", norm("norm", x)[:, 0])


def test_a_published_checkpoint_gives_the_published_attention_and_logits() -> None:
    pytest.importorskip("transformers")
    golden, meta = load("cv_N197_H2_hd32_s30_rm5_sampled")
    state = published_state(golden, meta)
    model = load_official(state, "cv").eval()
    (layer,) = primal_layers(model).values()
    y, scores = layer(golden["x"], return_scores=True)
    for what, ours in (("out", y), ("e", scores.e), ("r", scores.r)):
        assert_close(ours, golden[what], storage_ratio(golden[what], meta), what)
    images = torch.randn(2, 3, 28, 28, dtype=torch.float64)
    assert_close(model(images), by_hand(state, images, meta["H"], layer), 1e-12, "logits")


def test_softmax_checkpoints_need_the_number_of_heads() -> None:
    golden, meta = load("cv_N197_H2_hd32_s30_rm5_sampled")
    state = {k: v for k, v in published_state(golden, meta).items() if "blocks.1" not in k}
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_official(state, "cv")
    assert len(load_official(state, "cv", num_heads=2).blocks) == 1
