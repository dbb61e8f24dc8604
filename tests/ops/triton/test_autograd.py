"""Autograd on the kernels: reproducibility, saved tensors, checkpointing, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from kernel_cases import SAME, Layer, Results, assert_same, make, results, tokens, twin
from primal_attention.ops.triton import common


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay", "causal_landmarks_decay"])
def test_two_runs_are_bit_identical(device: torch.device, mode: str) -> None:
    # A GPU runs many blocks at once in no fixed order; the interpreter has one order, and a short input serves it.
    length = 3000 if device.type == "cuda" else 9
    layer = make(mode, heads=1, max_length=length).to(device)
    x = tokens(layer, 3, length)
    first, second = results(layer, x), results(layer, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "causal", "causal_landmarks"])
def test_training_goes_on_where_inference_mode_has_been(device: torch.device, mode: str) -> None:
    """Tables are made once for a shape, and autograd keeps none that were made in inference mode."""
    common._cached_uniform_sequences.cache_clear()
    common._cached_landmark_table.cache_clear()
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert torch.isfinite(layer.qk_proj.weight.grad).all()


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay", "causal_landmarks"])
@pytest.mark.parametrize("of", ["y", "objective", "a plain sum"])
def test_a_second_derivative_raises_instead_of_coming_out_as_zero(device: torch.device, mode: str, of: str) -> None:
    """Even of a sum, whose gradient is a constant and would let torch's own check pass."""
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 1, 5).requires_grad_()
    y = layer(x)
    losses = {"y": y.square().sum(), "objective": layer.objective.square().sum(), "a plain sum": layer.objective.sum()}
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(losses[of], x, create_graph=True)


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay"])
def test_a_graph_that_is_kept_can_be_walked_again(device: torch.device, mode: str) -> None:
    """The last walk writes gradients over what was kept for it; one with `retain_graph` must not."""
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 17).requires_grad_()
    wanted = [x, *layer.parameters()]
    loss = layer(x).square().sum() + layer.objective.square().sum()
    first, second, last = (torch.autograd.grad(loss, wanted, retain_graph=keep) for keep in (True, True, False))
    for name, *grads in zip(["x", *dict(layer.named_parameters())], first, second, last, strict=True):
        assert torch.equal(grads[0], grads[1]), name
        assert torch.equal(grads[0], grads[2]), name


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks"])
@pytest.mark.parametrize("of", ["y", "objective"])
def test_a_loss_of_one_result_alone_has_its_gradients(device: torch.device, mode: str, of: str) -> None:
    """A result that the loss does not hold sends no gradient back: its kernel must not wait for one."""
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)

    def gradients(one: Layer) -> Results:
        rows = x.to(one.w_e.dtype).requires_grad_()
        y = one(rows)
        loss = y.square().sum() if of == "y" else one.objective.sum()
        names, inputs = zip(("x", rows), *one.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return {
            f"gradient of {name}": torch.zeros_like(value) if grad is None else grad
            for name, value, grad in zip(names, inputs, grads, strict=True)
        }

    truth = gradients(twin(layer))
    assert_same(gradients(layer), truth)


@pytest.mark.parametrize("mode", ["data_dependent", "causal", "causal_landmarks"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)
    expected = results(layer, x)
    for parameter in (layer.qk_proj.bias, layer.w_e, layer.score_proj.bias, layer.out_proj.weight):
        parameter.requires_grad_(False)
    y = layer(x)
    assert torch.equal(y, expected["y"])
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == (parameter.requires_grad and name != "sqrt_lambda"), name


@pytest.mark.supports("checkpointing", "cuda")
@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks"])
def test_activation_checkpointing_changes_nothing(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7).requires_grad_()

    def gradients(recompute: bool) -> list[torch.Tensor]:
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        loss = y.square().sum() + layer.objective.square().sum()
        return list(torch.autograd.grad(loss, [x, *layer.parameters()]))

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("mode", "dropout"),
    [("data_dependent", 0.0), ("data_dependent", 0.3), ("learned_decay", 0.3), ("causal_landmarks", 0.0)],
)
def test_recomputing_keeps_less_and_changes_nothing(device: torch.device, mode: str, dropout: float) -> None:
    """Of what has at least the size of x, x alone is kept."""
    layer = make(mode, heads=1, dropout=dropout).to(device)
    x = tokens(layer, 2, 20).requires_grad_()

    def gradients(recompute: bool) -> tuple[int, list[torch.Tensor]]:
        layer.recompute = recompute
        kept: list[int] = []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            y = layer(x)
        loss = y.square().sum() + layer.objective.square().sum()
        return sum(n for n in kept if n >= x.numel()), list(torch.autograd.grad(loss, [x, *layer.parameters()]))

    (much, plain), (little, again) = gradients(False), gradients(True)
    assert much >= 3 * x.numel()
    assert little == x.numel()
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rank", [8, 5])
def test_dropout_falls_on_the_scores_alone(device: torch.device, rank: int) -> None:
    """Rank 5 leaves a stored column that carries the bias: dropout must pass it by."""
    layer = make("plain", rank=rank, dropout=0.5).to(device)
    x = tokens(layer, 2, 30)
    y, scores = layer(x, return_scores=True)
    kept = make("plain", rank=rank).to(device)
    kept.load_state_dict(layer.state_dict())
    clean, untouched = kept(x, return_scores=True)
    assert torch.equal(scores.e, untouched.e)
    assert torch.equal(layer.objective, kept.objective)
    assert not torch.equal(y, clean)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    assert_close(layer.out_proj.bias.grad, weight.sum((0, 1)), SAME, "gradient of the bias")
    with torch.no_grad():
        kept.w_e.zero_()
        kept.w_r.zero_()
        layer.load_state_dict(kept.state_dict())
        assert_close(layer(x), kept(x), SAME, "y of scores that are all zero")


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks"])
def test_evaluation_without_gradients_gives_the_same_output(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    x = tokens(layer, 2, 7)
    expected = layer(x)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), expected)


def test_a_slice_of_a_wider_tensor_is_taken_as_it_is(device: torch.device) -> None:
    """Input that is not contiguous, as a transposed or sliced batch is."""
    layer = make("data_dependent").to(device)
    wide = tokens(layer, 7, 2).transpose(0, 1)
    assert not wide.is_contiguous()
    assert_same(results(layer, wide), results(layer, wide.contiguous()), 0.0)
