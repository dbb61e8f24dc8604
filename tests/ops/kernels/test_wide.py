"""Heads whose rank is large against their width: no score is written, and everything is as the equations have it.

Memory that a kernel should have written is NaN before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from closeness import assert_close, rms_ratio
from kernel_cases import Layer, assert_same, make, results, tokens, twin
from primal_attention import PrimalAttention
from primal_attention.ops.fused import heads
from primal_attention.ops.kernels import running, scores, wide_back
from primal_attention.ops.kernels.wide import wide

MODES = ["data_dependent", "plain", "causal", "learned_decay"]
SMALL = {"head_dim": 16, "rank": 24}  # the narrowest heads that take this way, for what does not hang on their size

without_scores = partial(results, scored=False)


@pytest.fixture(autouse=True)
def _no_score_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("scores were written")

    monkeypatch.setattr(scores, "scores_forward", refuse)
    monkeypatch.setattr(running, "running_forward", refuse)


def assert_as_truth(layer: Layer, x: Tensor, *args: Any, **keywords: Any) -> dict[str, Tensor]:
    truth = without_scores(twin(layer), x, *args, **keywords)
    found = without_scores(layer, x, *args, **keywords)
    assert_same(found, truth)
    return found


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize(
    ("head_dim", "rank", "heads", "length"), [(16, 256, 1, 7), (48, 65, 1, 33), (64, 96, 2, 5), (60, 130, 1, 65)]
)
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_match_the_equations(
    device: torch.device, mode: str, head_dim: int, rank: int, heads: int, length: int
) -> None:
    layer = make(mode, head_dim, rank, heads).to(device)
    assert_as_truth(layer, tokens(layer, 2 if length < 10 else 1, length))


@pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_match_the_equations_over_many_chunks(device: torch.device, mode: str) -> None:
    """Several chunks of a sequence, several of them in a group of partial sums, and several groups."""
    layer = make(mode, **SMALL).to(device)
    assert_as_truth(layer, tokens(layer, 1, 300))


@pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")
@pytest.mark.parametrize("mode", MODES)
def test_padded_input_matches_and_what_stands_in_the_padding_is_never_read(device: torch.device, mode: str) -> None:
    layer = make(mode, **SMALL).to(device)
    mask = torch.ones(3, 75, dtype=torch.bool, device=device)
    for row, length in enumerate([70, 0, 5]):
        mask[row, torch.randperm(75)[:length]] = False
    x = tokens(layer, *mask.shape)
    x[mask] = float("nan")
    found = assert_as_truth(layer, x, mask)
    for name in ("y", "gradient of x"):
        assert not found[name][mask].any(), name


@pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")
@pytest.mark.parametrize("mode", MODES)
def test_packed_input_matches(device: torch.device, mode: str) -> None:
    layer = make(mode, **SMALL).to(device)
    cu_seqlens = torch.tensor([0, 0, 70, 70, 134, 139, 139], dtype=torch.int32, device=device)
    assert_as_truth(layer, tokens(layer, 139), cu_seqlens=cu_seqlens)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_without_biases_and_tokens_of_zeros_matches(device: torch.device, mode: str) -> None:
    layer = make(mode, **SMALL, bias=False).to(device)
    x = tokens(layer, 2, 7)
    x[0] = 0.0
    assert_as_truth(layer, x)


@pytest.mark.parametrize("keywords", [{"objective_form": "sum"}, {"objective_trace": "projections"}])
def test_every_form_of_the_objective_matches(device: torch.device, keywords: dict[str, Any]) -> None:
    layer = make("data_dependent", **SMALL, **keywords).to(device)
    assert_as_truth(layer, tokens(layer, 2, 7))


@pytest.mark.parametrize("mode", ["data_dependent", "causal"])
def test_an_empty_batch_gives_empty_results_and_zero_gradients(device: torch.device, mode: str) -> None:
    for name, value in without_scores(make(mode, **SMALL).to(device), torch.zeros(0, 7, 32, device=device)).items():
        assert not value.any(), name


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of", ["y", "objective"])
def test_a_loss_of_one_result_alone_has_its_gradients(device: torch.device, mode: str, of: str) -> None:
    """Without a gradient of J the kernels leave the energies' part out; without one of y they work on zeros."""
    layer = make(mode, **SMALL).to(device)
    x = tokens(layer, 1, 5)

    def gradients(one: Layer) -> dict[str, Tensor]:
        rows = x.to(one.w_e.dtype).requires_grad_()
        y = one(rows)
        loss = y.square().sum() if of == "y" else one.objective.sum()
        names, inputs = zip(("x", rows), *one.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return {n: torch.zeros_like(i) if g is None else g for n, i, g in zip(names, inputs, grads, strict=True)}

    truth = gradients(twin(layer))
    assert_same(gradients(layer), truth, 5e-5 if mode == "learned_decay" else 2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_kept_can_be_walked_again(device: torch.device, mode: str) -> None:
    """The last walk writes gradients over what was kept for it, and two runs agree bit for bit."""
    layer = make(mode, **SMALL).to(device)
    x = tokens(layer, 2, 9).requires_grad_()
    wanted = [x, *layer.parameters()]
    loss = layer(x).square().sum() + layer.objective.square().sum()
    first, last = (torch.autograd.grad(loss, wanted, retain_graph=keep) for keep in (True, False))
    for name, a, b in zip(["x", *dict(layer.named_parameters())], first, last, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_bit_identical(device: torch.device, mode: str, dtype: torch.dtype) -> None:
    """Sums over chunks pile up in few places. A GPU has enough of them at once to show an order that is not fixed."""
    size = {"head_dim": 64, "rank": 96, "heads": 6} if device.type == "cuda" else SMALL
    batch, length = (40, 3000) if device.type == "cuda" else (2, 20)
    layer = make(mode, **size).to(device, dtype)
    x = tokens(layer, batch, length)
    first, second = without_scores(layer, x), without_scores(layer, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_weights_that_are_kept_give_what_weights_made_again_give(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W_{e|X} from x, or as it was. The last walk writes its gradient over what was kept."""
    layer = make("data_dependent", **SMALL).to(device, torch.float16)
    x = tokens(layer, 2, 50).requires_grad_()
    wanted = [x, *layer.parameters()]

    def gradients(keep_weights: bool) -> list[tuple[Tensor, ...]]:
        monkeypatch.setattr(heads, "KEEP", keep_weights)
        loss = layer(x).float().square().sum() + layer.objective.square().sum()
        return [torch.autograd.grad(loss, wanted, retain_graph=keep) for keep in (True, False)]

    (made, _), kept = gradients(False), gradients(True)
    for walk in kept:
        assert all(torch.equal(a, b) for a, b in zip(walk, made, strict=True))


@pytest.mark.parametrize(
    ("dtype", "length", "kept"), [(torch.float16, 48, True), (torch.float16, 47, False), (torch.float32, 48, False)]
)
def test_the_weights_of_one_side_are_kept_where_they_are_small(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int, kept: bool
) -> None:
    """In 16 bits, up to half of x: and nothing else stays with them."""
    layer = make("data_dependent", **SMALL).to(device, dtype)
    x = tokens(layer, 3, length)

    def bytes_kept(keep_weights: bool) -> int:
        monkeypatch.setattr(heads, "KEEP", keep_weights)
        held: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            layer(x)
        return sum(held.values())

    one_side = 3 * layer.num_heads * SMALL["head_dim"] * SMALL["rank"] * x.element_size()
    assert bytes_kept(True) - bytes_kept(False) == (one_side if kept else 0)


@pytest.mark.parametrize("tokens_of_each", [9, 12])
def test_landmarks_that_are_all_the_tokens_or_some_of_them(device: torch.device, tokens_of_each: int) -> None:
    """make's nine landmarks."""
    layer = make("data_dependent", **SMALL).to(device, torch.float16)
    assert_as_exact_as_the_equations(layer, tokens(layer, 4, tokens_of_each))


@pytest.mark.usefixtures("bfloat16_rounds")
@pytest.mark.filterwarnings("ignore:rank=96 is above")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_layer_of_an_image_is_as_exact_as_the_equations(device: torch.device, compiled: bool) -> None:
    """Under autocast as in training, on a GPU in DeiT-S's size: what is right in small tiles may not be in large."""
    on_gpu = device.type == "cuda"
    batch, length, count = (64, 197, 6) if on_gpu else (2, 40, 2)
    layer = PrimalAttention(64 * count, count, rank=96, landmarks=length, backend="fused").to(device)
    equations = twin(layer, torch.float32)
    x = torch.randn(batch, length, 64 * count, device=device, requires_grad=True)
    down = torch.randn_like(x)
    torch._dynamo.reset()
    call = torch.compile(layer, backend="inductor" if on_gpu else "aot_eager") if compiled else layer

    def everything(layer: Layer, call: Any, rounded: bool) -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=rounded):
            y = call(x)
        loss = (y.float() * down).sum() + length * layer.objective.sum()  # J is a mean over the tokens
        names = ["x", *dict(layer.named_parameters())]
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        return {"y": y.detach(), "J": layer.objective.detach(), **dict(zip(names, gradients, strict=True))}

    truth, eager = (everything(equations, equations, rounded) for rounded in (False, True))
    assert_as_exact(everything(layer, call, rounded=True), eager, truth, torch.bfloat16)


def assert_as_exact(
    found: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype
) -> None:
    for name, value in found.items():
        assert value.dtype == eager[name].dtype, name
        # As in test_precision.py: room for a handful of numbers, and half of what one rounding costs.
        factor = 1.2 if value.numel() >= 32 else 3.0
        limit = max(factor * rms_ratio(eager[name], truth[name]), 0.1 * torch.finfo(dtype).eps)
        assert_close(value, truth[name], limit, name)


def assert_as_exact_as_the_equations(layer: Layer, x: Tensor) -> None:
    """In the layer's own dtype."""
    dtype = layer.w_e.dtype
    truth, eager, fused = (without_scores(one, x) for one in (twin(layer), twin(layer, dtype), layer))
    assert_as_exact(fused, eager, truth, dtype)


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.mark.usefixtures("bfloat16_rounds")
@HALVES
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_are_as_exact_as_the_equations_in_the_same_dtype(
    device: torch.device, mode: str, dtype: torch.dtype
) -> None:
    layer = make(mode, **SMALL, heads=4).to(device, dtype)
    assert_as_exact_as_the_equations(layer, tokens(layer, 1, 40))


@pytest.mark.usefixtures("bfloat16_rounds", "unwritten_memory_is_nan", "short_chunks")
@HALVES
@pytest.mark.parametrize("length", [76, 100])
@pytest.mark.parametrize("mode", ["data_dependent", "plain"])
def test_chunks_that_pile_up_their_sums_are_as_exact(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mode: str, length: int, dtype: torch.dtype
) -> None:
    """All chunks of three sequences in one group."""
    monkeypatch.setattr(wide_back, "AT_ONCE", 1)
    layer = make(mode, **SMALL, heads=4).to(device, dtype)
    assert_as_exact_as_the_equations(layer, tokens(layer, 3, length))


def test_a_small_gradient_of_the_energies_survives_half_precision(device: torch.device) -> None:
    """Of 1e-6 as a mean over many tokens makes it: as a factor in float16 it would lose most of its digits."""
    layer = make("plain", **SMALL).to(device, torch.float16)
    x = tokens(layer, 1, 9)

    def gradient(one: Layer) -> Tensor:
        one(x.to(one.w_e.dtype))
        return torch.autograd.grad(1e-4 * one.objective.sum(), one.qk_proj.bias)[0] * 1e4

    truth = gradient(twin(layer).double())
    assert rms_ratio(gradient(layer), truth) < rms_ratio(truth.mul(1e-4).half().double().mul(1e4), truth) + 2e-2


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay"])
def test_one_graph_serves_all_lengths(device: torch.device, mode: str) -> None:
    torch._dynamo.reset()
    layer = make(mode, **SMALL).to(device)
    plain = twin(layer, torch.float32, "fused")
    counter = CompileCounterWithBackend("aot_eager")
    call: Callable[..., Any] = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)

    def gradients(one: Callable[..., Any], owner: Layer, x: Tensor) -> dict[str, Tensor]:
        loss = one(x).square().sum() + owner.objective.square().sum()
        return dict(
            zip(
                ["x", *dict(owner.named_parameters())], torch.autograd.grad(loss, [x, *owner.parameters()]), strict=True
            )
        )

    graphs = set()
    for batch, length in [(2, 7), (3, 12)]:
        x = tokens(layer, batch, length).requires_grad_()
        assert_same(gradients(call, layer, x), gradients(plain, plain, x))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, "a length was compiled anew"


def test_without_gradients_and_without_an_objective_the_output_is_the_same(device: torch.device) -> None:
    layer = make("data_dependent", **SMALL).to(device)
    x = tokens(layer, 2, 7)
    expected = layer(x)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), expected)


def test_which_sizes_take_this_way() -> None:
    assert wide(6, 64, 96)
    assert wide(4, 64, 96)
    assert not wide(8, 64, 30)  # one product of both output maps is cheaper
    assert not wide(4, 128, 96)  # sums of width × width do not fit a program
