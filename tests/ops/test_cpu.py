"""The CPU backend against the equations: outputs, J, scores, state and every gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.cpu import attention

# The same sums in another order. float32: some gradients are sums over all tokens that nearly cancel.
SAME = {torch.float64: 1e-12, torch.float32: 4e-6}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"data_dependent": False},
    "data_dependent": {},
    "causal": {"data_dependent": False, "causal": True},
    "causal_decay": {"data_dependent": False, "causal": True, "decay": "learned"},
}
every_mode = pytest.mark.parametrize("mode", MODES)
causal_modes = pytest.mark.parametrize("mode", ["causal", "causal_decay"])


def make(mode: str, d: int = 24, heads: int = 3, **keywords: Any) -> PrimalAttention:
    merged = {"rank": 5, "landmarks": 20, "dtype": torch.float64, "backend": "cpu", **MODES[mode], **keywords}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank above the head width is allowed
        return PrimalAttention(d, heads, **merged)


def scattered_padding(b: int, n: int) -> Tensor:
    """A padding mask with gaps inside the sequences; the last sequence is all padding."""
    mask = torch.rand(b, n) < 0.4
    mask[-1] = True
    return mask


def results(
    layer: PrimalAttention, backend: str, x: Tensor, mask: Tensor | None = None, **keywords: Any
) -> dict[str, Tensor]:
    """Outputs of a training pass, and all gradients of a loss that depends on each of them."""
    layer.backend = backend
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y, scores = layer(x, key_padding_mask=mask, return_scores=True, **keywords)
    loss = (y * torch.randn_like(y)).sum() + ksvd_loss(layer) + scores.e.pow(3).sum() + scores.r.sin().sum()
    inputs = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    tensors = {"y": y, "J": layer.objective, "e": scores.e, "r": scores.r}
    return tensors | {f"gradient of {name}": grad for name, grad in zip(inputs, grads, strict=True)}


def assert_same(layer: PrimalAttention, x: Tensor, mask: Tensor | None = None, **keywords: Any) -> None:
    ours, expected = (results(layer, backend, x, mask, **keywords) for backend in ("cpu", "reference"))
    for name, value in ours.items():
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
    layer = make(mode, dtype=dtype)  # 20 landmarks: rows repeat in the shorter sequences
    for shape in ((1, 1), (3, 7), (3, 65), (1, 200), (70, 2), (0, 5)):
        assert_same(layer, torch.randn(*shape, 24, dtype=dtype))
    for shape in ((3, 7), (2, 63), (3, 130)):
        x, mask = torch.randn(*shape, 24, dtype=dtype), scattered_padding(*shape)
        assert_same(layer, x, mask)
        expected = results(layer, "cpu", x, mask)
        for filler in (torch.nan, torch.inf):
            for name, value in results(layer, "cpu", x.masked_fill(mask[..., None], filler), mask).items():
                assert torch.equal(value, expected[name]), name
    assert_same(layer, torch.randn(0, 5, 24, dtype=dtype), torch.zeros(0, 5).bool())
    cu_seqlens = torch.tensor([0, 5, 5, 47, 48], dtype=torch.int32)
    assert_same(layer, torch.randn(48, 24, dtype=dtype), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {"d": 48, "heads": 1, "rank": 30}) for mode in MODES),
        *((mode, {"d": 60, "heads": 5, "rank": 3}) for mode in MODES),
        *((mode, {"heads": 12, "rank": 1, "objective_form": "sum", "bias": False}) for mode in MODES),
        *(("data_dependent", {"objective_form": form, "objective_trace": "projections"}) for form in ("mean", "sum")),
        ("data_dependent", {"sampling": "random"}),
    ],
    ids=str,
)
def test_sizes_and_options_of_the_layer(mode: str, options: dict[str, Any]) -> None:
    layer = make(mode, **options)
    x = torch.randn(3, 70, layer.embed_dim, dtype=torch.float64)
    assert_same(layer, x)
    assert_same(layer, x[:, :3])
    assert_same(layer, x, scattered_padding(3, 70))


def test_rows_below_the_smallest_norm() -> None:
    # There the divisor of the cosine map is a constant.
    layer = make("plain", bias=False)
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    x[:, 2] = 0.0
    x[:, 3] *= 1e-14
    assert_same(layer, x)


@every_mode
def test_gradients_of_one_tensor_and_of_the_objective_alone(mode: str) -> None:
    layer, x = make(mode), torch.randn(2, 30, 24, dtype=torch.float64)
    grads = []
    for layer.backend in ("reference", "cpu"):
        layer(x)
        parameters = list(layer.parameters())
        of_j = torch.autograd.grad(ksvd_loss(layer), parameters, allow_unused=True, materialize_grads=True)
        layer.requires_grad_(False)
        for leaf in (x, layer.qk_proj.weight, layer.w_e, layer.score_proj.bias, layer.sqrt_lambda):
            leaf.requires_grad_()
            of_j += torch.autograd.grad(layer(x).square().sum() + ksvd_loss(layer), leaf)
            leaf.requires_grad_(False)
        layer.requires_grad_()
        grads.append(of_j)
    for expected, actual in zip(*grads, strict=True):
        assert_close(actual, expected, SAME[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mode
def test_half_precision_is_as_exact_as_the_equations_in_it(mode: str, dtype: torch.dtype) -> None:
    exact = make(mode, 32, 2, landmarks=50).to(dtype).double()
    x = torch.randn(2, 300, 32).to(dtype).double()
    expected = results(exact, "reference", x)
    rounded = make(mode, 32, 2, landmarks=50).to(dtype)
    rounded.load_state_dict({name: value.to(dtype) for name, value in exact.state_dict().items()})
    errors = {}
    for backend in ("reference", "cpu"):
        errors[backend] = {
            name: ((value.double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)).item()
            for name, value in results(rounded, backend, x.to(dtype)).items()
        }
    for name, error in errors["cpu"].items():
        assert error <= 1.2 * errors["reference"][name] + 2 * torch.finfo(dtype).eps, name


def test_dropout_keeps_the_expectation_and_its_mask() -> None:
    layer = make("plain", 16, 2, rank=4, dropout=0.25)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
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
    x = torch.randn(2, 150, 24, dtype=dtype)
    y = layer(x)
    for cut in (1, 64, 100):
        for later in (100.0 * torch.randn_like(x), torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
            changed = torch.cat([x[:, :cut], later[:, cut:]], dim=1)
            assert torch.equal(layer(changed)[:, :cut], y[:, :cut])


@causal_modes
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("_small_blocks")
def test_state_and_its_gradients_equal_the_equations(mode: str, masked: bool) -> None:
    layer, x = make(mode), torch.randn(3, 100, 24, dtype=torch.float64)
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
    layer = make(mode, 128, 4, rank=10, landmarks=50, dtype=torch.float32)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sizes = []
    for n in (100, 300):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = layer(torch.randn(1, n, 128, requires_grad=True))
        del y
        sizes.append(sum(saved.values()))
    per_token = (sizes[1] - sizes[0]) / 200
    assert per_token == 4 * (128 + 2 * 128 + 4 * 2 * 10 + 2 * 4)
    assert sizes[0] - 100 * per_token < 4096


def test_a_second_derivative_is_refused() -> None:
    layer, x = make("plain"), torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
