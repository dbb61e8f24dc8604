"""Checkpoints of the authors' language models give the logits of a plain implementation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention import load_official

WIDTH, HEADS, HIDDEN, WORDS, RANK = 256, 8, 40, 23, 30


def checkpoint() -> dict[str, Tensor]:
    """Two layers, softmax and Primal, under the names of the published checkpoints."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.1

    state = {"decoder.embed_tokens.weight": draw(WORDS, WIDTH), "decoder.version": torch.tensor([3.0])}
    sizes = {"fc1": (HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN)}
    sizes |= {f"self_attn.{kind}_proj": (WIDTH, WIDTH) for kind in ("q", "k", "v", "out")}
    for i in range(2):
        prefix = f"decoder.layers.{i}."
        for name, shape in sizes.items():
            if not (i == 1 and name == "self_attn.v_proj"):
                state |= {f"{prefix}{name}.weight": draw(*shape), f"{prefix}{name}.bias": draw(shape[0])}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            state |= {f"{prefix}{norm}.weight": 1 + draw(WIDTH), f"{prefix}{norm}.bias": draw(WIDTH)}
    state |= {"decoder.layer_norm.weight": 1 + draw(WIDTH), "decoder.layer_norm.bias": draw(WIDTH)}
    head = WIDTH // HEADS
    primal = {"We": draw(HEADS, head, RANK), "Wr": draw(HEADS, head, RANK), "Lambda": draw(HEADS, RANK)}
    primal |= {"concate_weight.weight": draw(head, 2 * RANK), "concate_weight.bias": draw(head)}
    return state | {f"decoder.layers.1.self_attn.{name}": value for name, value in primal.items()}


def test_the_decoder_is_pre_norm_relu_with_sinusoids() -> None:
    state = checkpoint()
    tokens = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = plain_decoder(state, tokens)
    # The angles of the positions are computed in float32.
    torch.testing.assert_close(load_official(state, "nlp").eval()(tokens), expected, rtol=0.0, atol=2e-6)


def plain_decoder(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"])

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    half = WIDTH // 2
    speed = torch.exp(-torch.arange(half).double() * torch.log(torch.tensor(1e4).double()) / (half - 1))
    angle = (torch.arange(tokens.shape[1]) + 2.0)[:, None] * speed
    embedding = state["decoder.embed_tokens.weight"]
    x = embedding[tokens] * WIDTH**0.5 + torch.cat([angle.sin(), angle.cos()], dim=1)
    for i in range(2):
        layer = f"decoder.layers.{i}"
        h = norm(x, f"{layer}.self_attn_layer_norm")
        q, k = (heads(linear(h, f"{layer}.self_attn.{kind}_proj")) for kind in "qk")
        if i == 0:
            v = heads(linear(h, f"{layer}.self_attn.v_proj"))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            count = torch.arange(1, tokens.shape[1] + 1)[:, None]
            q, k = (F.normalize(z.cumsum(dim=2) / count, dim=-1) for z in (q, k))
            e, r = q @ state[f"{layer}.self_attn.We"], k @ state[f"{layer}.self_attn.Wr"]
            o = linear(torch.cat([e, r], dim=-1), f"{layer}.self_attn.concate_weight")
        x = x + linear(o.transpose(1, 2).flatten(2), f"{layer}.self_attn.out_proj")
        x = x + linear(linear(norm(x, f"{layer}.final_layer_norm"), f"{layer}.fc1").relu(), f"{layer}.fc2")
    return norm(x, "decoder.layer_norm") @ embedding.T


def test_softmax_checkpoints_need_the_number_of_heads() -> None:
    softmax = {k: v for k, v in checkpoint().items() if ".layers.1." not in k}
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_official(softmax, "nlp")
    assert load_official(softmax, "nlp", num_heads=8).attention_names == ("softmax",)
