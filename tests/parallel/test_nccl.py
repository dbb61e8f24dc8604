"""NCCL with one rank: the collectives run on the device, and a mesh of one rank changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from primal_attention import PrimalAttention, context_parallel
from primal_attention.parallel import collectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def mesh():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_the_collectives_and_their_gradients_run(mesh):
    group, x = mesh.get_group(), torch.randn(5, 3, device="cuda", requires_grad=True)
    # Call the functions directly: a group of one rank is not reduced.
    y = collectives._Sum.apply(x, group).sum() + collectives._Gather.apply(x, group).square().sum()
    y.backward()
    torch.testing.assert_close(x.grad, 1 + 2 * x.detach())
    assert torch.equal(collectives.OPS.wait_tensor(collectives.OPS.all_reduce(x.detach(), "max", group.group_name)), x)


@pytest.mark.supports("context parallelism", "cuda")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("data_dependent", [False, True])
def test_a_mesh_of_one_changes_nothing(mesh, causal: bool, data_dependent: bool):
    keywords = {"max_length": 4096} if causal and data_dependent else {}
    layer = PrimalAttention(64, 2, rank=16, causal=causal, data_dependent=data_dependent, device="cuda", **keywords)
    x = torch.randn(2, 3000, 64, device="cuda")
    mask = torch.zeros(2, 3000, dtype=torch.bool, device="cuda")
    mask[1, 2000:] = True
    other = context_parallel(copy.deepcopy(layer), mesh)
    for m in (layer, other):
        (m(x, mask).sum() + m.objective.sum()).backward()
    torch.testing.assert_close(other.objective, layer.objective)
    for a, b in zip(other.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()))
