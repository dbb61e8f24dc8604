"""The three collectives that a sharded sequence needs, as differentiable functions on PyTorch's functional collectives.

Their gradients are the true adjoints: of a sum over the ranks the sum, of a gathering the scattered sum. With them, a
backward pass started on every rank gives each rank its part of the gradient of the *sum* of all ranks' losses. Where
every rank holds the same loss L, that sum is C·L, so the *mean* over the ranks of a parameter's gradients is the
gradient of L: what DDP and FSDP compute anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

OPS = torch.ops._c10d_functional


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce(t, group, "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = OPS.all_gather_into_tensor(t.contiguous(), group.size(), group.group_name)
        return OPS.wait_tensor(gathered).view(group.size(), *t.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Scatter.apply(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        mine = OPS.reduce_scatter_tensor(t.contiguous(), "sum", group.size(), group.group_name)
        return OPS.wait_tensor(mine).view(t.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.group), None


def sum_over(t: Tensor, group: ProcessGroup) -> Tensor:
    """Σ over the ranks, the same on all of them."""
    return t if group.size() == 1 else _Sum.apply(t, group)  # type: ignore[no-any-return]


def gather(t: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's tensor, (…) → (ranks, …). All must have one shape."""
    return t[None] if group.size() == 1 else _Gather.apply(t, group)  # type: ignore[no-any-return]


@torch.no_grad()
def reduce(t: Tensor, group: ProcessGroup, by: str) -> Tensor:
    """Reduction over the ranks ("sum", "max", …) without a gradient."""
    if group.size() == 1:
        return t
    return OPS.wait_tensor(OPS.all_reduce(t.contiguous(), by, group.group_name))  # type: ignore[no-any-return]
