"""Blocks: any attention by name in any layer, and padding that never matters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.nn.baselines import attention_names as known_attentions
from primal_attention.nn.blocks import Encoder, EncoderBlock, attention_names, masked_max, masked_mean
from primal_attention.nn.objective import primal_layers
from primal_attention.nn.primal import PrimalAttention

KEYWORDS = {"primal": {"rank": 4, "landmarks": 6}}


def encoder(attention="primal", **changes) -> Encoder:
    settings = {"ffn_dim": 32, "attention_kwargs": KEYWORDS, **changes}
    return Encoder(16, 2, 3, attention, **settings).double().eval()


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("primal", ("primal", "primal", "primal")),
        ("primal+", ("softmax", "softmax", "primal")),
        (["primal+"], ("softmax", "softmax", "primal")),
        (("linear", "softmax", "primal"), ("linear", "softmax", "primal")),
    ],
)
def test_attention_is_named_per_layer(attention, expected):
    assert attention_names(attention, 3) == expected


def test_a_wrong_number_of_names_is_refused():
    with pytest.raises(ValueError, match="2 names for layers=3"):
        attention_names(("softmax", "primal"), 3)
    with pytest.raises(ValueError, match="layers must be at least 1"):
        attention_names("primal", 0)


def test_primal_plus_has_one_primal_layer_the_last():
    assert list(primal_layers(encoder("primal+"))) == ["blocks.2.attention"]
    assert len(primal_layers(encoder("primal"))) == 3


@pytest.mark.parametrize("name", known_attentions())
def test_any_attention_runs_in_a_block_and_learns(name):
    block = EncoderBlock(16, 2, name, attention_kwargs=KEYWORDS.get(name))
    x = torch.randn(2, 9, 16, requires_grad=True)
    block(x).square().mean().backward()
    assert torch.isfinite(x.grad).all()


def test_an_attention_module_may_be_given_itself():
    block = EncoderBlock(16, 2, PrimalAttention(16, 2, rank=4, landmarks=6))
    assert block(torch.randn(2, 5, 16)).shape == (2, 5, 16)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-LN", "post-LN"])
@pytest.mark.parametrize("local_kernel", [None, 5], ids=["attention-alone", "with-local-mixing"])
def test_padded_equals_single_whatever_stands_in_the_padding(norm_first, local_kernel):
    model = encoder("primal+", norm_first=norm_first, local_kernel=local_kernel)
    lengths = (9, 4, 1)
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    mask = torch.arange(9) >= torch.tensor(lengths).unsqueeze(1)
    padded = model(x.masked_fill(mask.unsqueeze(-1), 1e3), mask)
    for i, n in enumerate(lengths):
        assert_close(padded[i, :n], model(x[i : i + 1, :n])[0], 1e-10, f"case of length {n}")


def test_post_ln_is_the_original_order():
    block = EncoderBlock(16, 2, "softmax", norm_first=False).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    middle = block.norm1(x + block.attention(x))
    assert_close(block(x), block.norm2(middle + block.feed_forward(middle)), 1e-12)


def test_an_even_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel_size=4"):
        EncoderBlock(16, 2, "softmax", local_kernel=4)


def test_pooling_sees_valid_tokens_only_and_an_empty_row_gives_zero():
    x = torch.tensor([[[1.0], [-5.0], [9.0]], [[1.0], [2.0], [3.0]]])
    mask = torch.tensor([[False, False, True], [True, True, True]])
    assert masked_mean(x, mask).tolist() == [[-2.0], [0.0]]
    assert masked_max(x, mask).tolist() == [[1.0], [0.0]]
    x[0, 2] = torch.nan
    assert torch.isfinite(masked_mean(x, mask)).all()
    assert torch.isfinite(masked_max(x, mask)).all()


def test_dropout_is_off_in_evaluation_and_on_in_training():
    block = EncoderBlock(16, 2, "softmax", dropout=0.5)
    x = torch.randn(2, 7, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    assert isinstance(block.dropout, nn.Dropout)
