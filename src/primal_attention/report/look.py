"""Measurements on models and layers: what they cost at a length, J on a data set, the spectrum of their attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.softmax import SoftmaxAttention
from primal_attention.nn.objective import primal_layers
from primal_attention.nn.primal import PrimalAttention
from primal_attention.train.batches import Batches
from primal_attention.train.task import objective


@torch.no_grad()
def mean_objective(model: nn.Module, batches: Batches) -> float | None:
    """Mean J over a data set without dropout, or None for a model that has no Primal layer."""
    layers = primal_layers(model)
    if not layers:
        return None
    was_training = model.training
    model.eval()
    for layer in layers.values():  # J is kept by layers in training mode; everything else stays in evaluation
        layer.train()
    total, cases = 0.0, 0
    for x, mask, *_ in batches:
        model(x, mask)
        total, cases = total + float(objective(model)) * len(x), cases + len(x)
    model.train(was_training)
    return total / cases


@torch.no_grad()
def singular_values(model: nn.Module, series: Iterable[Tensor], count: int) -> list[float]:
    """σ_i / σ_1 of the attention matrices, i up to `count`, mean over layers, heads and series (each (N, channels)).

    Softmax layers give softmax(QKᵀ/√p), Primal layers the asymmetric kernel matrix that their scores belong to. Series
    shorter than `count` are left out.
    """
    seen: list[Tensor] = []

    def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sigma = torch.linalg.svdvals(attention_matrix(layer, args[0]).double())[..., :count]  # (1, H, count)
        seen.append((sigma / sigma[..., :1].clamp(min=1e-300)).flatten(0, 1))

    layers = [m for m in model.modules() if isinstance(m, (PrimalAttention, SoftmaxAttention))]
    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    was_training = model.training
    model.eval()
    try:
        for x in series:
            if len(x) >= count:
                model(x.unsqueeze(0))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ValueError(f"no series has {count} steps, or the model has no softmax or Primal layer")
    return torch.cat(seen).mean(dim=0).tolist()


def attention_matrix(layer: nn.Module, x: Tensor) -> Tensor:
    """(B, H, N, N) of a softmax or Primal layer on its input."""
    if isinstance(layer, PrimalAttention):
        return layer.kernel_matrix(x)
    assert isinstance(layer, SoftmaxAttention)
    q, k, _ = layer.project_in(x)
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)


def time_lengths(
    attentions: Mapping[str, Mapping[str, Any]],
    lengths: Sequence[int],
    *,
    embed_dim: int,
    num_heads: int,
    limit: float = 2.0,
    step: Callable[[], object] = lambda: None,
) -> dict[str, dict[int, float]]:
    """Seconds of forward and backward of one layer on one sequence, by attention and length: the best of a few tries.

    A kind that has passed `limit` seconds is not tried on longer sequences. `step` is called after every measurement.
    """
    result: dict[str, dict[int, float]] = {}
    for name, keywords in attentions.items():
        layer = make_attention(name, embed_dim, num_heads, **keywords)
        points = result.setdefault(name, {})
        for n in lengths:
            if not points or max(points.values()) < limit:
                x = torch.randn(1, n, embed_dim, requires_grad=True)
                points[n] = best_time(lambda layer=layer, x=x: layer(x).sum().backward())  # type: ignore[misc]
            step()
    return result


def best_time(work: Callable[[], object], budget: float = 0.5) -> float:
    """Shortest of some calls, for about `budget` seconds; at least two, so that the first may warm up."""
    times: list[float] = []
    while len(times) < 2 or (sum(times) < budget and len(times) < 20):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
