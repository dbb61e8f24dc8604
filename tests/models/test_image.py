"""DeiT with Primal-Attention: structure, stochastic depth, crops, and the published attention inside it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from golden_files import load, storage_ratio
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.models.image import ImageClassifier, StochasticDepth, deit, primal_numbers, which
from primal_attention.nn.objective import primal_layers
from primal_attention.official import load_official

LIBRARIES = ["transformers", "timm"]
SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "layers": 3, "rank": 4}


def make(library: str = "transformers", **changes) -> ImageClassifier:
    pytest.importorskip(library, exc_type=ImportError)
    torch.manual_seed(0)
    return deit(5, **{**SMALL, "library": library, **changes})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("attention", "count"), [("softmax", 0), ("primal+", 1), ("primal", 3)])
def test_which_layers_are_primal(library, attention, count) -> None:
    model = make(library, attention=attention)
    layers = primal_layers(model)
    assert len(layers) == count
    assert all(layer.landmarks == 17 and not layer.causal for layer in layers.values())
    if attention == "primal+":
        assert "2" in next(iter(layers)).split(".")
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 5)
    loss = logits.sum() + (ksvd_loss(model, "batch") if count else 0)
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert all("sqrt_lambda" not in n and "cls" not in n for n in missing)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_papers_model_has_197_tokens_and_rank_96(library) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a published setting is no reason to warn
        model = deit(10, library=library)
    (layer,) = primal_layers(model).values()
    assert (layer.embed_dim, layer.num_heads, layer.rank, layer.landmarks) == (384, 6, 96, 197)
    assert len(model.blocks) == 12
    softmax = sum(p.numel() for p in deit(10, attention="softmax", library=library).parameters())
    assert 21.5e6 < softmax < 22e6


def test_names_per_layer() -> None:
    assert primal_numbers(["softmax", "primal", "primal"], 3) == [1, 2]
    with pytest.raises(ValueError, match=r"attention must be softmax, primal, primal\+ or 3 names .*'linear'"):
        primal_numbers("linear", 3)


@pytest.mark.parametrize("library", LIBRARIES)
def test_stochastic_depth_grows_along_the_layers_and_is_off_in_evaluation(library) -> None:
    model = make(library, drop_path=0.4)
    rates = [1 - float(m.keep) for block in model.blocks for m in block.modules() if isinstance(m, StochasticDepth)]
    assert sorted(set(rates)) == pytest.approx([0, 0.2, 0.4])
    x = torch.randn(2, 3, 32, 32)
    model.eval()
    assert torch.equal(model(x), model(x))
    assert not any(isinstance(m, StochasticDepth) for m in make(library, drop_path=0.0).modules())


def test_stochastic_depth_keeps_the_mean() -> None:
    torch.manual_seed(0)
    y = StochasticDepth(0.25)(torch.ones(4000, 2, 3))
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(y.mean()) == pytest.approx(1, abs=0.03)  # deviation √(1/3)/√4000 ≈ 0.009
    assert torch.equal(y[:, :1, :1].expand_as(y), y)  # a sample stays or goes as a whole


def test_bytes_are_cut_to_the_middle_and_normalised() -> None:
    model = make().eval()
    images = torch.randint(256, (2, 3, 36, 40), dtype=torch.uint8)
    inside = images[:, :, 2:34, 4:36].float() / 255
    by_hand = (inside - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    assert_close(model(images), model(by_hand), 1e-5, "logits")
    with pytest.raises(ValueError, match="at least 32×32 pixels"):
        model(images[..., :20])


def test_compile_takes_the_blocks(monkeypatch) -> None:
    compiled = []
    model = make()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    model.compile()
    assert compiled == model.blocks


def test_alike_blocks_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    for _ in range(2):  # the second model, as of another seed, finds what the first has left
        model = make(layers=4, drop_path=0.3)
        model.compile(backend=counter)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert counter.frame_count == 2  # one with softmax attention, one Primal


def test_bad_input_is_one_line() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"patch_size must divide image_size \(patch_size=10, image_size=32\)"):
        make(patch_size=10)
    with pytest.raises(ValueError, match="drop_path must lie in"):
        make(drop_path=1.0)
    with pytest.raises(ValueError, match="library must be auto, timm or transformers"):
        which("keras")  # type: ignore[arg-type]


def test_a_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr("primal_attention.models.image.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'timm' is not installed: pip install 'primal-attention\[vision\]'"):
        which("timm")
    with pytest.raises(ValueError, match="image models need timm or transformers"):
        which("auto")


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


def test_what_is_no_published_image_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of the published image models"):
        load_official({"weight": torch.zeros(2)}, "cv")
    golden, meta = load("cv_N197_H2_hd32_s30_rm5_sampled")
    state = {k: v for k, v in published_state(golden, meta).items() if "blocks.1" not in k}
    with pytest.raises(ValueError, match="num_heads must be given"):
        load_official(state, "cv")
    assert len(load_official(state, "cv", num_heads=2).blocks) == 1
