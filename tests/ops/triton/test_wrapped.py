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


@pytest.mark.supports("DDP", "cuda")
@pytest.mark.supports("FSDP2", "cuda")
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiler launches kernels on a CUDA device only")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:.*barrier.*")
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_wrapped_layer_trains_as_it_does_alone(device: torch.device, way: str) -> None:
    layer = make("data_dependent").to(device)
    truth = twin(layer)
    x, mask = tokens(layer, 2, 9), torch.zeros(2, 9, dtype=torch.bool, device=device)
    mask[0, 5:] = True
    torch._dynamo.reset()
    compiled = torch.compile(WAYS[way](layer, device.type))
    found = {name.removeprefix("_orig_mod.module."): value for name, value in trained(compiled, x, mask).items()}
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    assert_same(found, trained(truth, x, mask), 1e-5)


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay"])
def test_float16_trains_with_a_gradient_scaler(device: torch.device, mode: str) -> None:
    layer = make(mode).to(device)
    x = tokens(layer, 2, 9)
    plain, scaled = ({name: None for name, _ in layer.named_parameters()} for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)  # a power of two: scaling rounds nothing
    for found, factor in ((plain, None), (scaled, scaler)):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = layer(x).float().square().mean() + ksvd_loss(layer)
        (loss if factor is None else factor.scale(loss)).backward()
        if factor is not None:
            factor.unscale_(optimizer)
        found |= {name: p.grad.clone() for name, p in layer.named_parameters()}
    # float16 gradients of the scores that are subnormal without the factor are rounded more coarsely.
    assert_same(scaled, plain, 2e-3)
    before = layer.w_e.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.w_e, before)
    assert scaler.get_scale() == 64.0
    layer.w_e.grad.fill_(torch.inf)
    scaler.scale(torch.ones((), device=device))  # the next step: an infinite gradient is skipped and halves the scale
    before = layer.w_e.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.w_e, before)
    assert scaler.get_scale() == 32.0
