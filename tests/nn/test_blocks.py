"""Blocks: any attention by name in any layer, and the order of their parts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from closeness import assert_close
from primal_attention.nn.blocks import CausalConv, DecoderBlock, Encoder, EncoderBlock, LocalMixing, attention_names
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
    primal = [f"blocks.{i}.attention" for i, name in enumerate(expected) if name == "primal"]
    assert list(primal_layers(encoder(attention))) == primal


def test_bad_arguments_are_refused():
    for call, message in (
        (lambda: attention_names(("softmax", "primal"), 3), "2 names for layers=3"),
        (lambda: attention_names("primal", 0), "layers must be at least 1"),
        (lambda: EncoderBlock(16, 2, "softmax", local_kernel=4), "kernel_size=4"),
        (lambda: EncoderBlock(16, 2, "none"), "a block without attention needs local_kernel"),
        (lambda: EncoderBlock(16, 2, activation="tanh"), "activation must be one of 'gelu', 'relu', 'glu'"),
        (lambda: DecoderBlock(16, 2, None, conv=4, gate="tanh"), "gate must be one of True, False, 'silu', 'sigmoid'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_hooks_of_a_convolution_run():
    local, called = LocalMixing(8, 3), []
    local.conv.register_forward_pre_hook(lambda *_: called.append("forward"))
    local.conv.register_full_backward_hook(lambda *_: called.append("backward"))
    local(torch.randn(2, 5, 8, requires_grad=True)).sum().backward()
    assert called == ["forward", "backward"]


def test_post_ln_is_the_original_order():
    attention = PrimalAttention(16, 2, rank=4, landmarks=6)  # a module instead of a name
    block = EncoderBlock(16, 2, attention, norm_first=False).double().eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    middle = block.norm1(x + attention(x))
    assert_close(block(x), block.norm2(middle + block.feed_forward(middle)), 1e-12)


@pytest.mark.parametrize(("gate", "activation"), [(False, None), (True, F.silu), ("sigmoid", torch.sigmoid)])
@pytest.mark.parametrize("has_attention", [True, False])
def test_a_decoder_block_gates_attention_and_convolution(gate, activation, has_attention):
    attention = PrimalAttention(16, 2, rank=4, data_dependent=False, causal=True) if has_attention else None
    block = DecoderBlock(16, 2, attention, conv=4, gate=gate).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    h = block.norm1(x)
    mixed = block.conv(h) + (attention(h) if has_attention else 0.0)
    x_mixed = x + (mixed if activation is None else mixed * activation(block.gate(h)))
    assert_close(block(x), x_mixed + block.feed_forward(block.norm2(x_mixed)), 1e-12)


def test_the_causal_convolution_and_its_state():
    conv, x = CausalConv(3, 4).double(), torch.randn(2, 8, 3, dtype=torch.float64)
    padded = torch.cat([torch.zeros(2, 3, 3), x], dim=1)
    y = conv(x)
    assert_close(y, conv.bias + sum(conv.weight[j] * padded[:, 3 - j : 11 - j] for j in range(4)), 1e-12)
    assert_close(conv(x[:, 5:], conv.last_inputs(x[:, :5])), y[:, 5:], 1e-12)
    lengths = torch.tensor([1, 5])
    assert torch.equal(conv.last_inputs(x, lengths=lengths)[0], padded[0, 1:4])
    assert torch.equal(conv.last_inputs(x, lengths=lengths)[1], x[1, 2:5])
