"""Context parallelism equals a single process: outputs, scores, J and all gradients."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from once import once
from primal_attention import PrimalAttention, context_parallel
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.models.uea import modern_classifier
from primal_attention.parallel import Context, shard, unshard
from primal_attention.utils import collectives
from primal_cases import inputs, make

# float64, and sums in another order; a gradient passes through some hundred additions of order one.
EXACT = 1e-10
# float32 kernels on shards against the reference in float64.
SINGLE = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Differences = dict[str, dict[str, dict[str, float]]]  # by group, comparison and quantity


@pytest.fixture(scope="session")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Differences:
    """Differences of up to four gloo processes from a single one."""

    def run_ranks(folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        worker = Path(__file__).with_name("worker.py")
        command = [sys.executable, "-W", "error:torch.distributed:FutureWarning", worker, folder / "differences.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    return json.loads((once(tmp_path_factory, "ranks", run_ranks) / "differences.json").read_text())


@pytest.mark.parametrize(
    ("group", "comparisons", "limit"), [("shards", 22, EXACT), ("data × context", 5, EXACT), ("fused", 5, SINGLE)]
)
def test_shards_equal_a_single_process(differences: Differences, group: str, comparisons: int, limit: float) -> None:
    assert len(differences[group]) == comparisons
    for name, quantities in differences[group].items():
        assert any(key.startswith("∂") for key in quantities), f"{name}: gradients are compared"
        assert max(quantities.values()) < limit, (name, quantities)


def test_bytes_sent_do_not_depend_on_the_length(differences: Differences) -> None:
    assert len(differences["bytes"]) == 7
    for name, kinds in differences["bytes"].items():
        assert set(kinds.values()) == {0.0}, name


# In one process


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with this process only."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("context",))


@pytest.fixture
def device_mesh(group: None) -> DeviceMesh:
    return init_device_mesh(DEVICE, (1,))


def test_the_collectives_and_their_gradients_run_on_the_device(device_mesh):
    group, x = device_mesh.get_group(), torch.randn(5, 3, device=DEVICE, requires_grad=True)
    # Call the functions directly: a group of one rank is not reduced.
    total, rows = (collectives._Collective.apply(x, group, name) for name in ("sum", "gather"))
    (total.sum() + rows.square().sum()).backward()
    torch.testing.assert_close(x.grad, 1 + 2 * x.detach())
    assert torch.equal(collectives.OPS.wait_tensor(collectives.OPS.all_reduce(x.detach(), "max", group.group_name)), x)


@pytest.mark.supports("context parallelism", "cuda")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("data_dependent", [False, True])
def test_a_mesh_of_one_rank_changes_nothing(device_mesh, causal: bool, data_dependent: bool):
    length = 3000 if DEVICE == "cuda" else 60
    keywords = {"max_length": length} if causal and data_dependent else {}
    layer = PrimalAttention(64, 2, rank=16, causal=causal, data_dependent=data_dependent, device=DEVICE, **keywords)
    x = torch.randn(2, length, 64, device=DEVICE)
    mask = torch.zeros(2, length, dtype=torch.bool, device=DEVICE)
    mask[1, 2 * length // 3 :] = True
    other = context_parallel(copy.deepcopy(layer), device_mesh)
    for m in (layer, other):
        (m(x, mask).sum() + m.objective.sum()).backward()
    torch.testing.assert_close(other.objective, layer.objective)
    for a, b in zip(other.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()))


def test_context_parallelism_can_be_removed(mesh):
    layer, x = make("data_dependent"), inputs(2, 9)
    y = layer(x)
    context_parallel(layer, mesh, "context")
    assert isinstance(layer.context, Context)
    assert copy.deepcopy(layer).context is layer.context
    context_parallel(layer, None)
    assert layer.context is None
    assert torch.equal(layer(x), y)
    assert torch.equal(unshard(shard(x, mesh), mesh), x)


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (
            lambda: modern_classifier(2, 3, embed_dim=8, num_heads=2, layers=2, attention="primal+"),
            "blocks.0.attention",
        ),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), "'0'"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3)), "'1'"),
        (lambda: LanguageModel(LanguageConfig(9, ("softmax",), 8, 2, 1, 16)), "blocks.0.attention"),
        (lambda: LanguageModel(LanguageConfig(9, ("primal",), 8, 2, 1, 16, primal_mode="delta", rank=2)), "blocks.0"),
    ],
)
def test_layers_that_mix_tokens_without_a_context_are_refused_by_name(mesh, model, layer: str):
    with pytest.raises(ValueError, match=rf"{layer}.*mixes tokens"):
        context_parallel(model(), mesh)


def test_calls_that_need_whole_sequences_are_refused(mesh):
    layer = context_parallel(make("causal"), mesh)
    with pytest.raises(ValueError, match="state needs complete sequences"):
        layer(inputs(1, 4), return_state=True)
    with pytest.raises(ValueError, match="cu_seqlens needs complete sequences"):
        layer(inputs(4), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="the kernel needs complete sequences"):
        layer.kernel_matrix(inputs(1, 4))
    layer = context_parallel(make("causal_data_dependent"), mesh)
    with pytest.raises(ValueError, match="max_length=24 is exceeded by a sequence of 25 tokens"):
        layer(inputs(1, 25))


def test_a_mesh_of_several_dimensions_must_be_sliced(group):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "context"))
    with pytest.raises(ValueError, match=r"mesh must have one dimension \(got 2\)"):
        context_parallel(make("causal"), mesh)
    assert context_parallel(make("causal"), mesh, "context").context.size == 1


def test_more_ranks_than_tokens_are_refused():
    with pytest.raises(ValueError, match="a sequence of 3 tokens cannot be split over 4 ranks"):
        shard(inputs(1, 3), SimpleNamespace(size=lambda: 4))
