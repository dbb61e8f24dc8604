"""The layer under PyTorch's own machinery: compile, func, checkpointing, copying and saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_cases import CAUSAL, MODES, MODES_AND_DECAYS, gradients, inputs, make

SAME = 1e-12  # float64, the same operations; compilers may reorder sums

every_mode = pytest.mark.parametrize("mode", MODES)
every_case = pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)


class Block(nn.Module):
    """A residual block, so that a compiled or checkpointed region holds more than the layer alone."""

    def __init__(self, attn: PrimalAttention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(attn.embed_dim, dtype=torch.float64)
        self.attn = attn

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm(x), mask)


class CompileCounter:
    """A compiler that runs the graph as it is and counts how many it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def masked(b: int, n: int) -> Tensor:
    mask = torch.zeros(b, n, dtype=torch.bool)
    mask[0, n // 2 :] = True
    return mask


def train_step(layer: nn.Module, block: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    y = block(x, mask)
    loss = y.square().mean() + ksvd_loss(layer)
    return y, gradients(layer, loss)


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> None:
        torch.compiler.reset()

    @every_case
    def test_training_has_no_graph_breaks_and_serves_many_lengths(self, mode: str, decay: Any) -> None:
        block = Block(make(mode, decay))
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="eager")
        for b, n in ((2, 9), (3, 17)):
            x, mask = inputs(b, n), masked(b, n)
            expected, expected_grads = train_step(block, block, x, mask)
            y, grads = train_step(block, compiled, x, mask)
            assert_close(y, expected, SAME)
            for name, grad in grads.items():
                assert_close(grad, expected_grads[name], SAME, name)

    @every_case
    def test_one_graph_serves_all_lengths(self, mode: str, decay: Any) -> None:
        layer = make(mode, decay).eval()
        counting = CompileCounter()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counting)
        for b, n in ((2, 9), (3, 17), (5, 24), (2, 2)):
            x = inputs(b, n)
            assert_close(compiled(x), layer(x), SAME)
        assert counting.graphs == 1

    @pytest.mark.parametrize("feature_map", ["softmax", torch.tanh])
    @every_mode
    def test_every_feature_map_compiles_in_evaluation(self, mode: str, feature_map: Any) -> None:
        layer = make(mode, feature_map=feature_map).eval()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        x = inputs(2, 9)
        assert_close(compiled(x), layer(x), SAME)

    @every_mode
    def test_packed_input_compiles_when_the_longest_is_told(self, mode: str) -> None:
        layer = make(mode)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for bounds, longest in (([0, 4, 9], 5), ([0, 7, 8, 15], 7)):
            x, cu_seqlens = inputs(bounds[-1]), torch.tensor(bounds, dtype=torch.int32)
            y = compiled(x, cu_seqlens=cu_seqlens, max_seqlen=longest)
            assert_close(y, layer(x, cu_seqlens=cu_seqlens), SAME)

    @pytest.mark.parametrize("mode", CAUSAL)
    def test_steps_compile_once_for_all_positions(self, mode: str) -> None:
        layer = make(mode).eval()
        counting = CompileCounter()
        step = torch.compile(layer.step, fullgraph=True, dynamic=True, backend=counting)
        x, state = inputs(2, 12), layer.initial_state(2)
        expected = layer(x)
        with torch.no_grad():
            for t in range(12):
                y, state = step(x[:, t], state)
                assert_close(y, expected[:, t], SAME)
        assert counting.graphs <= 3  # the first position and the general one, not one per token

    def test_scores_come_out_of_compiled_layers(self) -> None:
        layer = make("data_dependent").eval()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        x = inputs(2, 9)
        for ours, theirs in zip(compiled(x, return_scores=True)[1], layer(x, return_scores=True)[1], strict=True):
            assert_close(ours, theirs, SAME)

    def test_the_default_compiler_trains(self) -> None:
        block = Block(make("data_dependent"))
        compiled = torch.compile(block, fullgraph=True, dynamic=True)
        for b, n in ((2, 9), (3, 17)):
            x, mask = inputs(b, n), masked(b, n)
            expected, expected_grads = train_step(block, block, x, mask)
            y, grads = train_step(block, compiled, x, mask)
            assert_close(y, expected, SAME)
            for name, grad in grads.items():
                assert_close(grad, expected_grads[name], 1e-11, name)  # the compiler's own order of sums


@pytest.mark.parametrize("mode", ["data_dependent", *CAUSAL])
def test_input_without_mask_exports(mode: str) -> None:
    layer = make(mode).eval()
    program = torch.export.export(layer, (inputs(2, 9),), dynamic_shapes=({1: torch.export.Dim("tokens", max=24)},))
    x = inputs(2, 17)
    assert_close(program.module()(x), layer(x), SAME)


class TestFunc:
    @every_case
    def test_vmap_over_sequences_equals_the_batch(self, mode: str, decay: Any) -> None:
        layer = make(mode, decay).eval()
        x = inputs(4, 9)
        assert_close(torch.func.vmap(lambda one: layer(one[None])[0])(x), layer(x), SAME)

    @every_case
    def test_forward_derivatives_equal_finite_differences(self, mode: str, decay: Any) -> None:
        layer = make(mode, decay).eval()
        x, direction = inputs(2, 9), inputs(2, 9)
        _, slope = torch.func.jvp(layer, (x,), (direction,))
        h = 1e-6
        measured = (layer(x + h * direction) - layer(x - h * direction)) / (2 * h)
        assert_close(slope, measured, 1e-7, "jvp")  # h² of the central difference, and ε/h

    @every_mode
    def test_functional_call_and_grad_equal_autograd(self, mode: str) -> None:
        layer = make(mode)
        x = inputs(2, 9)
        parameters = dict(layer.named_parameters())

        def loss(values: dict[str, Tensor]) -> Tensor:
            y = torch.func.functional_call(layer, values, (x,))
            return y.square().mean() + layer.objective.square().mean()

        ours = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
        y = layer(x)
        for name, grad in gradients(layer, y.square().mean() + ksvd_loss(layer)).items():
            assert_close(ours[name], grad, SAME, name)

    def test_gradients_per_sample(self) -> None:
        layer = make("data_dependent").eval()
        x = inputs(3, 9)
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(values: dict[str, Tensor], one: Tensor) -> Tensor:
            return torch.func.functional_call(layer, values, (one[None],)).square().mean()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        for b in range(3):
            for name, grad in gradients(layer, layer(x[b : b + 1]).square().mean()).items():
                assert_close(per_sample[name][b], grad, SAME, name)


class TestGradcheck:
    @pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
    @every_case
    def test_analytic_gradients_are_right(self, mode: str, decay: Any, feature_map: str) -> None:
        layer = make(mode, decay, feature_map=feature_map, rank=2)
        names = [name for name, _ in layer.named_parameters()]
        mask = torch.tensor([[False, False, False, True], [True, False, True, False]])

        def function(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, mask))
            return y, layer.objective

        values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        assert torch.autograd.gradcheck(function, (inputs(2, 4).requires_grad_(), *values), fast_mode=True)


class TestCheckpointing:
    @every_case
    def test_without_reentry_gradients_are_the_same(self, mode: str, decay: Any) -> None:
        block = Block(make(mode, decay))
        x, mask = inputs(2, 9), masked(2, 9)
        _, expected = train_step(block, block, x, mask)
        _, grads = train_step(block, lambda *args: checkpoint(block, *args, use_reentrant=False), x, mask)
        for name, grad in grads.items():
            assert_close(grad, expected[name], SAME, name)

    def test_with_reentry_the_loss_says_what_to_do(self) -> None:
        block = Block(make("data_dependent"))
        checkpoint(block, inputs(2, 9).requires_grad_(), use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            ksvd_loss(block)


@every_mode
def test_accumulated_gradients_are_those_of_the_whole_batch(mode: str) -> None:
    layer = make(mode)
    x = inputs(6, 9)
    _, expected = train_step(layer, layer, x, None)
    for part in x.split(2):
        loss = layer(part).square().mean() + ksvd_loss(layer)
        (loss / 3).backward()
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, expected[name], SAME, name)


@every_mode
def test_two_forwards_before_one_backward_keep_their_own_objectives(mode: str) -> None:
    layer = make(mode)
    x = inputs(2, 9)
    layer(x[:1])
    first = ksvd_loss(layer)
    layer(x[1:])
    second = ksvd_loss(layer)
    layer(x)
    assert_close((first + second) / 2, ksvd_loss(layer), SAME)


@every_mode
def test_a_copy_after_a_forward_is_independent_and_starts_without_objective(mode: str) -> None:
    layer = make(mode)
    x = inputs(2, 9)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.objective is None
    assert layer.objective is not None
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        twin.w_e.zero_()
    assert torch.equal(layer(x), y)


@every_case
def test_weights_survive_safetensors(mode: str, decay: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer = make(mode, decay, feature_map="softmax")
    x = inputs(2, 9)
    y = layer(x)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = make(mode, decay, feature_map="softmax")
    assert not torch.equal(other(x), y)
    other.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), y)


def test_parameters_have_the_published_names_and_do_not_depend_on_length() -> None:
    layer = make("data_dependent", rank=4, landmarks=6)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
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


@every_mode
def test_an_in_place_residual_is_allowed(mode: str) -> None:
    layer = make(mode)
    x = inputs(2, 9).requires_grad_()
    (expected,) = torch.autograd.grad((layer(x) + x).square().sum() + ksvd_loss(layer), x)
    y = layer(x)
    y += x
    (grad,) = torch.autograd.grad(y.square().sum() + ksvd_loss(layer), x)
    assert_close(grad, expected, SAME)


def test_frozen_parameters_cost_no_error() -> None:
    layer = make("data_dependent").requires_grad_(False)
    x = inputs(2, 9).requires_grad_()
    (layer(x).sum() + ksvd_loss(layer)).backward()
    assert torch.isfinite(x.grad).all()


def test_the_layer_prints_what_it_is() -> None:
    assert "heads=3, rank=4, landmarks=6, causal, data-dependent" in repr(make("causal_data_dependent"))
    assert "landmarks" not in repr(make("plain"))
