"""Spectra equal the SVD of explicitly formed matrices; known ranks are recovered."""

import numpy as np
import pytest
import torch
from torch import nn

from closeness import assert_close
from convert.hf_models import inputs, make
from convert.test_replace import Block, encoder
from primal_attention import PrimalAttention, make_attention, primalize, spectrum
from primal_attention.nn.blocks import Encoder

SMALL = {"rank": 3, "landmarks": 6}
EXACT = 2e-5  # float32, another order of sums


def svd(matrix: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)).float()


def padded_input() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 6:] = True
    return torch.randn(2, 9, 32), mask


@pytest.mark.parametrize("keywords", [SMALL, {"rank": 3, "data_dependent": False}], ids=["landmarks", "plain"])
def test_primal_layers(keywords):
    layer = PrimalAttention(32, 4, **keywords)
    x, mask = padded_input()
    (result,) = spectrum(layer, (x, mask)).values()
    assert (result.kind, result.singular_values.shape) == ("primal", (2, 4, 9))
    assert_close(result.singular_values, svd(layer.kernel_matrix(x, mask)), EXACT)
    (half,) = spectrum(layer.to(torch.bfloat16), x.to(torch.bfloat16)).values()
    assert half.singular_values.dtype == torch.float32


def test_softmax_of_this_library():
    layer = make_attention("softmax", 32, 4)
    x, mask = padded_input()
    (result,) = spectrum(layer, (x, mask)).values()
    q, k, _ = layer.project_in(x[1:, :6])
    assert_close(result.singular_values[1:, :, :6], svd(torch.softmax(q @ k.mT / 8**0.5, dim=-1)), EXACT)
    assert not result.singular_values[1, :, 6:].any()


def test_torch_layers_are_not_changed():
    model = encoder().train()
    x, mask = padded_input()
    result = spectrum(model, {"src": x, "src_key_padding_mask": mask})
    assert list(result) == [f"layers.{i}.self_attn" for i in range(3)]
    assert model.training
    _, weights = model.eval().layers[0].self_attn(x[:1], x[:1], x[:1], average_attn_weights=False)
    assert_close(result["layers.0.self_attn"].singular_values[:1], svd(weights), EXACT)
    unpadded = spectrum(model, x[1:, :6])
    for name, layer in result.items():
        assert_close(layer.singular_values[1:, :, :6], unpadded[name].singular_values, EXACT)


def test_timm_structure():
    model = nn.Sequential(Block())
    x = torch.randn(2, 9, 32)
    q, k, _ = model[0].attn.qkv(model[0].norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    (result,) = spectrum(model, x).values()
    assert_close(result.singular_values, svd(torch.softmax(q @ k.mT / 8**0.5, dim=-1)), EXACT)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "llama", "vit"])
def test_transformers(kind):
    model, call = make(kind), inputs(kind)
    result = spectrum(model, call)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**call, output_attentions=True).attentions
    for layer, weights in zip(result.values(), attentions, strict=True):
        assert_close(layer.singular_values, svd(weights), EXACT)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_padding_of_transformers_adds_zeros(kind):
    model = make(kind)
    primalize(model, **SMALL)
    ids = inputs(kind)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    both = spectrum(model, {"input_ids": ids, "attention_mask": mask})
    unpadded = spectrum(model, {"input_ids": ids[1:, :6]})
    assert [layer.kind for layer in both.values()] == ["softmax", "softmax", "primal"]
    for name, layer in both.items():
        assert_close(layer.singular_values[1:, :, :6], unpadded[name].singular_values, EXACT)
        assert float(layer.singular_values[1, :, 6:].max()) < 1e-6


def test_known_ranks():
    layer = make_attention("softmax", 32, 4)
    nn.init.zeros_(layer.in_proj.weight)  # uniform attention: 11ᵀ/N, σ = 1, 0, 0, …
    nn.init.zeros_(layer.in_proj.bias)
    (flat,) = spectrum(layer, torch.randn(2, 9, 32)).values()
    torch.testing.assert_close(flat.effective_rank, torch.ones(2, 4), rtol=1e-4, atol=1e-4)
    assert flat.directions(0.9) == 1
    torch.testing.assert_close(flat.singular_values[..., 0], torch.ones(2, 4))
    (low,) = spectrum(PrimalAttention(32, 4, rank=2, landmarks=3), torch.randn(2, 40, 32)).values()
    assert low.singular_values.shape == (2, 4, 40)
    assert not low.singular_values[..., 3:].any()  # at most one direction per landmark


def test_batches_are_joined_and_curves_end_in_one():
    model = Encoder(32, 4, 2, ["softmax", "primal"], attention_kwargs={"primal": SMALL}).eval()
    steps: list[int] = []
    batches = [(torch.randn(2, 9, 32),), (torch.randn(3, 5, 32),)]
    result = spectrum(model, batches, step=lambda: steps.append(1))
    assert len(steps) == 2
    for layer in result.values():
        assert layer.singular_values.shape == (5, 4, 9)
        mean, deviation = layer.curve()
        assert float(mean[-1]) == pytest.approx(1)
        assert bool((mean.diff() >= -1e-6).all())
        assert float(deviation[-1]) == pytest.approx(0, abs=1e-6)
    rows = list(result.rows())
    assert len(rows) == 2 * 9
    assert rows[0]["value_over_largest"] == pytest.approx(1)
    assert "effective rank" in str(result)


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="Linear has no softmax attention or Primal-Attention"):
        spectrum(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(ValueError, match="inputs has no batch"):
        spectrum(encoder(), [])
