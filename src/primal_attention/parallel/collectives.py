"""The collectives of a sharded sequence, differentiable, on PyTorch's functional collectives.

The gradients are the adjoints: of a sum over the ranks the sum, of a gathering the reduce-scatter. A backward pass
started on every rank then gives each rank its part of the gradient of the *sum* of all losses. Where every rank has the
same loss L, that sum is C·L, so that the *mean* over the ranks of a parameter's gradients is the gradient of L. DDP and
FSDP compute this mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

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
        own = OPS.reduce_scatter_tensor(t.contiguous(), "sum", group.size(), group.group_name)
        return OPS.wait_tensor(own).view(t.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.group), None


def sum_over(t: Tensor, group: ProcessGroup) -> Tensor:
    """Return Σ over the ranks, the same on all of them."""
    return t if group.size() == 1 else _Sum.apply(t, group)  # type: ignore[no-any-return]


def gather(t: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, which must have one shape: (…) → (ranks, …)."""
    return t[None] if group.size() == 1 else _Gather.apply(t, group)  # type: ignore[no-any-return]


@torch.no_grad()
def reduce(t: Tensor, group: ProcessGroup, by: str) -> Tensor:
    """Reduce over the ranks ("sum", "max", …) without a gradient."""
    if group.size() == 1:
        return t
    return OPS.wait_tensor(OPS.all_reduce(t.contiguous(), by, group.group_name))  # type: ignore[no-any-return]


class Traffic(TorchDispatchMode):
    """Count the bytes that this rank passes to each kind of collective, in the backward pass too.

        with Traffic() as traffic:
            layer(x).sum().backward()
        traffic.total, traffic.bytes["all_reduce"], traffic.calls["all_reduce"]

    The bytes sent depend on the algorithm: of S bytes, a ring over C ranks sends 2·S·(C − 1)/C from each rank in an
    all-reduce, S·(C − 1) in an all-gather and S·(C − 1)/C in a reduce-scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor" and isinstance(args[0], Tensor):
            kind = name.removesuffix("_into_tensor").removesuffix("_tensor")
            self.bytes[kind] += args[0].numel() * args[0].element_size()
            self.calls[kind] += 1
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
