"""The KSVD objective as a loss: what training adds so that the layers stay close to a kernel SVD (Lemma 4.2: J = 0)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .primal import PrimalAttention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def primal_layers(model: nn.Module) -> dict[str, PrimalAttention]:
    """The Primal-Attention layers of a model by name."""
    if isinstance(model, PrimalAttention):  # which has no other inside
        return {"": model}
    return {name: module for name, module in model.named_modules() if isinstance(module, PrimalAttention)}


def ksvd_loss(
    model: nn.Module,
    reduction: Literal["sample", "batch"] = "sample",
    *,
    layers: Literal["mean", "sum"] = "mean",
    group: ProcessGroup | None = None,
    part: float = 1.0,
) -> Tensor:
    """The loss Σ_l J_l² of the last forward in training mode, to be weighted by η and added to the task's loss.

    reduction "sample" is mean_b J_b², "batch" is (mean_b J_b)². `layers` averages over the layers, as the published
    runs do, or sums over them, as the paper writes it.

    group: in data-parallel training, the ranks whose batches together are the batch. The mean over the ranks, which DDP
    and FSDP take of the gradients, is then that of one process with all cases. "sample" needs no group, since a mean of
    means is a mean; "batch" does, since a mean of squares is no square of a mean.
    part: this rank's number of cases over the mean of all ranks', where they differ.
    """
    if reduction not in ("sample", "batch"):
        raise ValueError(f"reduction must be 'sample' or 'batch' (got {reduction!r})")
    if layers not in ("mean", "sum"):
        raise ValueError(f"layers must be 'mean' or 'sum' (got {layers!r})")
    found = primal_layers(model)
    if not found:
        raise ValueError(
            f"model has no PrimalAttention layer ({type(model).__name__}): there is no KSVD objective to add"
        )
    means = [_layer_mean(name, layer, reduction) for name, layer in found.items()]
    if part != 1.0:
        means = [mean * part for mean in means]
    losses = [mean.square() for mean in _over_ranks(means, group)] if reduction == "batch" else means
    if len(losses) == 1:
        return losses[0]
    total = torch.stack([loss.to(losses[0].device) for loss in losses])
    return total.mean() if layers == "mean" else total.sum()


def mean_square(j: Tensor) -> Tensor:
    """mean_b J_b², in as few and as small operators as there are: small layers feel every one."""
    if not j.is_cpu:
        return F.mse_loss(j, torch.zeros_like(j))  # as a distance from zero it is one node of autograd's
    total = torch.dot(j, j)
    return total if j.shape[0] == 1 else total / j.shape[0]


def _layer_mean(name: str, layer: PrimalAttention, reduction: str) -> Tensor:
    j = layer.objective
    if j is None:
        raise RuntimeError(f"layer {name!r} has no objective yet: call the model in training mode before ksvd_loss")
    if torch.is_grad_enabled() and not j.requires_grad and layer.sqrt_lambda.requires_grad:
        raise RuntimeError(
            f"the objective of layer {name!r} carries no gradient: its forward ran without one "
            "(with activation checkpointing, pass use_reentrant=False)"
        )
    if j.numel() == 0:
        return j.sum()
    return mean_square(j) if reduction == "sample" else j.mean()


def _over_ranks(means: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """The mean over the ranks of each number, in one reduction that gradients pass."""
    if group is None or group.size() == 1:
        return means
    from ..parallel.collectives import sum_over

    return list(sum_over(torch.stack(means), group).div(group.size()).unbind())
