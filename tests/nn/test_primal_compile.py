"""The layer under PyTorch's transformations: compile, export, func and gradcheck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_cases import MAX_LENGTH, MODES, MODES_AND_DECAYS, gradients, inputs, make, padding_mask

SAME = 1e-12  # float64, the same operations; compilers may reorder sums
LONG = ((3, 64), (2, 65), (4, 130))  # (batch, tokens) around the chunks of the decayed sums

every_mode = pytest.mark.parametrize("mode", MODES)
every_decay = pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)


class Block(nn.Module):
    """A residual block, so that a compiled or checkpointed region holds more than the layer alone."""

    def __init__(self, attn: PrimalAttention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(attn.embed_dim, dtype=torch.float64)
        self.attn = attn

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm(x), mask)


class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> None:
        torch.compiler.reset()

    @pytest.mark.supports("compile", "cpu")
    @every_mode
    def test_one_graph_trains_at_all_lengths(self, mode: str) -> None:
        block, counter = Block(make(mode)), CompileCounter()
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
        for b, n in ((3, 9), (5, 24), (3, 2), *(() if mode == "causal_data_dependent" else LONG)):
            x, mask, results = inputs(b, n), padding_mask([n // 2, *[n] * (b - 1)], n, "right"), []
            for call in (block, compiled):
                y = call(x, mask)
                results.append({"y": y, **gradients(block, y.square().mean() + ksvd_loss(block))})
            for name, expected in results[0].items():
                assert_close(results[1][name], expected, SAME, name)
        assert counter.frame_count == 1

    def test_the_default_compiler_trains(self) -> None:
        layer, x = make("data_dependent", bias=False), inputs(2, 9)
        trained = [layer.qk_proj.weight, layer.w_e]  # each further gradient costs seconds of C++ compilation
        layer.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_()
        # C++ without vector intrinsics compiles in two thirds of the time.
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, options={"cpp.simdlen": 1})
        results = []
        for call in (layer, compiled):
            y = call(x)
            results.append((y, *torch.autograd.grad(y.square().mean() + ksvd_loss(layer), trained)))
        for expected, actual in zip(*results, strict=True):
            assert_close(actual, expected, 1e-11)  # the compiler has its own order of sums

    @pytest.mark.parametrize(("mode", "feature_map"), [("plain", torch.tanh), ("causal_data_dependent", "softmax")])
    def test_every_feature_map_compiles_in_evaluation(self, mode: str, feature_map: Any) -> None:
        layer, x = make(mode, feature_map=feature_map).eval(), inputs(2, 9)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        assert_close(compiled(x), layer(x), SAME)

    def test_packed_input_compiles_with_max_seqlen(self) -> None:
        layer = make("data_dependent")
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
        for bounds, longest in (([0, 4, 9], 5), ([0, 7, 8, 15], 7)):
            x, cu_seqlens = inputs(bounds[-1]), torch.tensor(bounds, dtype=torch.int32)
            y, scores = compiled(x, cu_seqlens=cu_seqlens, max_seqlen=longest, return_scores=True)
            expected, expected_scores = layer(x, cu_seqlens=cu_seqlens, return_scores=True)
            for actual, other in zip((y, *scores), (expected, *expected_scores), strict=True):
                assert_close(actual, other, SAME)

    def test_steps_compile_once_for_all_positions(self) -> None:
        layer, counter = make("causal_data_dependent").eval(), CompileCounter()
        step = torch.compile(layer.step, fullgraph=True, dynamic=True, backend=counter)
        x, state = inputs(2, 12), layer.initial_state(2)
        expected = layer(x)
        with torch.no_grad():
            for t in range(12):
                y, state = step(x[:, t], state)
                assert_close(y, expected[:, t], SAME)
        assert counter.frame_count <= 3  # the first position and the general one, not one per token


@pytest.mark.supports("export", "cpu")
@every_mode
def test_an_exported_program_is_saved_and_loaded_and_serves_other_shapes(mode: str, tmp_path: Path) -> None:
    layer = make(mode).eval()
    sizes, longest = [(2, 9), (5, 20)], MAX_LENGTH
    if mode != "causal_data_dependent":
        sizes, longest = [*sizes, *LONG], 1000
    shape = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("tokens", min=2, max=longest)}
    masks = [torch.arange(n) >= torch.randint(1, n, (b, 1)) for b, n in sizes]
    program = torch.export.export(layer, (inputs(2, 9), masks[0]), dynamic_shapes=(shape, shape))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for mask in masks:
        x = inputs(*mask.shape)
        assert_close(loaded(x, mask), layer(x, mask), SAME)


@every_decay
def test_vmap_and_forward_derivatives(mode: str, decay: Any) -> None:
    layer = make(mode, decay).eval()
    x, direction = inputs(2, 9), inputs(2, 9)
    assert_close(torch.func.vmap(lambda one: layer(one[None])[0])(x), layer(x), SAME)
    _, slope = torch.func.jvp(layer, (x,), (direction,))
    h = 1e-6
    difference = (layer(x + h * direction) - layer(x - h * direction)) / (2 * h)
    assert_close(slope, difference, 1e-7, "jvp")  # h² of the central difference, and ε/h


@every_mode
def test_gradients_of_single_samples_by_vmap_equal_autograd(mode: str) -> None:
    layer, x = make(mode), inputs(3, 9)
    values = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        y = torch.func.functional_call(layer, values, (x,))
        return y.square().mean() + layer.objective.square().mean()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x[:, None])
    for b in range(3):
        y = layer(x[b : b + 1])
        for name, grad in gradients(layer, y.square().mean() + ksvd_loss(layer)).items():
            assert_close(per_sample[name][b], grad, SAME, name)


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@every_decay
def test_gradcheck(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map, rank=2)
    names = [name for name, _ in layer.named_parameters()]
    mask = torch.tensor([[False, False, False, True], [True, False, True, False]])

    def function(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, mask))
        return y, layer.objective

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(function, (inputs(2, 4).requires_grad_(), *values), fast_mode=True)
