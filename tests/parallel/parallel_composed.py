"""Cases on four ranks: data and context parallelism together under DDP and FSDP2, bytes sent, the fused kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import parallel_cases as cases
import torch
import torch.distributed as dist
from parallel_cases import Differences, gap, mask_of, tiny_classifier
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from primal_attention import ksvd_loss
from primal_attention.models.uea import MaskedBatchNorm
from primal_attention.nn.blocks import EncoderBlock
from primal_attention.parallel import Context, context_parallel, shard
from primal_attention.parallel.collectives import Traffic
from primal_cases import MODES_AND_DECAYS, inputs, make

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def bare_ddp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in net.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def trained(mesh: DeviceMesh, wrap: Wrap, shares: list[list[int]], reduction: Any) -> Differences:
    """Compare a step on four samples, split over "data" by `shares` and over "context" by tokens."""
    net = tiny_classifier("modern")
    whole = copy.deepcopy(net)
    x, y, mask = torch.randn(4, cases.LENGTH, 2).double(), torch.tensor([0, 2, 1, 1]), mask_of(4, cases.LENGTH)
    loss0 = F.cross_entropy(whole(x, mask), y) + ksvd_loss(whole, reduction)
    loss0.backward()

    context_parallel(net, mesh, "context")
    everyone = dist.group.WORLD
    for norm in net.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.context = Context(everyone)
    wrapped = wrap(net, mesh)
    mine = shares[mesh.get_local_rank("data")]
    part = len(mine) * len(shares) / 4
    local, hidden = shard(x[mine], mesh["context"]), shard(mask[mine], mesh["context"])
    task = part * F.cross_entropy(wrapped(local, hidden), y[mine])
    loss1 = task + ksvd_loss(net, reduction, group=everyone, part=part)
    loss1.backward()
    total = loss1.detach().clone()
    dist.all_reduce(total)
    found, one = {"loss": gap(total / 4, loss0.detach())}, cases.grads(whole)
    for name, p in net.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[f"∂{name}"] = gap(grad, one[name])
    return found


def sent(mesh: DeviceMesh, mode: str, decay: Any, length: int) -> Traffic:
    layer = context_parallel(make(mode, decay, **({"max_length": 96} if "causal_data" in mode else {})), mesh)
    x, mask = inputs(2, length).requires_grad_(), torch.zeros(2, length, dtype=torch.bool)
    with Traffic() as traffic:
        y = layer(shard(x, mesh), shard(mask, mesh))
        (y.sum() + layer.objective.sum()).backward()
    return traffic


def bytes_do_not_grow(mesh: DeviceMesh, mode: str, decay: Any) -> Differences:
    """Compare the bytes of a training step of a layer at N and at 4·N tokens, by kind of collective."""
    short, long = sent(mesh, mode, decay, 24), sent(mesh, mode, decay, 96)
    assert short.total > 0
    return {kind: abs(long.bytes[kind] - short.bytes[kind]) for kind in {*short.bytes, *long.bytes}}


def fused(mesh: DeviceMesh, mode: str, decay: Any, mask: Tensor | None, sampling: str = "even") -> Differences:
    layer = make(mode, decay, sampling=sampling, backend="fused", dtype=torch.float32)
    return cases.attention(mesh, layer, inputs(3, cases.LENGTH, dtype=torch.float32), mask)


def without_context(mesh: DeviceMesh) -> Differences:
    """Control: shards without a context must differ from whole sequences."""
    layer, x = make("data_dependent"), inputs(3, cases.LENGTH)
    return {"y": gap(layer(shard(x, mesh)).detach(), shard(layer(x), mesh).detach())}


def on_four() -> Iterator[tuple[str, Callable[[], Differences]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    flat = mesh._flatten("all")
    ways: dict[str, Wrap] = {
        "DDP": bare_ddp,
        "FSDP2 over all ranks": lambda net, _: fsdp(net, flat),
        "FSDP2 over context, copies over data": fsdp,
    }
    for name, wrap in ways.items():
        yield f"data × context, {name}", lambda wrap=wrap: trained(mesh, wrap, [[0, 1], [2, 3]], "sample")
    for reduction in ("sample", "batch"):
        name = f"unequal batches, J per {reduction}"
        yield name, lambda reduction=reduction: trained(mesh, bare_ddp, [[0, 1, 2], [3]], reduction)
    for mode, decay in MODES_AND_DECAYS:
        name = f"{mode}{'' if decay is None else '+decay'}"
        yield f"bytes: {name}", lambda mode=mode, decay=decay: bytes_do_not_grow(flat, mode, decay)
    yield "control", lambda: without_context(flat)


# The interpreter is slow: each kernel once, and masks where the layout differs.
FUSED = [
    ("data_dependent", None, False),
    ("causal", None, False),
    ("causal", "learned", False),
    ("causal", "learned", True),
    ("causal_data_dependent", "learned", True),
    ("plain", "learned", False),
    ("plain", "learned", True),
]


def on_two(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], Differences]]]:
    for mode, decay, masked in FUSED:
        mask = mask_of(3, cases.LENGTH) if masked else None
        name = f"fused: {mode}{'' if decay is None else '+decay'}{' masked' if masked else ''}"
        yield name, lambda mode=mode, decay=decay, mask=mask: fused(mesh, mode, decay, mask)
    yield "fused: jittered landmarks", lambda: fused(mesh, "data_dependent", None, mask_of(3, cases.LENGTH), "random")
