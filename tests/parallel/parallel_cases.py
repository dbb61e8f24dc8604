"""Cases of context parallelism: each returns the largest differences from a single process, by quantity.

`worker.py` runs them on meshes of up to four ranks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.models.lra import LRAClassifier
from primal_attention.models.uea import modern_classifier, paper_classifier
from primal_attention.nn.objective import primal_layers
from primal_attention.parallel import Context, average_gradients, context_parallel, shard, unshard
from primal_cases import EMBED, MODES_AND_DECAYS, inputs, make

LENGTH = 14  # divides by 2, not by 3 or 4
Differences = dict[str, float]


def mask_of(batch: int, length: int) -> Tensor:
    """Padding at the end, in gaps, and over more than one whole shard."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, -5:] = True
    mask[1, ::3] = True
    mask[2, : length - 1] = True
    return mask


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the reference; infinite if a value is not finite."""
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.detach(), b.detach()
    if not torch.isfinite(a).all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) if a.numel() else 0.0


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def attention(mesh: DeviceMesh, layer: PrimalAttention, x: Tensor, mask: Tensor | None) -> Differences:
    """Compare outputs, scores, J and all gradients of one layer."""
    whole, context = copy.deepcopy(layer), Context.over(mesh)
    aim, weight = torch.randn_like(x), torch.randn(len(x), dtype=x.dtype)
    x0 = x.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y0, scores0 = whole(x0, mask, return_scores=True)
    ((y0 * aim).sum() + (whole.objective * weight).sum()).backward()

    context_parallel(layer, mesh)
    x1 = x.clone().requires_grad_()
    mask1 = None if mask is None else shard(mask, mesh)
    with torch.random.fork_rng():  # the seeds of the ranks differ: the layer must use the draw of the first rank
        torch.manual_seed(context.rank)
        y1, scores1 = layer(shard(x1, mesh), mask1, return_scores=True)
    (context.sum((y1 * shard(aim, mesh)).sum()) + (layer.objective * weight).sum()).backward()
    average_gradients([x1, *layer.parameters()], mesh)
    found = {"y": gap(unshard(y1.detach(), mesh), y0), "J": gap(layer.objective.detach(), whole.objective)}
    for side in ("e", "r"):
        found[side] = gap(unshard(getattr(scores1, side).detach(), mesh, 2), getattr(scores0, side))
    found["∂x"] = gap(x1.grad, x0.grad)
    one = grads(whole)
    return found | {f"∂{name}": gap(g, one[name]) for name, g in grads(layer).items()}


def model(
    mesh: DeviceMesh, net: nn.Module, loss_of: Callable[..., Tensor], ranks: DeviceMesh | None = None
) -> Differences:
    """Compare the loss with the KSVD loss, every J, buffers and all gradients of a model."""
    whole = copy.deepcopy(net)
    loss0 = loss_of(whole, None) + ksvd_loss(whole)
    loss0.backward()
    context_parallel(net, mesh)
    loss1 = loss_of(net, mesh) + ksvd_loss(net)
    loss1.backward()
    average_gradients(net, mesh)
    found, one, other = {"loss": gap(loss1.detach(), loss0.detach())}, grads(whole), primal_layers(whole)
    for name, layer in primal_layers(net).items():
        found[f"J {name}"] = gap(layer.objective.detach(), other[name].objective.detach())
    for name, buffer in net.named_buffers():
        found[name] = gap(buffer.double(), dict(whole.named_buffers())[name].double())
    return found | {f"∂{name}": gap(g, one[name]) for name, g in grads(net).items()}


def series_loss(x: Tensor, mask: Tensor | None, y: Tensor) -> Callable[..., Tensor]:
    def loss(net: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        if mesh is None:
            return F.cross_entropy(net(x, mask), y)
        return F.cross_entropy(net(shard(x, mesh), None if mask is None else shard(mask, mesh)), y)

    return loss


def language_loss(tokens: Tensor) -> Callable[..., Tensor]:
    """Inputs and targets are sharded alike, so no rank needs the next token of another one."""

    def loss(net: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        seen, target = tokens[:, :-1], tokens[:, 1:]
        if mesh is None:
            return F.cross_entropy(net(seen).flatten(0, 1), target.flatten())
        logits = net(shard(seen, mesh)).flatten(0, 1)
        total = F.cross_entropy(logits, shard(target, mesh).flatten(), reduction="sum")
        return Context.over(mesh).sum(total) / target.numel()

    return loss


def tiny_classifier(kind: str) -> nn.Module:
    given: dict[str, Any] = {
        "embed_dim": EMBED, "num_heads": 3, "layers": 2, "ffn_dim": 16, "dropout": 0.0,
        "attention_kwargs": {"primal": {"rank": 3, "landmarks": 5}},
    }  # fmt: skip
    if kind == "modern":
        return modern_classifier(2, 3, stem_kernel=7, local_kernel=5, differences=True, **given).double()
    if kind == "paper":
        return paper_classifier(2, 3, LENGTH + 2, **given).double()
    return LRAClassifier(11, 3, LENGTH, **given).double()


def tiny_language(mode: str, positions: str = "sinusoidal") -> LanguageModel:
    config = LanguageConfig(
        9, ("primal",), embed_dim=EMBED, num_heads=3, layers=2, ffn_dim=16, primal_mode=mode, rank=3, landmarks=5,
        max_length=LENGTH, conv=4, gate=True, positions=positions,
    )  # fmt: skip
    return LanguageModel(config).double()


def of_size(size: int, mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], Differences]]]:
    """Yield all cases of a mesh of `size` ranks by name."""
    for mode, decay in MODES_AND_DECAYS:
        for masked in (False, True):
            name = f"{mode}{'' if decay is None else '+decay'}{' masked' if masked else ''}"

            def run(mode: str = mode, decay: Any = decay, masked: bool = masked, **more: Any) -> Differences:
                mask = mask_of(3, LENGTH) if masked else None
                return attention(mesh, make(mode, decay, **more), inputs(3, LENGTH), mask)

            yield name, run
            if decay is not None or not masked:
                yield f"{name} softmax map", lambda run=run: run(feature_map="softmax")
    yield (
        "data_dependent sum of projections",
        lambda: attention(
            mesh, make("data_dependent", objective_form="sum", objective_trace="projections"), inputs(2, LENGTH), None
        ),
    )
    for mask in (None, mask_of(3, LENGTH)):
        name = f"data_dependent jittered landmarks{'' if mask is None else ' masked'}"
        layer = make("data_dependent", sampling="random")
        yield name, lambda layer=layer, mask=mask: attention(mesh, layer, inputs(3, LENGTH), mask)
    for kind in ("modern", "paper"):
        x, y = torch.randn(3, LENGTH, 2, dtype=torch.float64), torch.tensor([0, 2, 1])
        for mask in (None, mask_of(3, LENGTH)):
            name = f"{kind} classifier{'' if mask is None else ' masked'}"
            yield (
                name,
                lambda kind=kind, mask=mask, x=x, y=y: model(mesh, tiny_classifier(kind), series_loss(x, mask, y)),
            )
    ids = torch.randint(1, 11, (3, LENGTH))
    for mask in (None, mask_of(3, LENGTH)):
        name = f"token classifier{'' if mask is None else ' masked'}"
        yield (
            name,
            lambda mask=mask: model(mesh, tiny_classifier("lra"), series_loss(ids, mask, torch.tensor([0, 2, 1]))),
        )
    for mode in ("mean", "decay", "landmarks"):
        tokens = torch.randint(0, 9, (2, LENGTH + 1))
        yield (
            f"language model {mode}",
            lambda mode=mode, tokens=tokens: model(mesh, tiny_language(mode), language_loss(tokens)),
        )
