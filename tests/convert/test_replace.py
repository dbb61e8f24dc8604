"""primalize on torch's layers and on timm's attention; selection, copies, reports and bad input."""

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention import PrimalAttention, primalize
from primal_attention.nn.objective import primal_layers

SMALL = {"rank": 5, "landmarks": 6}
EXACT = 2e-5  # float32, another order of sums


class Attention(nn.Module):
    """The structure of timm's attention."""

    def __init__(self, dim: int = 32, num_heads: int = 4, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    def __init__(self, **keywords) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(32), Attention(**keywords)

    def forward(self, x, attn_mask=None):
        return x + self.attn(self.norm1(x), attn_mask=attn_mask)


def encoder(layers: int = 3, batch_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=batch_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=batch_first).eval()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "fast-path"])
def test_encoder_padded_equals_single(batch_first, grad) -> None:
    model = encoder(batch_first=batch_first)
    primalize(model, [0, 2], **SMALL)
    x, mask = torch.randn(2, 9, 32), torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 6:] = True
    order = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    with torch.set_grad_enabled(grad):
        both = order(model(order(x), src_key_padding_mask=mask))
        assert_close(both[:1], order(model(order(x[:1]))), EXACT)
        assert_close(both[1:, :6], order(model(order(x[1:, :6]))), EXACT)


def test_multihead_keeps_weights_and_return_type() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4, batch_first=True)})
    q, k, _ = model["attn"].in_proj_weight.chunk(3)
    out = model["attn"].out_proj.weight
    assert primalize(model, **SMALL) == ["attn"]
    layer = model["attn"].primal
    assert torch.equal(layer.qk_proj.weight, torch.cat([q, k]))
    assert torch.equal(layer.out_proj.weight, out)
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    y, weights = model["attn"](x, x, x)
    assert y.shape == x.shape
    assert weights is None
    assert_close(model["attn"](x[0], x[0], x[0])[0], y[0], EXACT)
    with pytest.raises(ValueError, match="one tensor: otherwise it is cross-attention"):
        model["attn"](x, memory, memory)


def test_causal_encoder_applies_and_checks_its_mask() -> None:
    model = encoder()
    primalize(model, "all", causal=True, **SMALL)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    x = torch.randn(2, 9, 32, requires_grad=True)
    y = model(x, mask=mask, is_causal=True)
    # Weighted: the plain sum over what a LayerNorm gives is constant, and its gradient nothing but rounding.
    (grad,) = torch.autograd.grad((y[:, 4] * torch.randn(32)).sum(), x)
    assert not grad[:, 5:].any()
    assert (grad[:, :5].abs().amax((0, 2)) > 1e-4).all()
    with pytest.raises(ValueError, match="neither padding nor the causal order"):
        model(x, mask=mask.T)
    plain = encoder()
    primalize(plain, **SMALL)
    with pytest.raises(ValueError, match=r"causal=True"):
        plain(x, mask=mask)


def test_decoder_layer_keeps_its_cross_attention() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, batch_first=True), 2).eval()
    replaced = primalize(model, "all", causal=True, **SMALL)
    assert replaced == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [name for name, _ in replaced.report.left] == ["layers.0.multihead_attn", "layers.1.multihead_attn"]
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    assert model(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(7)).shape == x.shape
    with pytest.raises(ValueError, match=r"layers\.0\.multihead_attn .* cross-attention"):
        primalize(model, lambda name, _: "multihead" in name)


def test_timm_structure_is_known_without_timm() -> None:
    model = nn.Sequential(*(Block() for _ in range(3))).eval()
    q, k, _ = model[2].attn.qkv.weight.chunk(3)
    proj = model[2].attn.proj.weight
    assert primalize(model, **SMALL) == ["2.attn"]
    layer = model[2].attn.primal
    assert torch.equal(layer.qk_proj.weight, torch.cat([q, k]))
    assert torch.equal(layer.out_proj.weight, proj)
    x = torch.randn(2, 9, 32)
    assert model(x).shape == x.shape
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool).expand(-1, -1, 9, -1).clone()
    mask[1, :, :, 6:] = False
    assert_close(model[2](x, mask)[1:, :6], model[2](x[1:, :6]), EXACT)


def test_real_timm() -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=3, depth=2).eval()
    assert primalize(model, **SMALL) == ["blocks.1.attn"]
    with torch.no_grad():
        assert model(torch.randn(1, 3, 224, 224)).shape == (1, 3)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("last", [2]), ("all", [0, 1, 2]), (0, [0]), ([0, -1], [0, 2]), (lambda name, _: ".1." in name, [1])],
    ids=["last", "all", "one", "numbers", "predicate"],
)
def test_layers_are_chosen(layers, expected) -> None:
    assert primalize(encoder(), layers, **SMALL) == [f"layers.{i}.self_attn" for i in expected]


def test_copy_leaves_the_original_unchanged() -> None:
    model, x = encoder(), torch.randn(2, 9, 32)
    before = model(x)
    replaced = primalize(model, copy=True, **SMALL)
    assert not primal_layers(model)
    assert torch.equal(model(x), before)
    assert len(primal_layers(replaced.model)) == 1


def test_dtype_training_mode_frozen_weights_and_sharing_are_kept() -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    model = nn.ModuleList([attention, attention]).to(torch.float64).train().requires_grad_(False)
    assert primalize(model, **SMALL).model is model
    assert model[0] is model[1]
    layer = model[0].primal
    assert layer.training
    assert layer.w_e.dtype == torch.float64
    assert not layer.qk_proj.weight.requires_grad
    assert layer.w_e.requires_grad


def test_report_counts_parameters_and_operations() -> None:
    model = encoder()
    total = sum(p.numel() for p in model.parameters())
    report = primalize(model, **SMALL).report
    (row,) = report.rows
    assert row.parameters_before == 4 * 32 * 32 + 4 * 32
    # q, k, out with biases; W_e and W_r; sqrt Λ; the scores' map with its bias
    assert row.parameters_after == 3 * 32 * 33 + 2 * 4 * 6 * 5 + 4 * 5 + (10 * 8 + 8)
    assert (report.parameters_before, report.parameters_after) == (total, sum(p.numel() for p in model.parameters()))
    before, after = report.flops(100)
    assert before == 2 * 100 * 32 * 4 * 32 + 4 * 100 * 100 * 32
    assert after == 2 * 100 * 32 * 3 * 32 + 4 * 6 * 32 * 5 + 4 * 100 * 32 * 5 + 4 * 100 * 5 * 32
    assert "layers.2.self_attn  MultiheadAttention" in str(report)


def with_part(name: str, value: object) -> nn.Module:
    """A block of timm's structure with another part in its attention."""
    model = nn.Sequential(Block())
    setattr(model[0].attn, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: with_part("q_norm", nn.LayerNorm(8)), {}, r"0\.attn \(Attention\) cannot be replaced: it has q_norm"),
        (lambda: with_part("relative_position_bias_table", nn.Parameter(torch.zeros(4, 4))), {}, "relative positions"),
        (lambda: with_part("num_heads", 5), {}, "width 32 is not divisible by its 5 heads"),
        (lambda: nn.Linear(3, 3), {}, "nothing to replace in Linear: no attention was found"),
        (encoder, {"layers": 3}, "layers has 3, and the model has 3 replaceable attention modules"),
        (encoder, {"layers": []}, "layers is empty"),
        (encoder, {"layers": 1.5}, "layers must be 'last', 'all', indices or a predicate"),
        (encoder, {"layers": "first"}, "layers must be 'last', 'all', indices or a predicate"),
        (encoder, {"layers": lambda *_: False}, r"none of the model's attention modules \(layers\.0\.self_attn, "),
        (encoder, {"num_heads": 3}, "num_heads is read from the replaced module"),
        (lambda: nn.MultiheadAttention(32, 4), {}, "the model is itself an attention"),
        (lambda: nn.ModuleList([nn.MultiheadAttention(32, 4, kdim=16)]), {}, "0 .* cross-attention"),
        (lambda: nn.ModuleList([nn.MultiheadAttention(32, 4, add_zero_attn=True)]), {}, "appends keys"),
        (lambda: nn.Sequential(PrimalAttention(32, 4)), {}, "its 1 attention modules are Primal-Attention already"),
    ],
)
def test_bad_input_is_one_line(model, arguments, message) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        primalize(model(), **arguments)
    assert "\n" not in str(raised.value)


def test_failure_leaves_the_model_unchanged() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module \(got str\)"):
        primalize("bert-base-uncased")
    model = encoder()
    with pytest.raises(ValueError, match="rank"):
        primalize(model, "all", rank=0)
    assert not primal_layers(model)
