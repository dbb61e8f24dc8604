"""What a training step costs on Long-Range Arena: seconds and memory of every attention on one device.

    primal table lra-efficiency                                  all tasks, every attention of the paper's table
    python -m primal_attention.bench.lra_cost --tasks listops text --results results

The step is the trainings' own (`RecordedStep`, compiled where the recipe compiles), at the paper's batch size,
on random tokens. One attention is known here alone: "published", Primal-Attention as the research code computes it,
padding included; it is never compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.bench import memory
from primal_attention.bench.published import PublishedPrimal
from primal_attention.bench.timing import GRAPH, measure
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.report import paper_lra as paper
from primal_attention.report.lra import PUBLISHED
from primal_attention.train import lra
from primal_attention.train.config import override
from primal_attention.train.cuda_graph import RecordedStep
from primal_attention.train.lra import SequenceModule
from primal_attention.train.optimizer import make_optimizer
from primal_attention.train.task import Batch, run_eagerly
from primal_attention.utils.files import COUNT, Number, read_json, write_json
from primal_attention.utils.provenance import git_commit

ATTENTIONS = (*paper.SECONDS, PUBLISHED)
KIND = "lra-cost"
COST = {
    "kind": frozenset({KIND}),
    "task": frozenset(paper.TASKS),
    "attention": str,
    "length": COUNT,
    "eager": Number(above=0),
    "graph": (Number(above=0), None),
    "peak_bytes": (Number(above=0), None),
    "device": str,
    "torch": str,
    "commit?": (str, None),
}


class Shape:
    """Of a task: length, vocabulary, classes, mean part of a sequence that holds tokens, and whether it is pairs."""

    def __init__(self, length: int, vocabulary: int, classes: int, filled: float = 1.0, pairs: bool = False) -> None:
        self.length, self.vocabulary, self.classes, self.filled, self.pairs = length, vocabulary, classes, filled, pairs

    def data(self, cases: int, seed: int = 0) -> TokenData:
        """Random tokens; where the task has padding, sequences of random lengths around its mean."""
        rng = np.random.default_rng(seed)

        def tokens() -> np.ndarray:
            ids = rng.integers(1, self.vocabulary, (cases, self.length)).astype(np.uint8)
            if self.filled < 1:
                lengths = rng.uniform(0.5 * self.filled, min(1.0, 1.5 * self.filled), (cases, 1)) * self.length
                ids[np.arange(self.length) >= lengths] = 0
            return ids

        split = TokenSplit(tokens(), rng.integers(0, self.classes, cases), tokens() if self.pairs else None)
        return TokenData("random", split, split, split, self.vocabulary, self.classes, padded=self.filled < 1)


TASKS = {
    "listops": Shape(2000, 16, 10, filled=0.5),
    "text": Shape(4000, 256, 2, filled=0.33),
    "retrieval": Shape(4000, 256, 2, filled=0.9, pairs=True),
    "image": Shape(1024, 256, 10),
    "pathfinder": Shape(1024, 256, 2),
}


class PublishedLayer(PublishedPrimal):
    """The research code's layer in the arena: padding takes part in f(X) and in J, and its output is zeroed."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if key_padding_mask is None else y.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)


class PublishedModule(SequenceModule):
    """The training of a model of such layers, whose objectives `ksvd_loss` does not know."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        task = self.task_loss(batch)
        found = [m.objective for m in self.model.modules() if isinstance(m, PublishedLayer)]
        means = torch.stack([j.mean() for j in found if j is not None])
        for layer in self.model.modules():
            if isinstance(layer, PublishedLayer):
                layer.objective = None  # kept, its graph would bind the next step to this one's stream
        ksvd = means.square().mean()
        parts = {"task_loss": task, "ksvd_loss": ksvd, "J": means.detach().mean()}
        return {**parts, "loss": task + (self.recipe.eta or 0.0) * ksvd}


def make_module(task: str, attention: str, data: TokenData) -> SequenceModule:
    """The paper's model of a task with an attention in its layers."""
    known = "primal" if attention == PUBLISHED else attention
    changes: dict[str, Any] = {"model.attention": (known,)}
    if attention == PUBLISHED:
        changes["trainer.compile"] = "off"
    recipe = override(lra.paper_recipe(task), changes).resolved()
    model = lra.make_model(recipe.model, data)
    if attention != PUBLISHED:
        return SequenceModule(model, recipe, padded=data.padded)
    # The research code looks its tokens up as torch does.
    model.stem.tokens = nn.Embedding.from_pretrained(model.stem.tokens.weight.detach(), freeze=False)  # type: ignore
    for block in model.encoder.blocks:  # type: ignore[union-attr]
        config = recipe.model
        layer = PublishedLayer(
            config.embed_dim, config.num_heads, rank=cast(int, config.rank), landmarks=cast(int, config.landmarks)
        )
        layer.load_state_dict(block.attention.state_dict())  # type: ignore[union-attr]
        block.attention = layer  # type: ignore[union-attr]
    return PublishedModule(model, recipe, padded=data.padded)


class Step:
    """One training step on one random batch, whenever it is called."""

    def __init__(self, task: str, attention: str, device: torch.device, batch_size: int) -> None:
        torch.manual_seed(0)
        self.task, self.attention, self.device, self.batch_size = task, attention, device, batch_size
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        data = TASKS[task].data(batch_size)
        module = make_module(task, attention, data).to(device).train()
        optimizer = make_optimizer(module.model, module.recipe.optim, recordable=device.type == "cuda")
        self.compiled = module.compiled
        self.recorded = RecordedStep(module, optimizer)
        for held in self.recorded.rates:
            held.put(module.recipe.optim.lr)
        split = data.train
        arrays = [split.tokens, *([] if split.second is None else [split.second]), split.labels]
        self.batch = tuple(torch.from_numpy(a).to(device) for a in arrays)

    def __call__(self) -> None:
        self.recorded.work(self.batch)


def recorded_cost(step: Step, repeats: int) -> dict[str, Any]:
    """Seconds per 1000 steps, recorded as the trainings run them; bytes that a training's step needs."""
    found: dict[str, Any] = {"graph": None, "peak_bytes": None, "note": ""}
    if step.device.type == "cuda":
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - step.before
        graph = measure(step, step.device, repeats=repeats)
        found |= {"graph": 1000 * graph.median} if graph.method == GRAPH else {"note": graph.note}
        memory.free(step.device)  # the graph's own memory, before the step takes as much again
    return found


def cost_of(step: Step, *, repeats: int = 20) -> dict[str, Any]:
    """What a step costs: `recorded_cost`, and its seconds as written."""
    found = recorded_cost(step, repeats)
    with run_eagerly(step.compiled):
        eager = measure(step, step.device, eager=True, repeats=repeats)
    return {
        "kind": KIND,
        "task": step.task,
        "attention": step.attention,
        "length": TASKS[step.task].length,
        "batch_size": step.batch_size,
        "compiled": step.compiled,
        "eager": 1000 * eager.median,
        **found,
        "device": torch.cuda.get_device_name() if step.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "repeats": repeats,
    }


def place(results: Path, task: str, attention: str) -> Path:
    return results / "lra-efficiency" / task / f"{attention}.json"


def run(
    tasks: Sequence[str],
    attentions: Sequence[str],
    results: Path,
    *,
    device: torch.device,
    repeats: int = 20,
    batch_size: int = 0,
    commit: str | None = None,
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> None:
    """Measure what has no file yet, one after the other: what is timed must be alone on the device."""
    for task in tasks:
        for attention in attentions:
            file = place(results, task, attention)
            if file.exists():
                continue
            memory.free(device)
            step = Step(task, attention, device, batch_size or lra.TASKS[task].batch_size)
            found = cost_of(step, repeats=repeats)
            write_json(file, {**found, "commit": commit or git_commit()})
            tell(found)
            del step  # before the next one is built beside it


def read(results: Path, tasks: Sequence[str], attentions: Sequence[str]) -> list[dict[str, Any]]:
    """What was measured, in the order that was asked for."""
    files = [place(results, task, attention) for task in tasks for attention in attentions]
    return [read_json(file, COST) for file in files if file.exists()]


def say(cost: Mapping[str, Any]) -> None:
    graph = "no graph" if cost["graph"] is None else f"graph {cost['graph']:.2f} s/1K"
    graph += " compiled" if cost["compiled"] else ""
    peak = "" if cost["peak_bytes"] is None else f", peak {cost['peak_bytes'] / 1e9:.2f} GB"
    print(
        f"{cost['task']} {cost['attention']}: {graph}, eager {cost['eager']:.2f} s/1K{peak} {cost['note']}", flush=True
    )


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m primal_attention.bench.lra_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--models", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=0, help="0 is the paper's")
    parser.add_argument("--commit", help="of the code, where git cannot say it")
    found = parser.parse_args(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run(
        found.tasks,
        found.models,
        found.results,
        device=device,
        repeats=found.repeats,
        batch_size=found.batch_size,
        commit=found.commit,
        tell=say,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
