"""Compare context parallelism with a single process on up to four ranks; rank 0 writes the differences as JSON.

python tests/parallel/worker.py differences.json

The ranks are forked, so that the imports are paid once.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import fast_interpreter
from primal_attention import ksvd_loss
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.models.lra import LRAClassifier
from primal_attention.models.uea import MaskedBatchNorm, modern_classifier, paper_classifier
from primal_attention.nn.blocks import EncoderBlock
from primal_attention.nn.objective import primal_layers
from primal_attention.parallel import Context, average_gradients, context_parallel, shard, unshard
from primal_cases import EMBED, MODES_AND_DECAYS, inputs, make

RANKS = 4
LENGTH = 14  # divides by 2, not by 3
Differences = dict[str, float]  # by quantity, relative to a single process
Comparison = tuple[str, str, Callable[[], Differences]]  # group, name, function


def mask_of(batch: int, length: int) -> Tensor:
    """Padding at the end, in gaps, and over more than one whole shard."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, -5:] = True
    mask[1, ::3] = True
    mask[2, : length - 1] = True
    return mask


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the reference; infinite if a value is not finite."""
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.detach(), b.detach()
    if not torch.isfinite(a).all():
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) if a.numel() else 0.0


def gradient_differences(module: nn.Module, single: nn.Module) -> Differences:
    expected = dict(single.named_parameters())
    differences = {}
    for name, p in module.named_parameters():
        grads = [torch.zeros_like(q) if q.grad is None else q.grad for q in (p, expected[name])]
        grads[0] = grads[0].full_tensor() if hasattr(grads[0], "full_tensor") else grads[0]
        differences[f"∂{name}"] = difference(*grads)
    return differences


def own(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The shard of this rank; x itself in a single process."""
    return x if mesh is None else shard(x, mesh)


def compare_layer(mesh: DeviceMesh, options: dict[str, Any], mask: Tensor | None) -> Differences:
    """Compare outputs, scores, J and all gradients of one layer with the reference in float64 in a single process."""
    layer = make(**options)
    x = inputs(3, LENGTH, dtype=layer.w_e.dtype)
    single, context = copy.deepcopy(layer).double(), Context.over(mesh)
    single.backend = "reference"
    aim, weight = torch.randn_like(x), torch.randn(len(x), dtype=x.dtype)
    x0 = x.clone().double().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y0, scores0 = single(x0, mask, return_scores=True)
    ((y0 * aim).sum() + (single.objective * weight).sum()).backward()

    context_parallel(layer, mesh)
    x1 = x.clone().requires_grad_()
    mask1 = None if mask is None else shard(mask, mesh)
    with torch.random.fork_rng():  # the seeds of the ranks differ: the layer must use the draw of the first rank
        torch.manual_seed(context.rank)
        y1, scores1 = layer(shard(x1, mesh), mask1, return_scores=True)
    (context.sum((y1 * shard(aim, mesh)).sum()) + (layer.objective * weight).sum()).backward()
    average_gradients([x1, *layer.parameters()], mesh)
    differences = {"y": difference(unshard(y1.detach(), mesh), y0), "J": difference(layer.objective, single.objective)}
    for side in ("e", "r"):
        differences[side] = difference(unshard(getattr(scores1, side).detach(), mesh, 2), getattr(scores0, side))
    return differences | {"∂x": difference(x1.grad, x0.grad)} | gradient_differences(layer, single)


def compare_model(mesh: DeviceMesh, name: str, loss_of: Callable[..., Tensor]) -> Differences:
    """Compare the loss with the KSVD loss, every J, buffers and all gradients of a model."""
    model = make_model(name)
    single = copy.deepcopy(model)
    loss0 = loss_of(single, None) + ksvd_loss(single)
    loss0.backward()
    context_parallel(model, mesh)
    loss1 = loss_of(model, mesh) + ksvd_loss(model)
    loss1.backward()
    average_gradients(model, mesh)
    differences, expected = {"loss": difference(loss1, loss0)}, primal_layers(single)
    for name, layer in primal_layers(model).items():
        differences[f"J {name}"] = difference(layer.objective, expected[name].objective)
    for name, buffer in model.named_buffers():
        differences[name] = difference(buffer.double(), dict(single.named_buffers())[name].double())
    return differences | gradient_differences(model, single)


def class_loss(x: Tensor, mask: Tensor) -> Callable[..., Tensor]:
    return lambda model, mesh: F.cross_entropy(model(own(x, mesh), own(mask, mesh)), torch.tensor([0, 2, 1]))


def language_loss(tokens: Tensor) -> Callable[..., Tensor]:
    """Inputs and targets are sharded alike, so no rank needs the next token of another one."""

    def loss(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
        logits, targets = model(own(tokens[:, :-1], mesh)), own(tokens[:, 1:], mesh)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return (total if mesh is None else Context.over(mesh).sum(total)) / tokens[:, 1:].numel()

    return loss


def make_model(name: str) -> nn.Module:
    common: dict[str, Any] = {"embed_dim": EMBED, "num_heads": 3, "layers": 2, "ffn_dim": 16}
    classifier = {**common, "dropout": 0.0, "attention_kwargs": {"primal": {"rank": 3, "landmarks": 5}}}
    if name == "modern":
        return modern_classifier(2, 3, stem_kernel=7, local_kernel=5, **classifier).double()
    if name == "paper":
        return paper_classifier(2, 3, LENGTH + 2, **classifier).double()
    if name == "lra":
        return LRAClassifier(11, 3, LENGTH, **classifier).double()
    primal = {"primal_mode": name, "rank": 3, "landmarks": 5, "max_length": LENGTH}
    return LanguageModel(LanguageConfig(9, ("primal",), **common, **primal, conv=4, gate=True)).double()


def shard_comparisons(mesh: DeviceMesh) -> Iterator[Comparison]:
    mask = mask_of(3, LENGTH)
    maps = {"softmax": None, "cosine": mask}
    for mode, decay in MODES_AND_DECAYS:
        for feature_map, padding in maps.items():
            options = {"mode": mode, "decay": decay, "feature_map": feature_map}
            yield "shards", str(options), partial(compare_layer, mesh, options, padding)
    for extra in ({"sampling": "random"}, {"objective_form": "sum", "objective_trace": "projections"}):
        options = {"mode": "data_dependent", **extra}
        yield "shards", str(options), partial(compare_layer, mesh, options, mask)
    x, ids = torch.randn(3, LENGTH, 2, dtype=torch.float64), torch.randint(1, 11, (3, LENGTH))
    losses = {"modern": class_loss(x, mask), "paper": class_loss(x, mask), "lra": class_loss(ids, mask)}
    losses |= {mode: language_loss(torch.randint(0, 9, (2, LENGTH + 1))) for mode in ("mean", "decay", "landmarks")}
    for name, loss in losses.items():
        yield "shards", f"model {name}", partial(compare_model, mesh, name, loss)


# The interpreter is slow: each kernel once, and masks where the layout differs.
FUSED: list[tuple[dict[str, Any], bool]] = [
    ({"mode": "data_dependent", "sampling": "random"}, True),
    ({"mode": "causal"}, False),
    ({"mode": "causal", "decay": "learned"}, True),
    ({"mode": "causal_data_dependent", "decay": "learned"}, True),
    ({"mode": "plain", "decay": "learned"}, False),
]


def fused_comparisons(mesh: DeviceMesh) -> Iterator[Comparison]:
    for options, is_padded in FUSED:
        options = {**options, "backend": "fused", "dtype": torch.float32}
        mask = mask_of(3, LENGTH) if is_padded else None
        yield "fused", str(options), partial(compare_layer, mesh, options, mask)


# Four ranks: data and context parallelism together

Wrap = Callable[[nn.Module], nn.Module]


def wrap_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.modules():
        if isinstance(block, EncoderBlock):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare_step(mesh: DeviceMesh, wrap: Wrap, samples: list[list[int]], reduction: Any = "sample") -> Differences:
    """Compare a step on four samples, split over "data" by `samples` and over "context" by tokens."""
    model = make_model("modern")
    single = copy.deepcopy(model)
    x, y, mask = torch.randn(4, LENGTH, 2).double(), torch.tensor([0, 2, 1, 1]), mask_of(4, LENGTH)
    loss0 = F.cross_entropy(single(x, mask), y) + ksvd_loss(single, reduction)
    loss0.backward()

    context_parallel(model, mesh, "context")
    world = dist.group.WORLD
    for norm in model.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.context = Context(world)
    wrapped = wrap(model)
    own = samples[mesh.get_local_rank("data")]
    part = len(own) * len(samples) / 4
    rows, hidden = shard(x[own], mesh["context"]), shard(mask[own], mesh["context"])
    task = part * F.cross_entropy(wrapped(rows, hidden), y[own])
    loss1 = task + ksvd_loss(model, reduction, group=world, part=part)
    loss1.backward()
    total = loss1.detach().clone()
    dist.all_reduce(total)
    return {"loss": difference(total / 4, loss0)} | gradient_differences(model, single)


class Traffic(TorchDispatchMode):
    """Count the bytes that this rank passes to each collective, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor" and isinstance(args[0], Tensor):
            self.bytes[name] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def count_bytes(mesh: DeviceMesh, mode: str, decay: Any, length: int) -> Counter[str]:
    layer = context_parallel(make(mode, decay, **({"max_length": 96} if "causal_data" in mode else {})), mesh)
    x, mask = inputs(2, length).requires_grad_(), torch.zeros(2, length, dtype=torch.bool)
    with Traffic() as traffic:
        y = layer(shard(x, mesh), shard(mask, mesh))
        (y.sum() + layer.objective.sum()).backward()
    return traffic.bytes


def compare_bytes(mesh: DeviceMesh, mode: str, decay: Any) -> Differences:
    """Compare the bytes of a training step of a layer at N and at 4·N tokens, by collective."""
    short, long = count_bytes(mesh, mode, decay, 24), count_bytes(mesh, mode, decay, 96)
    assert short.total() > 0
    return {kind: abs(long[kind] - short[kind]) for kind in sorted({*short, *long})}


def four_rank_comparisons() -> Iterator[Comparison]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    flat = mesh._flatten("all")
    wraps: dict[str, Wrap] = {
        "DDP": DistributedDataParallel,
        "FSDP2 over all ranks": partial(wrap_fsdp, mesh=flat),
        "FSDP2 over context, copies over data": partial(wrap_fsdp, mesh=mesh),
    }
    for name, wrap in wraps.items():
        yield "data × context", name, partial(compare_step, mesh, wrap, [[0, 1], [2, 3]])
    for reduction in ("sample", "batch"):
        unequal = partial(compare_step, mesh, DistributedDataParallel, [[0, 1, 2], [3]], reduction)
        yield "data × context", f"unequal batches, J per {reduction}", unequal
    for mode, decay in MODES_AND_DECAYS:
        yield "bytes", f"{mode}, decay={decay}", partial(compare_bytes, flat, mode, decay)


def run(comparisons: Iterator[Comparison], ranks: dist.ProcessGroup | None) -> dict[str, dict[str, Differences]]:
    """The largest differences over the ranks, by group and name."""
    results: dict[str, dict[str, Differences]] = {}
    for group, name, compare in comparisons:
        torch.manual_seed(0)
        differences = compare()
        largest = torch.tensor(list(differences.values()), dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, ranks)
        results.setdefault(group, {})[name] = dict(zip(differences, largest.tolist(), strict=True))
    return results


def main(out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{out.with_suffix('.store')}"
    dist.init_process_group("gloo", store, timedelta(seconds=120), world_size=RANKS, rank=rank)
    results = {}
    # Three ranks have shards of different lengths. The comparisons of four ranks have contexts of two.
    for size, comparisons in ((2, fused_comparisons), (3, shard_comparisons)):
        mesh = DeviceMesh("cpu", list(range(size)))
        if rank < size:
            results |= run(comparisons(mesh), mesh.get_group())
    results |= run(four_rank_comparisons(), None)
    if rank == 0:
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    fast_interpreter.install()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(Path(sys.argv[1]), rank)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
