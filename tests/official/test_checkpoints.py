"""Published checkpoints give the published numbers.

UEA and LRA are compared with stored arrays of the authors' code, the others with its equations in plain torch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import golden_files
from closeness import assert_close
from primal_attention import ksvd_loss, load_official
from primal_attention.nn.objective import primal_layers

TIGHT = 1e-11  # float64 through two layers; the stored arrays are float64 or exact
GOLDEN = ("full_uea_primalformer", "full_lra_primalformer_dual", "full_lra_primalplus")


# Time series and Long-Range Arena


@pytest.fixture(params=GOLDEN)
def published(request: pytest.FixtureRequest) -> tuple[dict[str, Tensor], float, str]:
    """The stored arrays, η, and the kind of checkpoint."""
    arrays, meta = golden_files.load(request.param)
    return arrays, meta["eta"], request.param.split("_")[1]


def part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def inputs(arrays: dict[str, Tensor]) -> list[Tensor]:
    """Values or tokens and padding masks, in the order of the model's arguments."""
    if "X" in arrays:
        return [arrays["X"], ~arrays["padding_mask"]]  # the published mask is True at values
    return [t for name in ("ids0", "ids1") if name in arrays for t in (arrays[name], arrays[name] == 0)]


def test_losses_and_gradients_are_the_published_ones(published) -> None:
    arrays, eta, kind = published
    model = load_official(part(arrays, "sd/"), kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    logits = model(*inputs(arrays))
    task = F.cross_entropy(logits, arrays["y"].flatten(), reduction="none")
    ksvd = ksvd_loss(model, "sample" if kind == "uea" else "batch")
    loss = task.mean() + eta * ksvd
    loss.backward()
    if "logits" in arrays:
        assert_close(logits, arrays["logits"], TIGHT, "logits")
    assert_close(task, arrays["ce_per_sample"], TIGHT, "cross-entropy")
    assert_close(ksvd, arrays["ksvd"] if "ksvd" in arrays else arrays["ksvd_per_sample"].mean(), TIGHT, "KSVD loss")
    assert_close(loss, arrays["loss_total"], TIGHT, "loss")
    gradients = dict(load_official(part(arrays, "grad/"), kind).named_parameters())
    for name, weight in model.named_parameters():
        assert_close(weight.grad, gradients[name].detach(), TIGHT, f"gradient of {name}")


def test_padding_is_read_until_that_is_switched_off(published) -> None:
    arrays, _, kind = published
    model = load_official(part(arrays, "sd/"), kind).eval()
    original = inputs(arrays)
    changed = list(original)
    for i in range(0, len(original), 2):
        assert original[i + 1].any(), "the stored batch has padding"
        mask = original[i + 1].view(*original[i + 1].shape, *[1] * (original[i].ndim - 2))
        changed[i] = original[i].masked_fill(mask, 5)
    assert not torch.allclose(model(*original), model(*changed))
    setattr(model, "attend_to_padding" if kind == "uea" else "published_padding", False)
    assert_close(model(*original), model(*changed), 1e-14)


# The other code bases: checkpoints of one softmax and one Primal layer with random values


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random float64 weights; norms have weights near one."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) + ("norm.weight" in name)
        for name, shape in shapes.items()
    }


def with_biases(maps: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of weights and biases of linear maps (out, in) and norms (width,)."""
    return {f"{name}.{end}": shape if end == "weight" else shape[:1] for name, shape in maps.items()
            for end in ("weight", "bias")}  # fmt: skip


def primal_shapes(prefix: str, heads: int, width: int, rank: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{prefix}{w}": (heads, width, rank) for w in ("We", "Wr")} | {f"{prefix}Lambda": (heads, rank)}
    return shapes | with_biases({f"{prefix}concate_weight": (width, 2 * rank)})


class Plain:
    """The parts of the published networks in plain torch."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    def causal_primal(self, prefix: str, q: Tensor, k: Tensor, heads: int) -> Tensor:
        """Running means, unit length, W_e and W_r, and the map of the scores."""
        count = torch.arange(1, q.shape[1] + 1)[:, None]
        q, k = (F.normalize(z.unflatten(-1, (heads, -1)).transpose(1, 2).cumsum(dim=2) / count, dim=-1) for z in (q, k))
        scores = torch.cat([q @ self.state[f"{prefix}We"], k @ self.state[f"{prefix}Wr"]], dim=-1)
        return self.linear(f"{prefix}concate_weight", scores).transpose(1, 2).flatten(2)


WORDS, LM_WIDTH, LM_HEADS = 23, 256, 8


def language_checkpoint() -> dict[str, Tensor]:
    maps: dict[str, tuple[int, ...]] = {"decoder.layer_norm": (LM_WIDTH,)}
    for i in range(2):
        layer = f"decoder.layers.{i}."
        maps |= {f"{layer}{kind}_layer_norm": (LM_WIDTH,) for kind in ("self_attn", "final")}
        maps |= {f"{layer}fc1": (40, LM_WIDTH), f"{layer}fc2": (LM_WIDTH, 40)}
        kinds = ("q", "k", "out") if i else ("q", "k", "v", "out")
        maps |= {f"{layer}self_attn.{kind}_proj": (LM_WIDTH, LM_WIDTH) for kind in kinds}
    shapes = {"decoder.embed_tokens.weight": (WORDS, LM_WIDTH), "decoder.version": (1,), **with_biases(maps)}
    return draw(shapes | primal_shapes("decoder.layers.1.self_attn.", LM_HEADS, LM_WIDTH // LM_HEADS, 30))


def test_a_language_model_gives_the_logits_of_a_pre_norm_relu_decoder_with_sinusoids() -> None:
    state = language_checkpoint()
    plain, embedding = Plain(state), state["decoder.embed_tokens.weight"]
    tokens = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    half = LM_WIDTH // 2
    speed = torch.exp(-torch.arange(half).double() * torch.log(torch.tensor(1e4).double()) / (half - 1))
    angle = (torch.arange(tokens.shape[1]) + 2.0)[:, None] * speed
    x = embedding[tokens] * LM_WIDTH**0.5 + torch.cat([angle.sin(), angle.cos()], dim=1)
    for i in range(2):
        layer = f"decoder.layers.{i}."
        h = plain.norm(f"{layer}self_attn_layer_norm", x)
        q, k = (plain.linear(f"{layer}self_attn.{kind}_proj", h) for kind in "qk")
        if i == 0:
            v = plain.linear(f"{layer}self_attn.v_proj", h)
            q, k, v = (z.unflatten(-1, (LM_HEADS, -1)).transpose(1, 2) for z in (q, k, v))
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        else:
            heads = plain.causal_primal(f"{layer}self_attn.", q, k, LM_HEADS)
        x = x + plain.linear(f"{layer}self_attn.out_proj", heads)
        h = plain.linear(f"{layer}fc1", plain.norm(f"{layer}final_layer_norm", x)).relu()
        x = x + plain.linear(f"{layer}fc2", h)
    expected = plain.norm("decoder.layer_norm", x) @ embedding.T
    # The angles of the positions are computed in float32.
    torch.testing.assert_close(load_official(state, "nlp").eval()(tokens), expected, rtol=0.0, atol=2e-6)


def decision_checkpoint() -> dict[str, Tensor]:
    width, state_dim, action_dim = 16, 5, 3
    maps: dict[str, tuple[int, ...]] = {"embed_ln": (width,), "transformer.ln_f": (width,)}
    maps |= {f"embed_{name}": (width, n) for name, n in (("return", 1), ("state", state_dim), ("action", action_dim))}
    maps |= {f"predict_{name}": (n, width) for name, n in (("state", state_dim), ("action.0", action_dim))}
    for i in range(2):
        maps |= {f"transformer.h.{i}.ln_{j}": (width,) for j in (1, 2)}
    attention = "transformer.h.1.attn.att."
    maps |= {f"{attention}{kind}_projection": (width, width) for kind in ("query", "key", "out")}
    shapes = {"embed_timestep.weight": (40, width), "transformer.wte.weight": (1, width), **with_biases(maps)}
    transposed = {
        f"h.{i}.mlp.{name}": shape for i in range(2) for name, shape in (("c_fc", (16, 64)), ("c_proj", (64, 16)))
    }
    transposed |= {"h.0.attn.c_attn": (16, 48), "h.0.attn.c_proj": (16, 16)}
    for name, shape in transposed.items():  # GPT-2 stores (in, out)
        shapes |= {f"transformer.{name}.weight": shape, f"transformer.{name}.bias": shape[1:]}
    shapes |= {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}
    return draw(shapes | primal_shapes(attention, heads=2, width=8, rank=4))


def test_the_primal_layer_of_a_decision_transformer_is_as_published() -> None:
    state = decision_checkpoint()
    model, plain, attention = load_official(state, "rl").eval(), Plain(state), "transformer.h.1.attn.att."
    assert model.attention_names == ("softmax", "primal")
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, k = (plain.linear(f"{attention}{kind}_projection", x) for kind in ("query", "key"))
    expected = plain.linear(f"{attention}out_projection", plain.causal_primal(attention, q, k, 2))
    assert_close(model.blocks[1].attention(x), expected, TIGHT)


def image_checkpoint(golden: dict[str, Tensor], meta: dict) -> dict[str, Tensor]:
    """The Primal layer has the stored weights."""
    width = meta["H"] * meta["head_dim"]
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, meta["N"], width)}
    maps: dict[str, tuple[int, ...]] = {"patch_embed.proj": (width, 3, 2, 2), "norm": (width,), "head": (7, width)}
    for i in range(2):
        maps |= {f"blocks.{i}.norm1": (width,), f"blocks.{i}.norm2": (width,)}
        maps |= {f"blocks.{i}.mlp.fc1": (4 * width, width), f"blocks.{i}.mlp.fc2": (width, 4 * width)}
    maps |= {"blocks.0.attn.qkv": (3 * width, width), "blocks.0.attn.proj": (width, width)}
    names = {"qk.weight": "Wqk", "qk.bias": "bqk", "we": "We", "wr": "Wr", "Lambda": "Lambda"}
    names |= {"concate_weight.weight": "Wo", "concate_weight.bias": "bo", "proj.weight": "Wout", "proj.bias": "bout"}
    primal = {f"blocks.1.attn.{theirs}": golden[f"p_{key}"] for theirs, key in names.items()}
    return draw(shapes | with_biases(maps)) | primal


def test_an_image_model_gives_the_published_attention_and_logits() -> None:
    pytest.importorskip("transformers")
    golden, meta = golden_files.load("cv_N197_H2_hd32_s30_rm5_sampled")
    state = image_checkpoint(golden, meta)
    model, plain = load_official(state, "cv").eval(), Plain(state)
    (layer,) = primal_layers(model).values()
    y, scores = layer(golden["x"], return_scores=True)
    for what, ours in (("out", y), ("e", scores.e), ("r", scores.r)):
        assert_close(ours, golden[what], golden_files.storage_ratio(golden[what], meta), what)
    images = torch.randn(2, 3, 28, 28, dtype=torch.float64)
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=2)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x.flatten(2).mT], 1) + state["pos_embed"]
    for i in range(2):
        h = plain.norm(f"blocks.{i}.norm1", x, 1e-6)
        if i == 0:
            q, k, v = plain.linear("blocks.0.attn.qkv", h).unflatten(-1, (3, meta["H"], -1)).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + (layer(h) if i else plain.linear("blocks.0.attn.proj", heads))
        h = F.gelu(plain.linear(f"blocks.{i}.mlp.fc1", plain.norm(f"blocks.{i}.norm2", x, 1e-6)))
        x = x + plain.linear(f"blocks.{i}.mlp.fc2", h)
    assert_close(model(images), plain.linear("head", plain.norm("norm", x, 1e-6)[:, 0]), 1e-12, "logits")


def test_softmax_checkpoints_need_the_number_of_heads() -> None:
    softmax = {k: v for k, v in language_checkpoint().items() if ".layers.1." not in k}
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_official(softmax, "nlp")
    assert load_official(softmax, "nlp", num_heads=8).attention_names == ("softmax",)


def test_other_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of uea"):
        load_official({}, "speech")
    for kind, name in (("uea", "UEA"), ("lra", "LRA"), ("cv", "image"), ("nlp", "language"), ("rl", "Decision")):
        with pytest.raises(ValueError, match=f"not one of the published {name}"):
            load_official({"weight": torch.zeros(1)}, kind)
