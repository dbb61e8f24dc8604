"""DeiT with Primal-Attention: structure, stochastic depth, normalisation, compilation."""

from __future__ import annotations

import warnings

import pytest
import torch

from closeness import assert_close
from primal_attention import ksvd_loss
from primal_attention.models.image import ImageClassifier, StochasticDepth, choose_library, deit
from primal_attention.nn.objective import primal_layers

LIBRARIES = ["transformers", "timm"]
SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "layers": 3, "rank": 4}


def make(library: str = "transformers", **changes) -> ImageClassifier:
    pytest.importorskip(library, exc_type=ImportError)
    torch.manual_seed(0)
    return deit(5, **{**SMALL, "library": library, **changes})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("attention", "count"), [("softmax", 0), ("primal+", 1), ("primal", 3), (("softmax", "primal", "primal"), 2)]
)
def test_the_named_layers_are_primal(library, attention, count) -> None:
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
    parameters = sum(
        p.numel() for name, p in model.named_parameters() if "attn" not in name and "attention" not in name
    )
    assert 14.5e6 < parameters < 15e6  # of DeiT-Small's 21.7 million, without the attention


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


def test_bytes_are_normalised() -> None:
    model = make().eval()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(moment).view(3, 1, 1) for moment in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    by_hand = (images / 255 - mean) / std
    assert_close(model(images), model(by_hand), 1e-5, "logits")


def test_alike_blocks_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    for _ in range(2):  # the second model, as of another seed, finds what the first has left
        model = make(layers=4, drop_path=0.3)
        model.compile(backend=counter)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert counter.frame_count == 2  # one with softmax attention, one Primal


def test_bad_input_is_one_line(monkeypatch) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"patch_size must divide image_size \(patch_size=10, image_size=32\)"):
        make(patch_size=10)
    with pytest.raises(ValueError, match="drop_path must lie in"):
        make(drop_path=1.0)
    with pytest.raises(ValueError, match=r"attention must be softmax, primal or primal\+ .*'linear linear"):
        deit(3, attention="linear")
    with pytest.raises(ValueError, match="library must be auto, timm or transformers"):
        choose_library("keras")  # type: ignore[arg-type]
    monkeypatch.setattr("primal_attention.models.image.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'timm' is not installed: pip install 'primal-attention\[vision\]'"):
        choose_library("timm")
    with pytest.raises(ValueError, match="image models need timm or transformers"):
        choose_library("auto")
