"""The lean path's passes in PyTorch against the equations: outputs, J, scores, state and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from closeness import assert_close
from lean_cases import MODES, SAME, assert_same, holes, make, results
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops import backends
from primal_attention.ops.lean import blocks, output
from primal_attention.ops.lean.native import library
from primal_attention.ops.modes import COSINE, Mode

every_mode = pytest.mark.parametrize("mode", MODES)
causal_modes = pytest.mark.parametrize("mode", ["causal", "causal_decay"])


@pytest.fixture(autouse=True)
def _in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_lean_native.py has the passes in C."""
    monkeypatch.setenv("PRIMAL_NATIVE", "0")
    monkeypatch.setattr(library, "_found", {})


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows, so that short sequences cross their borders."""
    monkeypatch.setattr(blocks, "BLOCK", 1)


@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 63), (3, 65), (1, 500), (70, 2)], ids=str)
@every_mode
@pytest.mark.usefixtures("_small_blocks")
def test_everything_equals_the_equations(mode: str, shape: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
    # 20 landmarks: rows repeat in the shorter sequences.
    assert_same(make(mode, dtype=dtype), torch.randn(*shape, 24, dtype=dtype), holes(*shape) if masked else None)


@pytest.mark.parametrize(
    ("d", "heads", "rank"), [(48, 1, 30), (60, 5, 3), (32, 4, 16), (24, 12, 1)], ids=lambda value: str(value)
)
@every_mode
def test_sizes_with_and_without_folding(mode: str, d: int, heads: int, rank: int) -> None:
    layer = make(mode, d, heads, rank=rank)
    assert_same(layer, torch.randn(2, 150, d, dtype=torch.float64))
    assert_same(layer, torch.randn(1, 3, d, dtype=torch.float64))


@pytest.mark.parametrize(("batch", "masked"), [(1, False), (3, False), (3, True)])
def test_landmarks_that_move(batch: int, masked: bool) -> None:
    layer = make("data_dependent", sampling="random")
    x = torch.randn(batch, 40, 24, dtype=torch.float64)
    assert_same(layer, x, holes(batch, 40) if masked else None)


def test_both_output_maps_are_met() -> None:
    weights = make("plain", 48, 3, rank=5)._weights()
    assert type(output.output_map(weights, 3, 10_000)).__name__ == "Folded"
    assert type(output.output_map(weights, 3, 1)).__name__ == "Apart"


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("trace", ["weights", "projections"])
@pytest.mark.parametrize("masked", [False, True])
@every_mode
def test_every_form_of_the_objective(mode: str, form: str, trace: str, masked: bool) -> None:
    layer = make(mode, objective_form=form, objective_trace=trace)
    assert_same(layer, torch.randn(3, 40, 24, dtype=torch.float64), holes(3, 40) if masked else None)


@every_mode
def test_without_bias(mode: str) -> None:
    assert_same(make(mode, bias=False), torch.randn(2, 90, 24, dtype=torch.float64))


@every_mode
def test_packed_sequences(mode: str) -> None:
    cu_seqlens = torch.tensor([0, 5, 5, 47, 48], dtype=torch.int32)
    assert_same(make(mode), torch.randn(48, 24, dtype=torch.float64), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("masked", [False, True])
@every_mode
def test_an_empty_batch(mode: str, masked: bool) -> None:
    assert_same(make(mode), torch.randn(0, 5, 24, dtype=torch.float64), torch.zeros(0, 5).bool() if masked else None)


@every_mode
def test_padding_may_hold_anything(mode: str) -> None:
    layer, x, mask = make(mode), torch.randn(3, 50, 24, dtype=torch.float64), holes(3, 50)
    expected = results(layer, "lean", x, mask)
    for junk in (float("nan"), float("inf")):
        for name, value in results(layer, "lean", x.masked_fill(mask[..., None], junk), mask).items():
            assert torch.equal(value, expected[name]), name


def test_a_row_of_zeros_has_the_equations_gradient() -> None:
    # ‖z‖ is then below the floor of the cosine map, where the divisor is a constant.
    layer = make("plain", bias=False)
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    x[:, 2] = 0.0
    x[:, 3] *= 1e-14
    assert_same(layer, x)


@every_mode
def test_gradcheck(mode: str) -> None:
    layer = make(mode, 8, 2, rank=2, landmarks=3)
    names = [name for name, _ in layer.named_parameters()]
    mask = torch.tensor([[False, True, False, False], [False, False, True, True]])

    def function(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        y, scores = torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (x, mask), {"return_scores": True}
        )
        return y, layer.objective, *scores

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert gradcheck(function, (torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True), *values))


@pytest.mark.parametrize("which", ["qk_proj.weight", "w_e", "score_proj.bias", "sqrt_lambda", "x"])
def test_only_what_is_asked_for_gets_a_gradient(which: str) -> None:
    layer = make("data_dependent").requires_grad_(False)
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    expected = None
    for backend in ("reference", "lean"):
        layer.backend = backend
        wanted = (x if which == "x" else layer.get_parameter(which)).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum() + ksvd_loss(layer), wanted)
        if expected is not None:
            assert_close(grad, expected, SAME[torch.float64], which)
        expected = grad


@every_mode
def test_the_objective_alone_trains(mode: str) -> None:
    found = []
    layer, x = make(mode), torch.randn(2, 30, 24, dtype=torch.float64)
    for layer.backend in ("reference", "lean"):
        layer(x)
        names, parameters = zip(*layer.named_parameters(), strict=True)
        grads = torch.autograd.grad(ksvd_loss(layer), parameters, allow_unused=True, materialize_grads=True)
        found.append(dict(zip(names, grads, strict=True)))
    for name, grad in found[1].items():
        assert_close(grad, found[0][name], SAME[torch.float64], name)


@every_mode
def test_without_gradients_the_result_is_the_same(mode: str) -> None:
    layer, x = make(mode), torch.randn(3, 200, 24, dtype=torch.float64)
    y, scores = layer(x, return_scores=True)
    with torch.no_grad():
        again = layer(x, return_scores=True)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1].e, scores.e)
    with torch.no_grad():
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mode
def test_half_precision_is_as_exact_as_the_equations_in_it(mode: str, dtype: torch.dtype) -> None:
    exact = make(mode, 32, 2, landmarks=50).to(dtype).double()
    x = torch.randn(2, 300, 32).to(dtype).double()
    expected = {name: value.detach() for name, value in results(exact, "reference", x).items()}
    narrow = make(mode, 32, 2, landmarks=50).to(dtype)
    narrow.load_state_dict({name: value.to(dtype) for name, value in exact.state_dict().items()})
    errors = {}
    for backend in ("reference", "lean"):
        found = {name: value.detach() for name, value in results(narrow, backend, x.to(dtype)).items()}
        scale = {name: value.square().mean().sqrt().clamp(min=1e-30) for name, value in expected.items()}
        errors[backend] = {
            name: float((value.double() - expected[name]).square().mean().sqrt() / scale[name])
            for name, value in found.items()
        }
    rounding = torch.finfo(dtype).eps
    for name, error in errors["lean"].items():
        assert error <= 1.2 * errors["reference"][name] + 2 * rounding, name


@every_mode
def test_autocast(mode: str) -> None:
    layer, x = make(mode, dtype=torch.float32), torch.randn(2, 60, 24)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        loss = y.float().square().mean() + ksvd_loss(layer)
    assert y.dtype == torch.bfloat16
    assert layer.objective.dtype == torch.float32
    assert_close(y.float(), expected, 2e-2)  # bfloat16 has 8 bits
    for parameter, grad in zip(layer.parameters(), torch.autograd.grad(loss, list(layer.parameters())), strict=True):
        assert grad.dtype == parameter.dtype


def test_dropout_keeps_the_expectation_and_is_the_same_on_the_way_back() -> None:
    layer = make("plain", 16, 2, rank=4, dropout=0.25)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        mean = torch.stack([layer(x) for _ in range(4000)]).mean(0)
        assert_close(mean, layer.eval()(x), 0.05)  # 4000 draws
    layer.train()

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return layer(x)

    assert gradcheck(function, x.requires_grad_())


@causal_modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_small_blocks")
def test_the_future_does_not_reach_the_past_bit_for_bit(mode: str, dtype: torch.dtype) -> None:
    layer = make(mode, dtype=dtype)
    x = torch.randn(2, 150, 24, dtype=dtype)
    y = layer(x)
    for cut in (1, 17, 64, 100, 149):
        for future in (100.0 * torch.randn_like(x), torch.full_like(x, float("nan")), torch.full_like(x, float("inf"))):
            changed = torch.cat([x[:, :cut], future[:, cut:]], dim=1)
            assert torch.equal(layer(changed)[:, :cut], y[:, :cut])


@causal_modes
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("_small_blocks")
def test_the_state_and_its_gradients_equal_the_equations(mode: str, masked: bool) -> None:
    layer, x = make(mode), torch.randn(3, 100, 24, dtype=torch.float64)
    mask = holes(3, 100) if masked else torch.zeros(3, 100, dtype=torch.bool)
    found = []
    for layer.backend in ("reference", "lean"):
        leaf, state, ys = x.clone().requires_grad_(), layer.initial_state(3), []
        for piece, hidden in zip(leaf.split([70, 1, 29], dim=1), mask.split([70, 1, 29], dim=1), strict=True):
            y, state = layer(piece, hidden, state=state, return_state=True)
            ys.append(y)
        parts = [part for part in state if part is not None]
        loss = sum((part.sin() * torch.arange(part.numel()).view_as(part)).sum() for part in (*ys, *parts[:2]))
        found.append(
            [
                *ys,
                *parts,
                *torch.autograd.grad(loss, [leaf, *layer.parameters()], materialize_grads=True, allow_unused=True),
            ]
        )
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_close(ours, theirs, 1e-11, "state")  # a longer chain of the same sums


@every_mode
def test_memory_kept_for_the_way_back(mode: str) -> None:
    """x, z, the scores and the norms: nothing else that grows with the tokens, and little that does not."""
    layer = make(mode, 128, 4, rank=10, landmarks=50, dtype=torch.float32)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sizes = []
    for n in (100, 300):
        kept = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = layer(torch.randn(1, n, 128, requires_grad=True))
        del y
        sizes.append(sum(kept.values()))
    per_token = (sizes[1] - sizes[0]) / 200
    assert per_token == 4 * (128 + 2 * 128 + 4 * 2 * 10 + 2 * 4)
    assert sizes[0] - 100 * per_token < 4096


class TestChoice:
    def chosen(self, x: Tensor, mode: Mode | None = None) -> str:
        return backends.choose("auto", x, 4, mode or Mode(2, 6), COSINE, None)

    def test_auto_takes_it_on_a_cpu_for_all_but_small_input(self) -> None:
        assert self.chosen(torch.empty(1, 2**17, 1)) == "lean"
        assert self.chosen(torch.empty(1, 4, 8)) == "reference"

    def test_auto_leaves_to_the_equations_what_only_they_can(self) -> None:
        x = torch.zeros(1, 2**13, 16)
        assert self.chosen(x, Mode(2, 6, causal=True, max_length=2**13)) == "reference"
        assert torch.func.vmap(lambda one: torch.tensor(self.chosen(x) == "reference") | (one == one).all())(x).all()
        with torch.autograd.forward_ad.dual_level():
            assert self.chosen(x) == "reference"

    def test_asking_for_the_impossible_is_one_clear_line(self) -> None:
        layer = PrimalAttention(16, 2, rank=4, landmarks=6, causal=True, max_length=9, backend="lean")
        with pytest.raises(ValueError, match="backend='lean' cannot serve this call: the causal data-dependent mode"):
            layer(torch.randn(1, 5, 16))

    def test_a_second_derivative_says_that_it_is_missing(self) -> None:
        layer, x = make("plain"), torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(layer(x).sum(), x, create_graph=True)
