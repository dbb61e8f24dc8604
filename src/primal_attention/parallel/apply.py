"""Context parallelism for a whole model: tokens sharded over a dimension of a device mesh, parameters unchanged.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
    context_parallel(model, mesh["context"])
    loss = criterion(model(shard(x, mesh["context"])), …)       # the same number on the ranks of a sequence
    loss.backward()

Each rank's loss must be the loss of its *complete* sequences. Pooling layers compute it; sum a loss per token with
`Context.sum` and divide it by the number of all tokens. The gradient is then the mean over all ranks. DDP over all
ranks computes it, so does FSDP2 over the flattened mesh, and `average_gradients` for a model without either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..utils.collectives import gather, reduce
from .context import Context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)


def context_parallel(model: Model, mesh: DeviceMesh | None, dim_name: str | None = None) -> Model:
    """Make a model work on shards of its sequences, in place.

    Args:
        model: the model. A layer that mixes tokens and cannot work on a shard raises an error.
        mesh: the ranks of a sequence, or None to make the model work on complete sequences again.
        dim_name: the dimension of `mesh` that shards the tokens, if it has several.

    Returns:
        The model.
    """
    context = None if mesh is None else Context.over(mesh if dim_name is None else mesh[dim_name])
    if context is not None:
        _refuse_mixers(model)
    for module in model.modules():
        if hasattr(type(module), "context"):
            module.context = context  # type: ignore[assignment]
    return model


def _refuse_mixers(model: nn.Module) -> None:
    """Raise for a layer that mixes tokens without a context."""
    from ..nn.baselines.base import BaselineAttention
    from ..nn.primal import PrimalAttention

    of_torch = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)
    safe: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, PrimalAttention):
            has_context = type(module).forward is PrimalAttention.forward  # a subclass may mix tokens in other ways
        else:
            has_context = hasattr(type(module), "context")
        if has_context:  # the module passes its context on to its children
            for child in module.children():
                safe |= {id(child), *(map(id, child) if isinstance(child, nn.ModuleList) else ())}
        elif id(module) not in safe and isinstance(module, (*of_torch, BaselineAttention, PrimalAttention)):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) mixes tokens and cannot work on a part of a sequence: "
                "context parallelism is for models whose attention is Primal in every layer"
            )


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return this rank's tokens of x: consecutive, in the order of the ranks, the first ranks with one more if needed.

    Any other split into consecutive shards works too.

    Args:
        x: the tensor, the same on all ranks.
        mesh: the ranks of a sequence, one-dimensional.
        dim: the dimension of the tokens.
    """
    ranks, length = mesh.size(), x.shape[dim]
    if length < ranks:
        raise ValueError(f"a sequence of {length} tokens cannot be split over {ranks} ranks: each needs at least one")
    return x.tensor_split(ranks, dim)[mesh.get_local_rank()]


def unshard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the complete tensor that `shard` splits, on every rank; differentiable.

    Args:
        x: the tokens of this rank.
        mesh: the ranks of a sequence, one-dimensional.
        dim: the dimension of the tokens.
    """
    group = mesh.get_group()
    lengths = gather(torch.tensor([x.shape[dim]], device=x.device), group)[:, 0].tolist()
    rows = x.movedim(dim, 0)
    missing = x.new_zeros(max(lengths) - len(rows), *rows.shape[1:])
    every = gather(torch.cat([rows, missing]), group)
    return torch.cat([part[:n] for part, n in zip(every, lengths, strict=True)]).movedim(0, dim)


@torch.no_grad()
def average_gradients(parameters: nn.Module | Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Average every parameter's gradient over the mesh in one reduction, for a model without DDP or FSDP.

    Args:
        parameters: a model, or its parameters.
        mesh: all ranks that share the model.
    """
    tensors = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    by_kind: dict[Any, list[Tensor]] = {}
    for p in tensors:
        if not p.requires_grad:
            continue
        if p.grad is None:  # the ranks must agree on the shape of the reduction
            p.grad = torch.zeros_like(p)
        by_kind.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
    for grads in by_kind.values():
        flat = torch.cat([g.flatten() for g in grads])
        for d in range(mesh.ndim):
            flat = reduce(flat, mesh.get_group(d), "sum")
        flat /= mesh.size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))
