"""The CPU backend against the equations: outputs, J, scores, state and every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import kernel_cases
from closeness import assert_close, rms_ratio
from kernel_cases import Layer, gradients, results, saved_bytes, tokens, twin
from primal_attention import ksvd_loss
from primal_attention.ops.cpu import attention

# The same sums in another order. float32: some gradients are sums over all tokens that nearly cancel.
SAME = {torch.float64: 1e-12, torch.float32: 4e-6}
MODES = ("plain", "data_dependent", "causal", "learned_decay")
every_mode = pytest.mark.parametrize("mode", MODES)
causal_modes = pytest.mark.parametrize("mode", ["causal", "learned_decay"])


def make(mode: str, head_dim: int = 8, heads: int = 3, rank: int = 5, **keywords: Any) -> Layer:
    """Return a layer on the CPU backend, in float64 by default; rows repeat in sequences below 20 tokens."""
    keywords = {"landmarks": 20, "dtype": torch.float64, "backend": "cpu", **keywords}
    return kernel_cases.make(mode, head_dim, rank, heads, **keywords)


def scattered_padding(b: int, n: int) -> Tensor:
    """A padding mask with gaps inside the sequences; the last sequence is all padding."""
    mask = torch.rand(b, n) < 0.4
    mask[-1] = True
    return mask


def assert_same(layer: Layer, x: Tensor, *args: Any, **keywords: Any) -> None:
    expected = results(twin(layer, x.dtype), x, *args, **keywords)
    for name, value in results(layer, x, *args, **keywords).items():
        assert value.dtype == expected[name].dtype, name
        factor = 10 if name in ("J", "gradient of sqrt_lambda") else 1  # J, which scales its gradient, is a difference
        assert_close(value, expected[name], factor * SAME[x.dtype], name)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows, so that short sequences span several."""
    monkeypatch.setattr(attention, "BLOCK_SIZE", 1)


@pytest.mark.supports("training", "cpu")
@pytest.mark.parametrize("dtype", SAME)
@every_mode
@pytest.mark.usefixtures("_small_blocks")
def test_equals_the_equations(mode: str, dtype: torch.dtype) -> None:
    layer = make(mode, dtype=dtype)
    for shape in ((1, 1), (3, 7), (3, 65), (1, 200), (70, 2), (0, 5)):
        assert_same(layer, tokens(layer, *shape))
    for shape in ((3, 7), (2, 63), (3, 130)):
        x, mask = tokens(layer, *shape), scattered_padding(*shape)
        assert_same(layer, x, mask)
        expected = results(layer, x, mask)
        for filler in (torch.nan, torch.inf):
            for name, value in results(layer, x.masked_fill(mask[..., None], filler), mask).items():
                assert torch.equal(value, expected[name]), name
    assert_same(layer, tokens(layer, 0, 5), torch.zeros(0, 5).bool())
    assert_same(layer, tokens(layer, 48), cu_seqlens=torch.tensor([0, 5, 5, 47, 48], dtype=torch.int32))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {"head_dim": 48, "heads": 1, "rank": 30}) for mode in MODES),
        *((mode, {"head_dim": 12, "heads": 5, "rank": 3}) for mode in MODES),
        *((mode, {"head_dim": 2, "heads": 12, "rank": 1, "objective_form": "sum", "bias": False}) for mode in MODES),
        *(("data_dependent", {"objective_form": form, "objective_trace": "projections"}) for form in ("mean", "sum")),
        ("data_dependent", {"sampling": "random"}),
    ],
    ids=str,
)
def test_sizes_and_options_of_the_layer(mode: str, options: dict[str, Any]) -> None:
    layer = make(mode, **options)
    x = tokens(layer, 3, 70)
    assert_same(layer, x)
    assert_same(layer, x[:, :3])
    assert_same(layer, x, scattered_padding(3, 70))


def test_rows_below_the_smallest_norm() -> None:
    # There the divisor of the cosine map is a constant.
    layer = make("plain", bias=False)
    x = tokens(layer, 1, 6)
    x[:, 2] = 0.0
    x[:, 3] *= 1e-14
    assert_same(layer, x)


@every_mode
def test_gradients_of_one_tensor_and_of_the_objective_alone(mode: str) -> None:
    layer = make(mode)
    x, each = tokens(layer, 2, 30), []
    for one in (twin(layer), layer):
        rows = x.clone().requires_grad_()
        one(rows)
        grads = [*gradients(one, rows, ksvd_loss(one)).values()]
        one.requires_grad_(False)
        for leaf in (rows, one.qk_proj.weight, one.w_e, one.score_proj.bias, one.sqrt_lambda):
            leaf.requires_grad_()
            grads += torch.autograd.grad(one(rows).square().sum() + ksvd_loss(one), leaf)
            leaf.requires_grad_(False)
        each.append(grads)
    for expected, actual in zip(*each, strict=True):
        assert_close(actual, expected, SAME[torch.float64])


@pytest.mark.supports("checkpointing", "cpu")
@every_mode
def test_recomputation_has_the_same_gradients(mode: str) -> None:
    """By `recompute=True` and by activation checkpointing; dropout is drawn once."""
    layer = make(mode, dropout=0.3)
    x, each = tokens(layer, 2, 30), []
    for recompute, call in ((False, layer), (True, layer), (False, partial(checkpoint, layer, use_reentrant=False))):
        torch.manual_seed(0)
        layer.recompute = recompute
        rows = x.clone().requires_grad_()
        each.append([*gradients(layer, rows, call(rows).square().sum() + ksvd_loss(layer)).values()])
    for expected, *others in zip(*each, strict=True):
        assert all(torch.equal(other, expected) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mode
def test_half_precision_is_as_exact_as_the_equations_in_it(mode: str, dtype: torch.dtype) -> None:
    layer = make(mode, 16, 2, landmarks=50, dtype=dtype)
    x = tokens(layer, 2, 300)
    truth, eager, actual = (results(one, x) for one in (twin(layer), twin(layer, dtype), layer))
    for name, value in actual.items():
        assert value.dtype == eager[name].dtype, name
        limit = 1.2 * rms_ratio(eager[name], truth[name]) + 2 * torch.finfo(dtype).eps
        assert_close(value, truth[name], limit, name)


def test_dropout_keeps_the_expectation_and_its_mask() -> None:
    layer = make("plain", 8, 2, rank=4, dropout=0.25)
    x = tokens(layer, 1, 5)
    with torch.no_grad():
        mean = layer(x.expand(4000, -1, -1)).mean(dim=0, keepdim=True)
        assert_close(mean, layer.eval()(x), 0.05)  # 4000 draws
    layer.train()

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return layer(x)

    assert gradcheck(function, x.requires_grad_())


@pytest.mark.parametrize("rate", [1e-3, 0.5, 0.999])
def test_dropout_masks_are_independent_with_the_given_rate(rate: float) -> None:
    n = 2**20
    mask = attention.draw_dropout_mask((n + 3,), rate, torch.device("cpu"))[:n].double()
    tolerance = 5 * (rate * (1 - rate) / n) ** 0.5  # five standard deviations
    assert abs(mask.mean() - rate) < tolerance + 2**-17  # the rate is rounded to 16 bits
    for lag in (1, 2, 3, 4):  # four numbers share one draw
        product = ((mask[lag:] - rate) * (mask[:-lag] - rate)).mean()
        assert abs(product) < 5 * rate * (1 - rate) / n**0.5 + 2**-17


@causal_modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("_small_blocks")
def test_later_tokens_do_not_change_a_bit_of_earlier_outputs(mode: str, dtype: torch.dtype) -> None:
    layer = make(mode, dtype=dtype)
    x = tokens(layer, 2, 150)
    y = layer(x)
    for cut in (1, 64, 100):
        for later in (100.0 * torch.randn_like(x), torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
            changed = torch.cat([x[:, :cut], later[:, cut:]], dim=1)
            assert torch.equal(layer(changed)[:, :cut], y[:, :cut])


@causal_modes
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("_small_blocks")
def test_state_and_its_gradients_equal_the_equations(mode: str, masked: bool) -> None:
    layer = make(mode)
    x = tokens(layer, 3, 100)
    mask = scattered_padding(3, 100) if masked else torch.zeros(3, 100, dtype=torch.bool)
    tensors = []
    for layer.backend in ("reference", "cpu"):
        leaf, state, outputs = x.clone().requires_grad_(), layer.initial_state(3), []
        for part, part_mask in zip(leaf.split([70, 1, 29], dim=1), mask.split([70, 1, 29], dim=1), strict=True):
            y, state = layer(part, key_padding_mask=part_mask, state=state, return_state=True)
            outputs.append(y)
        sums = [state.query_sum, state.key_sum, state.weight]
        loss = sum((t.sin() * torch.arange(t.numel()).view_as(t)).sum() for t in (*outputs, *sums))
        inputs = [leaf, *layer.parameters()]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        tensors.append([*outputs, *sums, *grads])
    for expected, ours in zip(*tensors, strict=True):
        assert_close(ours, expected, 1e-11)  # a longer chain of the same sums


@every_mode
def test_bytes_saved_for_backward(mode: str) -> None:
    """x, z, the scores and the norms; nothing else grows with the tokens."""
    layer = make(mode, 32, 4, rank=10, landmarks=50, dtype=torch.float32)
    short, long = (saved_bytes(layer, tokens(layer, 1, n)) for n in (100, 300))
    per_token = (long - short) / 200
    assert per_token == 4 * (128 + 2 * 128 + 4 * 2 * 10 + 2 * 4)
    assert short - 100 * per_token < 4096


def test_a_second_derivative_is_refused() -> None:
    layer = make("plain")
    x = tokens(layer, 1, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
