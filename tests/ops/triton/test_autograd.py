"""Autograd on the kernels: reproducibility, saved tensors, checkpointing, second derivatives, random landmarks."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import GridExecutor

from closeness import assert_close
from kernel_cases import MODES, SAME, assert_as_truth, assert_same, gradients, make, results, tokens, twin
from primal_attention.ops.triton import common
from primal_attention.ops.triton.causal_landmarks import landmark_grid

KERNELS = ["data_dependent", "learned_decay", "causal_landmarks"]
each_kernel = pytest.mark.parametrize("mode", KERNELS)
# Each family of kernels, with what is drawn at random.
RECOMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("data_dependent", {"dropout": 0.3}),
    ("data_dependent", {"sampling": "random"}),
    ("learned_decay", {"dropout": 0.3}),
    ("causal_landmarks", {}),
]
if torch.cuda.is_available():
    RECOMPUTED += [("data_dependent", {}), ("learned_decay", {})]


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay", "causal_landmarks_decay"])
def test_two_runs_are_bit_identical(device: torch.device, mode: str) -> None:
    # A GPU runs many blocks at once in no fixed order; the interpreter has one order, and a short input suffices.
    length = 3000 if device.type == "cuda" else 9
    layer = make(mode, heads=1, max_length=length).to(device)
    x = tokens(layer, 3, length)
    first, second = results(layer, x), results(layer, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("mode", [*KERNELS, "plain", "causal"] if torch.cuda.is_available() else KERNELS)
def test_training_after_inference_mode_and_evaluation_without_gradients(device: torch.device, mode: str) -> None:
    """Tables are cached by shape; autograd cannot save tensors that were created in inference mode, nor fake ones."""
    for table in (common.uniform_sequences, common.uniform_landmark_table, landmark_grid):
        table.cache_clear()
    with FakeTensorMode():
        common.uniform_sequences(2, 7, device)
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)
    with torch.inference_mode():
        layer(x)
    y = layer(x)
    y.sum().backward()
    assert torch.isfinite(layer.qk_proj.weight.grad).all()
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), y)


@pytest.mark.parametrize("mode", [*KERNELS, "plain"])
def test_a_second_derivative_raises_an_error(device: torch.device, mode: str) -> None:
    """Also of a sum, whose constant gradient passes torch's own check and gives zeros."""
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 1, 5).requires_grad_()
    y = layer(x)
    for loss in (y.square().sum(), layer.objective.square().sum(), layer.objective.sum()):
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay"])
def test_a_retained_graph_gives_the_same_gradients_again(device: torch.device, mode: str) -> None:
    """The last backward pass overwrites saved tensors with gradients; one with `retain_graph` must not."""
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 17).requires_grad_()
    loss = layer(x).square().sum() + layer.objective.square().sum()
    first, second, last = (gradients(layer, x, loss, retain_graph=keep) for keep in (True, True, False))
    assert_same(second, first, 0.0)
    assert_same(last, first, 0.0)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@each_kernel
def test_a_loss_of_one_result_has_its_gradients(device: torch.device, mode: str) -> None:
    """The backward kernels receive no gradient of a result that is not in the loss."""
    layer = make(mode, heads=1).to(device)
    truth, x = twin(layer), tokens(layer, 2, 7)
    for of_objective in (False, True):
        grads = []
        for one in (layer, truth):
            rows = x.to(one.w_e.dtype).requires_grad_()
            y = one(rows)
            grads.append(gradients(one, rows, one.objective.sum() if of_objective else y.square().sum()))
        assert_same(*grads)


@pytest.mark.parametrize("mode", ["data_dependent", "causal", "causal_landmarks"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)
    expected = layer(x)
    for parameter in (layer.qk_proj.bias, layer.w_e, layer.score_proj.bias, layer.out_proj.weight):
        parameter.requires_grad_(False)
    y = layer(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == (parameter.requires_grad and name != "sqrt_lambda"), name


@pytest.mark.supports("checkpointing", "cuda")
@pytest.mark.parametrize(("mode", "options"), RECOMPUTED, ids=str)
def test_recomputation_saves_x_only_and_changes_nothing(
    device: torch.device, mode: str, options: dict[str, Any]
) -> None:
    """By `recompute=True` and by activation checkpointing; dropout and random landmarks are drawn once."""
    layer = make(mode, heads=1, **options).to(device)
    x = tokens(layer, 2, 20).requires_grad_()

    def step(recompute: bool, call: Any = layer) -> tuple[int, dict[str, Tensor]]:
        layer.recompute = recompute
        sizes: list[int] = []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            y = call(x)
        grads = gradients(layer, x, y.square().sum() + layer.objective.square().sum())
        return sum(n for n in sizes if n >= x.numel()), grads  # of tensors that are at least as large as x

    saved, expected = step(False)
    saved_by_recompute, recomputed = step(True)
    _, checkpointed = step(False, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert saved >= 3 * x.numel()
    assert saved_by_recompute == x.numel()
    assert_same(recomputed, expected, 0.0)
    assert_same(checkpointed, expected, 0.0)


@pytest.mark.parametrize("rank", [8, 5])
def test_dropout_applies_to_the_scores_only(device: torch.device, rank: int) -> None:
    """With rank 5 a stored column carries the bias, which dropout must not change."""
    layer = make("plain", rank=rank, dropout=0.5).to(device)
    x = tokens(layer, 2, 30)
    y, scores = layer(x, return_scores=True)
    plain = make("plain", rank=rank).to(device)
    plain.load_state_dict(layer.state_dict())
    clean, clean_scores = plain(x, return_scores=True)
    assert torch.equal(scores.e, clean_scores.e)
    assert torch.equal(layer.objective, plain.objective)
    assert not torch.equal(y, clean)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    assert_close(layer.out_proj.bias.grad, weight.sum((0, 1)), SAME, "gradient of the bias")
    with torch.no_grad():
        plain.w_e.zero_()
        plain.w_r.zero_()
        layer.load_state_dict(plain.state_dict())
        assert_close(layer(x), plain(x), SAME, "y of scores that are all zero")


def test_input_that_is_not_contiguous_is_accepted(device: torch.device) -> None:
    layer = make("data_dependent").to(device)
    transposed = tokens(layer, 7, 2).transpose(0, 1)
    assert_same(results(layer, transposed), results(layer, transposed.contiguous()), 0.0)


# Random landmarks


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize(
    ("landmarks", "layout", "rank"),
    [(1, "full", 5), (2, "packed", 5), (9, "padded", 5), (40, "full", 16), (70, "packed", 5), (70, "padded", 5)],
)
def test_random_landmarks_are_those_of_the_equations(
    device: torch.device, landmarks: int, layout: str, rank: int
) -> None:
    layer = make("data_dependent", rank=rank, landmarks=landmarks, sampling="random").to(device)
    x, keywords = tokens(layer, 3, 24), {}
    if layout == "packed":
        x = tokens(layer, 75)
        keywords = {"cu_seqlens": torch.tensor((0, 30, 31, 31, 75), dtype=torch.int32, device=device)}
    elif layout == "padded":
        keywords = {"key_padding_mask": (torch.arange(24) % 5 == torch.tensor([[1], [2], [9]])).to(device)}
    assert_as_truth(layer, x, **keywords)


def test_training_draws_landmarks_in_every_pass_and_evaluation_none(device: torch.device) -> None:
    layer = make("data_dependent", sampling="random").to(device)
    x = tokens(layer, 2, 40)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        even = make("data_dependent").to(device).eval()
        even.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), even(x))


def test_a_kernel_is_at_most_five_calls_from_the_layer_in_four_files(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("the interpreter shows every launch")
    stacks: list[list[traceback.FrameSummary]] = []
    launch = GridExecutor.__call__

    def record(*args: Any, **keywords: Any) -> Any:
        stacks.append([frame for frame in traceback.extract_stack() if "/primal_attention/" in frame.filename])
        return launch(*args, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", record)
    for mode in MODES:
        layer = make(mode)
        layer(tokens(layer, 1, 70)).sum().backward()
    assert stacks
    for stack in stacks:
        # The last call is the launch itself.
        assert len(stack) <= 5, [frame.name for frame in stack]
        assert len({frame.filename for frame in stack}) <= 4
