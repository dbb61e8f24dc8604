"""The kernels inside DDP and FSDP2 with one process, where the gradients are those of the plain layer."""

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

WRAPPERS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "DDP": lambda net, _: DistributedDataParallel(net),
    "FSDP2": lambda net, kind: fully_shard(net, mesh=init_device_mesh(kind, (1,))),
}


@pytest.fixture
def _group(device: torch.device) -> Iterator[None]:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train_step(net: nn.Module, x: Tensor, mask: Tensor) -> Results:
    """Return the loss of a step and the gradients of all parameters, by their names in the plain layer."""
    loss = net(x.to(next(net.parameters()).dtype), mask).square().mean() + ksvd_loss(net)
    loss.backward()
    grads = {"loss": loss.detach()}
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        grads[name.removeprefix("_orig_mod.").removeprefix("module.")] = grad
    return grads


@pytest.mark.supports("DDP", "cuda")
@pytest.mark.supports("FSDP2", "cuda")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:.*barrier.*")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["data_dependent", "recomputed", "compiled"])
def test_a_wrapped_layer_trains_as_the_plain_layer(device: torch.device, mode: str, wrapper: str) -> None:
    if mode == "compiled" and device.type != "cuda":
        pytest.skip("the compiler launches kernels on a CUDA device only")
    layer = make("learned_decay", recompute=True) if mode == "recomputed" else make("data_dependent")
    layer = layer.to(device)
    truth = twin(layer)
    x, mask = tokens(layer, 2, 9), torch.zeros(2, 9, dtype=torch.bool, device=device)
    mask[0, 5:] = True
    wrapped = WRAPPERS[wrapper](layer, device.type)
    if mode == "compiled":
        torch._dynamo.reset()
        wrapped = torch.compile(wrapped)
    assert_same(train_step(wrapped, x, mask), train_step(truth, x, mask), 1e-5)


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay"])
def test_float16_trains_with_a_gradient_scaler(device: torch.device, mode: str) -> None:
    layer = make(mode).to(device)
    x, each = tokens(layer, 2, 9), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for is_scaled in (False, True):
        # A power of two: scaling rounds nothing.
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, enabled=is_scaled)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = layer(x).float().square().mean() + ksvd_loss(layer)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        each.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    plain, scaled = each
    # float16 gradients of the scores are subnormal without the factor and rounded more coarsely.
    assert_same(scaled, plain, 2e-3)
    before = layer.w_e.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(layer.w_e, before)
