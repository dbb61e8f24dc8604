"""The layer as a module: dtypes, construction, calls as nn.MultiheadAttention, copies and stored weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_cases import (
    CAUSAL,
    CPU_MODES,
    EMBED,
    HEADS,
    MODES,
    MODES_AND_DECAYS,
    backend_options,
    gradients,
    inputs,
    make,
    tensors,
)

SAME = 1e-12  # float64, the same operations
# Relative RMS of rounding: bits of the mantissa, times a few roundings between input and output.
ROUNDING = {torch.float32: 3e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}

MODES_AND_BACKENDS = [(mode, backend) for mode in MODES for backend in ("reference", "fused")]
MODES_AND_BACKENDS += [(mode, "cpu") for mode in CPU_MODES]

every_mode = pytest.mark.parametrize("mode", MODES)
every_decay = pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
every_map = pytest.mark.parametrize("feature_map", ["cosine", "softmax"])


# Sizes and dtypes


@every_decay
def test_an_empty_batch_gives_zero_gradients(mode: str, decay: Any) -> None:
    layer = make(mode, decay)
    y = layer(inputs(0, 5))
    assert y.shape == (0, 5, EMBED)
    assert layer.objective.shape == (0,)
    loss = y.sum() + ksvd_loss(layer) + ksvd_loss(layer, "batch")
    assert loss == 0
    for name, grad in gradients(layer, loss).items():
        assert (grad == 0).all(), name
    assert layer(inputs(0, 5), torch.zeros(0, 5, dtype=torch.bool)).shape == (0, 5, EMBED)
    if mode in CAUSAL:
        assert layer.step(inputs(0), layer.initial_state(0))[0].shape == (0, EMBED)


def assert_objective_close(layer: PrimalAttention, exact: PrimalAttention, ratio: float) -> None:
    """J is a difference, so its error is relative to the size of the two terms."""
    trace = (exact.w_e * exact.w_r).sum((-2, -1)).mean()
    size = (exact.objective + trace).abs() + trace.abs()
    assert ((layer.objective.double() - exact.objective).abs() <= ratio * size).all()


@every_map
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@every_decay
def test_every_dtype_equals_float64_up_to_rounding(mode: str, decay: Any, dtype: torch.dtype, feature_map: str) -> None:
    layer = make(mode, decay, dtype=dtype, feature_map=feature_map)
    exact = copy.deepcopy(layer).double()
    x = inputs(3, 20, dtype=dtype)
    y, *state = layer(x, return_state=True) if mode in CAUSAL else (layer(x),)
    expected = exact(x.double())
    assert y.dtype == dtype
    for after in state:
        assert {part.dtype for part in tensors(after) if part.is_floating_point()} == {torch.float32}
    assert_close(y, expected, ROUNDING[dtype], "y")
    assert layer.objective.dtype == torch.float32
    assert_objective_close(layer, exact, ROUNDING[dtype])
    exact_grads = gradients(exact, expected.square().mean() + ksvd_loss(exact))
    for name, grad in gradients(layer, y.square().mean() + ksvd_loss(layer)).items():
        # The backward pass rounds once more per operation, and small gradients are differences of larger ones.
        assert_close(grad, exact_grads[name], 8 * ROUNDING[dtype], name)


@pytest.mark.supports("autocast", "cpu")
@every_map
@every_decay
def test_autocast_keeps_objective_state_and_gradients_in_float32(mode: str, decay: Any, feature_map: str) -> None:
    dtype = torch.bfloat16
    exact, x = make(mode, decay, dtype=torch.float32, feature_map=feature_map), inputs(3, 20, dtype=torch.float32)
    layer, expected = copy.deepcopy(exact), exact(x)
    for layer.backend in ("reference", *(("cpu",) if mode in CPU_MODES and feature_map == "cosine" else ())):
        with torch.autocast("cpu", dtype=dtype):
            y, *state = layer(x, return_state=True) if mode in CAUSAL else (layer(x),)
            loss = y.float().square().mean() + ksvd_loss(layer)
        assert y.dtype == dtype
        assert layer.objective.dtype == torch.float32
        assert_close(y, expected, ROUNDING[dtype], "y")
        assert_objective_close(layer, exact, ROUNDING[dtype])
        for inside in (False, True):  # the backward pass outside of autocast and inside of it
            with torch.autocast("cpu", dtype=dtype, enabled=inside):
                grads = gradients(layer, loss, keep_graph=True)
            for name, grad in grads.items():
                assert grad.dtype == torch.float32
                assert torch.isfinite(grad).all(), name
        for after in state:
            assert {part.dtype for part in tensors(after) if part.is_floating_point()} == {torch.float32}


@every_mode
def test_the_objective_does_not_overflow_in_float16(mode: str) -> None:
    # The trace is −9.6 · 10⁵ or more; float16 ends at 65,504.
    layer = make(mode, dtype=torch.float16, landmarks=24, rank=4)
    with torch.no_grad():
        for weight in (layer.w_e, layer.w_r):
            weight.fill_(100.0)
        layer.sqrt_lambda.zero_()
    layer(inputs(1, 24, dtype=torch.float16))
    assert_close(layer.objective, torch.tensor([-1e4 * layer.w_e.shape[1] * 4]), 1e-6)


@pytest.mark.parametrize(("mode", "backend"), MODES_AND_BACKENDS)
def test_large_inputs_do_not_overflow(mode: str, backend: str) -> None:
    options = backend_options(backend) | {"dtype": torch.float32}
    layer = make(mode, **options).eval()
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    scale = 1e20 if backend == "fused" else 1e30
    x, results = scale * torch.randn(2, 12, EMBED, device=options["device"]), []
    for one, leaf in ((layer, x.clone()), (exact, x.double())):
        y, scores = one(leaf.requires_grad_(), return_scores=True)
        grads = torch.autograd.grad(y.sum(), [leaf, *one.parameters()], allow_unused=True, materialize_grads=True)
        results.append([y, *scores, *grads])
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, 1e-5 if i < 3 else 2e-5)  # some gradients are sums that nearly cancel


# Construction


def test_parameters_have_the_documented_names_and_shapes() -> None:
    layer = make("data_dependent", rank=4, landmarks=6)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "qk_proj.weight": (24, 12),
        "qk_proj.bias": (24,),
        "w_e": (3, 6, 4),
        "w_r": (3, 6, 4),
        "sqrt_lambda": (3, 4),
        "score_proj.weight": (4, 8),
        "score_proj.bias": (4,),
        "out_proj.weight": (12, 12),
        "out_proj.bias": (12,),
    }
    assert make("plain", rank=4).w_e.shape == (3, 4, 4)
    assert "heads=3, rank=4, landmarks=6, causal, data-dependent" in repr(make("causal_data_dependent"))
    assert "landmarks" not in repr(make("plain"))


@pytest.mark.parametrize("decay", [0.9, [0.5, 0.9, 1.0]])
@pytest.mark.parametrize("mode", CAUSAL)
def test_decay_may_be_fixed_for_all_heads_or_for_each(mode: str, decay: Any) -> None:
    layer = make(mode, decay)
    expected = torch.tensor(decay, dtype=torch.float64).expand(HEADS)
    assert_close(layer.decay, expected, 1e-15)  # γ is stored as its logit
    assert "decay_logit" not in dict(layer.named_parameters())


@pytest.mark.parametrize("decay", ["learned", 0.9975])
def test_a_slow_decay_survives_half_precision(decay: Any) -> None:
    # The neighbours of 0.9975 in bfloat16 are 0.9961 and 1: a time scale of 256 tokens, or infinity.
    gamma = make("causal", decay, dtype=torch.bfloat16).decay.detach()
    assert gamma.dtype == torch.float32
    assert 1.0 / (1.0 - gamma.max()) == pytest.approx(400, rel=0.02)
    if decay == "learned":
        assert 1.0 / (1.0 - gamma.min()) < 2.0


@pytest.mark.parametrize(("mode", "backend"), [c for c in MODES_AND_BACKENDS if c[0] in (*CAUSAL, "two_sided")])
def test_one_token_leaves_a_learned_decay_in_the_graph(mode: str, backend: str) -> None:
    options = backend_options(backend)
    layer = make(mode, "learned", **options)
    layer(torch.randn(2, 1, EMBED, dtype=options["dtype"], device=options["device"])).sum().backward()
    assert layer.decay_logit.grad is not None  # DistributedDataParallel waits for every gradient
    assert (layer.decay_logit.grad == 0).all()


@every_map
@pytest.mark.parametrize(("mode", "decay"), [*MODES_AND_DECAYS, ("causal", (0.5, 0.9, 1.0))])
def test_the_meta_device_and_reset_parameters(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map, device="meta")
    x = inputs(2, 9).to("meta")
    assert layer(x).shape == x.shape
    assert layer(x, torch.zeros(2, 9, dtype=torch.bool, device="meta")).is_meta
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    assert layer(x.flatten(0, 1), cu_seqlens=bounds, max_seqlen=9).shape == (18, EMBED)
    if mode in CAUSAL:
        assert layer.step(x[:, 0], layer.initial_state(2))[0].is_meta
    stored, x = make(mode, decay, feature_map=feature_map).state_dict(), inputs(2, 9)
    assigned, layer = copy.deepcopy(layer), layer.to_empty(device="cpu")
    for restore in (layer.reset_parameters, lambda: layer.load_state_dict(stored)):
        with torch.no_grad():
            for tensor in (*layer.parameters(), *layer.buffers()):
                tensor.fill_(torch.nan)
        restore()
        if layer.decay is not None:
            assert torch.equal(layer.decay, make(mode, decay).decay)
        if feature_map == "softmax":
            assert 0.5 < layer.frequencies.std() < 1.5
        assert torch.isfinite(layer(x)).all()
    assigned.load_state_dict(stored, assign=True)
    assert torch.equal(assigned(x), layer(x))


# Copies and stored weights


@every_mode
def test_a_copy_is_independent_and_starts_without_objective(mode: str) -> None:
    layer, x = make(mode), inputs(2, 9)
    for is_parametrised in (False, True):
        if is_parametrised:
            nn.utils.parametrizations.orthogonal(layer, "w_e")
        y = layer(x)
        other = copy.deepcopy(layer)
        assert other.objective is None
        assert layer.objective is not None
        assert torch.equal(other(x), y)
        with torch.no_grad():
            other.w_r.zero_()
        assert torch.equal(layer(x), y)


@every_mode
def test_the_output_may_be_changed_in_place(mode: str) -> None:
    layer, x = make(mode), inputs(2, 9).requires_grad_()
    (expected,) = torch.autograd.grad((layer(x) + x).square().sum() + ksvd_loss(layer), x)
    y = layer(x)
    y += x
    (grad,) = torch.autograd.grad(y.square().sum() + ksvd_loss(layer), x)
    assert_close(grad, expected, SAME)


# Calls as nn.MultiheadAttention


@every_mode
def test_three_equal_tensors_return_a_pair_and_one_returns_the_output(mode: str) -> None:
    layer, x = make(mode).eval(), inputs(2, 9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    y = layer(x, mask)
    assert torch.equal(layer(x, key_padding_mask=mask), y)
    as_floats = torch.zeros(2, 9).masked_fill(mask, -torch.inf)
    for pair in (layer(x, x, x, key_padding_mask=mask, need_weights=False), layer(x, x, x, as_floats)):
        assert torch.equal(pair[0], y)
        assert pair[1] is None
    if not layer.causal:
        assert torch.equal(layer(x, x, x, mask, attn_mask=torch.zeros(9, 9))[0], y)


@pytest.mark.parametrize("mode", ["data_dependent", "two_sided", *CAUSAL])
@pytest.mark.parametrize("depth", [None, 2])
def test_torch_encoder_layers_train_and_evaluate(mode: str, depth: int | None) -> None:
    options = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    encoder: Any = nn.TransformerEncoderLayer(EMBED, HEADS, **options)
    encoder.self_attn = make(mode)
    if depth is not None:
        encoder = nn.TransformerEncoder(encoder, depth, enable_nested_tensor=False)
    x = inputs(2, 9).requires_grad_()
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    keywords: dict[str, Any] = {"src_key_padding_mask": mask}
    expected = encoder(x, **keywords)
    if mode in CAUSAL:
        causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
        keywords |= {"mask" if depth else "src_mask": causal, "is_causal": True}
    y = encoder(x, **keywords)
    assert torch.equal(y, expected)
    (y[~mask].square().mean() + ksvd_loss(encoder)).backward()
    assert all(p.grad is not None for p in encoder.parameters())
    with torch.no_grad():
        assert_close(encoder.eval()(x, **keywords)[~mask], y[~mask], SAME)


def test_torch_encoders_with_an_assigned_layer_refuse_nested_tensors_in_one_line() -> None:
    options = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, 2, **options), 2)
    for block in encoder.layers:
        block.self_attn = make("data_dependent")
    x, mask = inputs(2, 9), torch.arange(9) >= torch.tensor([[9], [5]])
    expected = encoder(x, src_key_padding_mask=mask)
    assert_close(encoder.eval()(x, src_key_padding_mask=mask), expected, SAME)  # with gradients: no nested tensors
    with torch.no_grad():
        with pytest.raises(ValueError, match="nested tensor; encoders need enable_nested_tensor=False"):
            encoder(x, src_key_padding_mask=mask)
        encoder.use_nested_tensor = False
        assert_close(encoder(x, src_key_padding_mask=mask), expected, SAME)
