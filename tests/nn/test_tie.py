"""In distributed training the gradients of output and objective leave the layer together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from closeness import assert_close
from primal_attention import ksvd_loss
from primal_cases import gradients, inputs, make


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_output_and_objective_come_from_one_node_with_the_same_gradients() -> None:
    layer = make("data_dependent")
    x = inputs(2, 7)
    y = layer(x)
    assert y.grad_fn is layer.objective.grad_fn
    tied = gradients(layer, y.square().mean() + ksvd_loss(layer))
    torch.distributed.destroy_process_group()
    expected = gradients(layer, layer(x).square().mean() + ksvd_loss(layer))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for name, grad in tied.items():
        assert_close(grad, expected[name], 1e-14, name)  # the node passes gradients on untouched


@pytest.mark.usefixtures("_process_group")
def test_either_gradient_may_be_missing_and_the_residual_may_be_in_place() -> None:
    layer = make("data_dependent")
    x = inputs(2, 7)
    layer(x)
    assert gradients(layer, ksvd_loss(layer))["w_e"].abs().sum() > 0
    y = layer(x)
    y += x
    assert gradients(layer, y.square().sum())["out_proj.weight"].abs().sum() > 0


@pytest.mark.usefixtures("_process_group")
def test_the_tie_compiles_without_a_graph_break() -> None:
    layer = make("data_dependent")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = inputs(2, 7)
    expected = gradients(layer, layer(x).square().mean() + ksvd_loss(layer))
    found = gradients(layer, compiled(x).square().mean() + ksvd_loss(layer))
    for name, grad in found.items():
        assert_close(grad, expected[name], 1e-12, name)
