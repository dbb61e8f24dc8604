"""The collectives, differentiable, on PyTorch's functional ones.

The gradients are the adjoints: of a sum over the ranks the sum, of a gathering the reduce-scatter. A backward pass
started on every rank then gives each rank its part of the gradient of the *sum* of all losses. Where every rank has the
same loss L, that sum is C·L, so that the *mean* over the ranks of a parameter's gradients is the gradient of L. DDP and
FSDP compute this mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OPS = torch.ops._c10d_functional
ADJOINTS = {"sum": "sum", "gather": "scatter", "scatter": "gather"}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup, name: str) -> Tensor:
        ctx.group, ctx.adjoint = group, ADJOINTS[name]
        if name == "sum":
            return reduce(t, group, "sum")
        if name == "gather":
            gathered = OPS.all_gather_into_tensor(t.contiguous(), group.size(), group.group_name)
            return OPS.wait_tensor(gathered).view(group.size(), *t.shape)
        shard = OPS.reduce_scatter_tensor(t.contiguous(), "sum", group.size(), group.group_name)
        return OPS.wait_tensor(shard).view(t.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Collective.apply(grad, ctx.group, ctx.adjoint), None, None


def sum_over(t: Tensor, group: ProcessGroup) -> Tensor:
    """Return Σ over the ranks, the same on all of them."""
    return t if group.size() == 1 else _Collective.apply(t, group, "sum")  # type: ignore[no-any-return]


def gather(t: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, which must have one shape: (…) → (ranks, …)."""
    return t[None] if group.size() == 1 else _Collective.apply(t, group, "gather")  # type: ignore[no-any-return]


@torch.no_grad()
def reduce(t: Tensor, group: ProcessGroup, by: str) -> Tensor:
    """Reduce over the ranks ("sum", "max", …) without a gradient."""
    if group.size() == 1:
        return t
    return OPS.wait_tensor(OPS.all_reduce(t.contiguous(), by, group.group_name))  # type: ignore[no-any-return]
