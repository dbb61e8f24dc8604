"""Any length, any batch, any dtype: the layer answers in the dtype it was given and keeps its sums wide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_cases import CAUSAL, EMBED, HEADS, MODES, MODES_AND_DECAYS, gradients, inputs, make

# RMS of rounding, relative: bits of the mantissa with room for the few roundings between input and output.
ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}

every_map = pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
every_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_objective_close(layer: PrimalAttention, exact: PrimalAttention, ratio: float) -> None:
    """J is a difference, so its error is measured by the size of the two terms."""
    trace = (exact.w_e * exact.w_r).sum((-2, -1)).mean()
    size = (exact.objective + trace).abs() + trace.abs()
    assert ((layer.objective.double() - exact.objective).abs() <= ratio * size).all()


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 24])
@pytest.mark.parametrize("mode", MODES)
def test_any_length_and_a_batch_of_one(mode: str, n: int, backend: str) -> None:
    layer = make(mode, backend=backend)  # 6 landmarks: rows repeat below that length
    x = inputs(1, n)
    y, scores = layer(x, return_scores=True)
    assert y.shape == x.shape
    assert scores.e.shape == scores.r.shape == (1, HEADS, n, layer.rank)
    assert layer.objective.shape == (1,)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_an_empty_batch_goes_through_and_back(mode: str, decay: Any, backend: str) -> None:
    layer = make(mode, decay, backend=backend)
    y = layer(inputs(0, 5))
    assert y.shape == (0, 5, EMBED)
    assert layer.objective.shape == (0,)
    loss = y.sum() + ksvd_loss(layer) + ksvd_loss(layer, "batch")
    assert loss == 0
    for name, grad in gradients(layer, loss).items():
        assert (grad == 0).all(), name
    masked = layer(inputs(0, 5), torch.zeros(0, 5, dtype=torch.bool))
    assert masked.shape == (0, 5, EMBED)


@every_map
@every_dtype
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_every_dtype_agrees_with_float64(mode: str, decay: Any, dtype: torch.dtype, feature_map: str) -> None:
    layer = make(mode, decay, dtype=dtype, feature_map=feature_map)
    exact = copy.deepcopy(layer).double()
    x = inputs(3, 20, dtype=dtype)
    y, expected = layer(x), exact(x.double())
    assert y.dtype == dtype
    assert_close(y, expected, ROUNDING[dtype], "y")
    assert layer.objective.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_objective_close(layer, exact, ROUNDING[dtype])
    ours = gradients(layer, y.square().mean() + ksvd_loss(layer))
    theirs = gradients(exact, expected.square().mean() + ksvd_loss(exact))
    for name, grad in ours.items():
        # Backward rounds once more per operation, and small gradients are differences of larger ones.
        assert_close(grad, theirs[name], 8 * ROUNDING[dtype], name)


@every_map
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_autocast_computes_narrow_and_keeps_objective_and_state_wide(
    mode: str, decay: Any, dtype: torch.dtype, feature_map: str
) -> None:
    layer = make(mode, decay, dtype=torch.float32, feature_map=feature_map)
    x = inputs(3, 20, dtype=torch.float32)
    exact = copy.deepcopy(layer)
    expected = exact(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        loss = y.float().square().mean() + ksvd_loss(layer)
    assert y.dtype == dtype
    assert layer.objective.dtype == torch.float32
    assert_close(y, expected, ROUNDING[dtype], "y")
    assert_objective_close(layer, exact, ROUNDING[dtype])
    for name, grad in gradients(layer, loss).items():
        assert grad.dtype == torch.float32
        assert torch.isfinite(grad).all(), name
    if mode in CAUSAL:
        with torch.autocast("cpu", dtype=dtype):
            _, state = layer(x, return_state=True)
        held = {part.dtype for part in state if isinstance(part, torch.Tensor) and part.is_floating_point()}
        assert held == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_objective_of_half_precision_does_not_overflow(mode: str) -> None:
    # A trace of 2 · 10⁵ is beyond float16, which ends at 65,504; nothing of J is kept there.
    layer = make(mode, dtype=torch.float16, landmarks=24, rank=4)
    with torch.no_grad():
        layer.w_e.fill_(100.0)
        layer.w_r.fill_(100.0)
        layer.sqrt_lambda.zero_()
    layer(inputs(1, 24, dtype=torch.float16))
    rows = layer.w_e.shape[1]
    assert_close(layer.objective, torch.tensor([-1e4 * rows * 4]), 1e-6)


def test_running_sums_of_half_precision_do_not_overflow() -> None:
    layer = make("causal", dtype=torch.float16, rank=2)
    with torch.no_grad():
        layer.qk_proj.bias.fill_(50.0)
    x = torch.zeros(1, 3000, EMBED, dtype=torch.float16)
    _, scores = layer(x, return_scores=True)  # the running sum reaches 150,000
    assert_close(scores.e, scores.e[:, :, :1].expand_as(scores.e), 1e-3, "scores of equal tokens")


@pytest.mark.parametrize("mode", MODES)
def test_the_layer_moves_and_is_built_in_one_dtype(mode: str) -> None:
    built, moved = make(mode, dtype=torch.float32), make(mode).float()
    for name, parameter in built.named_parameters():
        assert parameter.dtype == torch.float32
        assert moved.get_parameter(name).dtype == torch.float32
    x = inputs(1, 4, dtype=torch.float32)
    assert built(x).dtype == moved(x).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_the_layer_can_be_built_on_the_meta_device(mode: str) -> None:
    layer = make(mode, decay="learned" if mode in CAUSAL else None, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_bias_can_be_left_out(mode: str) -> None:
    layer = make(mode, bias=False)
    assert not [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    assert torch.isfinite(layer(inputs(2, 7))).all()


def test_dropout_acts_in_training_only_and_not_on_the_objective() -> None:
    layer = make("data_dependent", dropout=0.5)
    x = inputs(2, 7)
    first, j = layer(x), layer.objective
    assert not torch.equal(layer(x), first)
    assert torch.equal(layer.objective, j)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("decay", [0.9, [0.5, 0.9, 1.0]])
@pytest.mark.parametrize("mode", CAUSAL)
def test_decay_may_be_fixed_for_all_heads_or_for_each(mode: str, decay: Any) -> None:
    layer = make(mode, decay)
    expected = torch.tensor(decay, dtype=torch.float64).expand(HEADS)
    assert_close(layer.decay, expected, 1e-15)  # γ is stored as its logit
    assert "decay_logit" not in dict(layer.named_parameters())


def test_learned_decay_starts_over_time_scales_from_one_to_hundreds_of_tokens() -> None:
    scales = 1.0 / (1.0 - make("causal", "learned").decay)
    assert scales.min() < 2.0
    assert 100.0 < scales.max() < 1000.0


@pytest.mark.parametrize("decay", ["learned", 0.9975])
def test_a_slow_decay_survives_half_precision(decay: Any) -> None:
    # bfloat16's neighbours of 0.9975 are 0.9961 and 1: a time scale of 256 tokens, or for ever.
    slow = make("causal", decay, dtype=torch.bfloat16).decay.detach().max()
    assert slow.dtype == torch.float32
    assert 1.0 / (1.0 - slow) == pytest.approx(400, rel=0.02)
