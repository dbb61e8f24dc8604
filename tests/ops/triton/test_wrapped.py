"""The kernels inside DDP and FSDP2: a group of one, whose machinery is the same and whose gradients are the layer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kernel_cases import Results, assert_same, make, tokens, twin
from primal_attention import ksvd_loss

WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "DDP": lambda net, _: DistributedDataParallel(net),
    "FSDP2": lambda net, kind: fully_shard(net, mesh=init_device_mesh(kind, (1,))),
}


@pytest.fixture
def _group(device: torch.device) -> Iterator[None]:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(net: nn.Module, x: Tensor, mask: Tensor) -> Results:
    """The loss of a step, and the gradients of all weights by their plain names."""
    loss = net(x.to(next(net.parameters()).dtype), mask).square().mean() + ksvd_loss(net)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.removeprefix("module.")] = grad
    return found


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:.*barrier.*")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mode", "recompute"), [("data_dependent", False), ("learned_decay", True)])
def test_a_wrapped_layer_trains_as_it_does_alone(device: torch.device, mode: str, recompute: bool, way: str) -> None:
    layer = make(mode, recompute=recompute).to(device)
    truth = twin(layer)
    x, mask = tokens(layer, 2, 9), torch.zeros(2, 9, dtype=torch.bool, device=device)
    mask[0, 5:] = True
    assert_same(trained(WAYS[way](layer, device.type), x, mask), trained(truth, x, mask), 1e-5)
