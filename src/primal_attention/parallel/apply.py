"""Context parallelism for a whole model: tokens sharded over a dimension of a device mesh, weights left as they are.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "context"))
    context_parallel(model, mesh["context"])
    loss = criterion(model(shard(x, mesh["context"])), …)       # the same number on the ranks of a sequence
    loss.backward()

The gradients of the parameters: every rank's loss must be the loss of its *whole* sequences (pooling layers see to it;
a loss per token is summed with `Context.sum` and divided by the count of all tokens). Then the mean over all ranks,
those that share a sequence and those that do not, is the gradient. DDP over all ranks computes it, FSDP2 over the
flattened mesh too, and `average_gradients` does it for a bare model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .collectives import gather, reduce
from .context import Context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)


def context_parallel(model: Model, mesh: DeviceMesh | None, dim_name: str | None = None) -> Model:
    """Let the model work on shards of its sequences, in place. `None` for the mesh makes it whole again.

    mesh: one dimension, or several of which `dim_name` names the one that shards the tokens.

    Every layer that looks at more than one token must know how to work on a shard; one that does not is refused.
    """
    context = None if mesh is None else Context.over(mesh if dim_name is None else mesh[dim_name])
    if context is not None:
        _refuse_mixers(model)
    for module in model.modules():
        if hasattr(type(module), "context"):
            module.context = context  # type: ignore[assignment]
    return model


def _refuse_mixers(model: nn.Module) -> None:
    from ..nn.primal import PrimalAttention
    from ..nn.rivals.base import RivalAttention

    mixers = (
        RivalAttention,
        nn.MultiheadAttention,
        nn.RNNBase,
        nn.modules.conv._ConvNd,
        nn.modules.batchnorm._BatchNorm,
    )
    safe: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, PrimalAttention):
            knows = type(module).forward is PrimalAttention.forward  # a subclass may mix in ways of its own
        else:
            knows = hasattr(type(module), "context")
        if knows:  # it takes care of the layers that it holds itself
            held = (m for child in module.children() for m in (child, *_listed(child)))
            safe |= {id(m) for m in held}
        elif id(module) not in safe and isinstance(module, (*mixers, PrimalAttention)):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) mixes tokens and cannot work on a part of a sequence: "
                "context parallelism is for models whose attention is Primal in every layer"
            )


def _listed(module: nn.Module) -> Iterable[nn.Module]:
    return module if isinstance(module, nn.ModuleList) else ()


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's tokens of x: consecutive, in the order of the ranks; the first ranks have one more where it must be.

    Any split into consecutive stretches serves as well; data that is loaded in pieces need not come through here.
    """
    ranks, length = mesh.size(), x.shape[dim]
    if length < ranks:
        raise ValueError(f"a sequence of {length} tokens cannot be split over {ranks} ranks: each needs at least one")
    return x.tensor_split(ranks, dim)[mesh.get_local_rank()]


def unshard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """The whole of what `shard` splits, on every rank; differentiable."""
    group = mesh.get_group()
    here = torch.tensor([x.shape[dim]], device=x.device)
    lengths = gather(here, group)[:, 0].tolist()
    rows = x.movedim(dim, 0)
    missing = x.new_zeros(max(lengths) - len(rows), *rows.shape[1:])
    every = gather(torch.cat([rows, missing]), group)
    return torch.cat([part[:n] for part, n in zip(every, lengths, strict=True)]).movedim(0, dim)


@torch.no_grad()
def average_gradients(parameters: nn.Module | Iterable[Tensor], mesh: DeviceMesh) -> None:
    """The mean over the mesh of every parameter's gradient, in one reduction: for a model without DDP or FSDP."""
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [p for p in given if p.requires_grad]
    by_kind: dict[Any, list[Tensor]] = {}
    for p in trained:
        if p.grad is None:  # a rank that did not use it must send zeros, or the ranks would disagree on the shape
            p.grad = torch.zeros_like(p)
        by_kind.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
    for grads in by_kind.values():
        flat = torch.cat([g.flatten() for g in grads])
        for d in range(mesh.ndim):
            flat = reduce(flat, mesh.get_group(d), "sum")
        flat /= mesh.size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))
