"""The KSVD objective as a loss that regularises the layers towards a kernel SVD (Lemma 4.2: J = 0 at the solution)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..utils.collectives import sum_over
from . import checks
from .primal import PrimalAttention, RecordedCall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def primal_layers(model: nn.Module) -> dict[str, PrimalAttention]:
    """Return the Primal-Attention layers of a model by name. Frozen copies made by PEFT are left out."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module (got {type(model).__name__})")
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PrimalAttention) and "original_module" not in name.split(".")
    }


@contextmanager
def record_objective(model: nn.Module) -> Iterator[None]:
    """Record J of every call of the model's Primal layers, in training and evaluation mode.

    Inside the context `ksvd_loss` counts every call of a layer, for models that share layers (siamese encoders,
    parameter sharing over depth); recomputation by activation checkpointing is not counted. For gradient accumulation
    a call that has been differentiated is dropped when newer calls exist. Leaving the context clears the record.
    Outside it `ksvd_loss` counts the last call of each layer in training mode.

    Args:
        model: the model whose layers are recorded.

    Examples:
        >>> import torch
        >>> from primal_attention import PrimalAttention, ksvd_loss, record_objective
        >>> attn = PrimalAttention(64, 4, rank=8, landmarks=16).eval()
        >>> with record_objective(attn):
        ...     left, right = attn(torch.randn(2, 50, 64)), attn(torch.randn(2, 30, 64))
        ...     loss = ksvd_loss(attn)  # of both calls
    """
    outer = [(layer, layer._last_call) for layer in primal_layers(model).values()]
    for layer, _ in outer:
        layer._last_call = RecordedCall()
    try:
        yield
    finally:
        for layer, last_call in outer:
            layer._last_call = last_call


def ksvd_loss(
    model: nn.Module,
    reduction: Literal["sample", "batch"] = "sample",
    *,
    layers: Literal["mean", "sum"] = "mean",
    group: ProcessGroup | None = None,
    part: float = 1.0,
) -> Tensor:
    """Return the KSVD loss of the last forward pass, to be weighted by η and added to the task loss.

    The loss is float32, like J. In data-dependent layers it overflows to inf for inputs of about 1e10 and more.

    Args:
        model: a model with Primal layers.
        reduction: "sample" for mean_b J_b², "batch" for (mean_b J_b)².
        layers: average over the layers, as in the authors' runs, or sum over them, as in the paper.
        group: process group of data-parallel training. `reduction="batch"` needs it for the gradients of a single
            process with all samples, because a mean of squares is not the square of a mean.
        part: the number of samples of this rank divided by the mean over the ranks, if they differ.

    Returns:
        A scalar, differentiable if the forward pass was.

    Examples:
        >>> import torch
        >>> from primal_attention import PrimalAttention, ksvd_loss
        >>> attn = PrimalAttention(64, 4, rank=8, landmarks=16)
        >>> y = attn(torch.randn(2, 50, 64))
        >>> loss = y.square().mean() + 0.1 * ksvd_loss(attn)
        >>> loss.backward()
    """
    checks.one_of("reduction", reduction, ("sample", "batch"))
    checks.one_of("layers", layers, ("mean", "sum"))
    by_name = primal_layers(model)
    if not by_name:
        raise ValueError(f"model has no PrimalAttention layer ({type(model).__name__}), and so no KSVD objective")
    means = [_reduce(j, reduction) for name, layer in by_name.items() for j in _objectives(name, layer)]
    if not means:
        raise RuntimeError("no layer was called inside record_objective: call the model before ksvd_loss")
    if part != 1.0:
        means = [mean * part for mean in means]
    losses = [mean.square() for mean in _mean_over_ranks(means, group)] if reduction == "batch" else means
    if len(losses) == 1:
        return losses[0]
    total = torch.stack([loss.to(losses[0].device) for loss in losses])
    return total.mean() if layers == "mean" else total.sum()


def _objectives(name: str, layer: PrimalAttention) -> list[Tensor]:
    """J of the recorded calls of a layer, or of its last one."""
    if layer._last_call is not None:
        objectives = _recorded_objectives(layer._last_call)
    elif layer._objective is not None:
        objectives = [layer._objective]
    else:
        raise RuntimeError(f"layer {name!r} has no objective yet: call the model in training mode before ksvd_loss")
    for j in objectives:
        if torch.is_grad_enabled() and layer.training and not j.requires_grad and layer.sqrt_lambda.requires_grad:
            raise RuntimeError(
                f"the objective of layer {name!r} carries no gradient: its forward ran without one "
                "(with activation checkpointing, pass use_reentrant=False)"
            )
    return objectives


def _recorded_objectives(last: RecordedCall) -> list[Tensor]:
    """J of the recorded calls, the first one first. Differentiated calls count only if there are no others."""
    calls = []
    call: RecordedCall | None = last
    while call is not None and call.objective is not None:
        calls.append(call)
        call = call.previous
    calls = [call for call in calls if not call.is_differentiated] or calls
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for call in calls:
            if call.objective is not None and call.objective.requires_grad:
                call.objective.register_hook(call.mark_differentiated)
    return [call.objective for call in reversed(calls) if call.objective is not None]


def _reduce(j: Tensor, reduction: str) -> Tensor:
    if j.numel() == 0:
        return j.sum()
    if reduction == "batch":
        return j.mean()
    # One operator each: small layers are bound by the number of calls.
    return F.mse_loss(j, torch.zeros_like(j)) if not j.is_cpu else torch.dot(j, j) / j.shape[0]


def _mean_over_ranks(means: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """The mean over the ranks of each number, in one differentiable reduction."""
    if group is None or group.size() == 1:
        return means
    return list((sum_over(torch.stack(means), group) / group.size()).unbind())
