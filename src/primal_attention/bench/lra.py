"""`primal bench lra`: time and memory of a training step on Long-Range Arena, for every attention of the paper's table.

The models and batch sizes are the paper's, the tokens random, with as much padding as the task has. One attention
exists here only: "published", Primal-Attention as the authors' code computes it, which is never compiled.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from primal_attention.bench import measurement
from primal_attention.bench.attention import AuthorsPrimal
from primal_attention.bench.measurement import GRAPH, Row
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.nn.objective import ksvd_loss, primal_layers
from primal_attention.train import lra
from primal_attention.train.config import override
from primal_attention.train.optimizer import make_optimizer
from primal_attention.utils.errors import check_name
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect

PUBLISHED = "published"
ATTENTIONS = ("softmax", "nystrom", "linformer", "performer", "reformer", "primal+", "primal", PUBLISHED)


@dataclass(frozen=True)
class Task:
    """Shape of a task's data. `filled` is the mean share of a sequence that is not padding."""

    length: int
    vocabulary: int
    classes: int
    filled: float = 1.0
    pairs: bool = False

    def random_data(self, samples: int) -> TokenData:
        rng = np.random.default_rng(0)

        def tokens() -> np.ndarray:
            ids = rng.integers(1, self.vocabulary, (samples, self.length)).astype(np.uint8)
            if self.filled < 1:
                lengths = rng.uniform(0.5 * self.filled, min(1.0, 1.5 * self.filled), (samples, 1)) * self.length
                ids[np.arange(self.length) >= lengths] = 0
            return ids

        split = TokenSplit(tokens(), rng.integers(0, self.classes, samples), tokens() if self.pairs else None)
        return TokenData("random", split, split, split, self.vocabulary, self.classes, padded=self.filled < 1)


TASKS = {
    "listops": Task(2000, 16, 10, filled=0.5),
    "text": Task(4000, 256, 2, filled=0.33),
    "retrieval": Task(4000, 256, 2, filled=0.9, pairs=True),
    "image": Task(1024, 256, 10),
    "pathfinder": Task(1024, 256, 2),
}


class Step:
    """A training step of the paper's model on one random batch; compiled on a GPU, as in the trainings."""

    def __init__(self, task: str, attention: str, device: torch.device, batch_size: int | None = None) -> None:
        torch.manual_seed(0)
        name = "primal" if attention == PUBLISHED else attention
        recipe = override(lra.paper_recipe(task), {"model.attention": (name,)}).resolved()
        self.device, self.batch_size = device, batch_size or recipe.trainer.batch_size
        data = TASKS[task].random_data(self.batch_size)
        self.model, self.eta = lra.make_model(recipe.model, data), recipe.eta or 0.0
        if attention == PUBLISHED:
            use_authors_layers(self.model)
        for module in self.model.modules():
            if hasattr(module, "redraw_every"):
                module.redraw_every = None  # type: ignore[assignment]  # a captured graph cannot draw again
        self.model.to(device).train()
        self.is_compiled = device.type == "cuda" and attention != PUBLISHED
        if self.is_compiled:
            torch.compiler.reset()
            self.model.compile()
        self.optimizer = make_optimizer(self.model, recipe.optim, recordable=device.type == "cuda")
        sequences = (data.train.tokens, data.train.second)
        ids = [torch.from_numpy(tokens).long().to(device) for tokens in sequences if tokens is not None]
        self.inputs = [t for i in ids for t in (i, i == 0 if data.padded else None)]
        self.labels = torch.from_numpy(data.train.labels).to(device)

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the task loss and the KSVD loss."""
        task_loss = F.cross_entropy(self.model(*self.inputs), self.labels)
        return task_loss, ksvd_loss(self.model, "batch") if primal_layers(self.model) else task_loss.new_zeros(())

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # Weights that are cast inside a captured graph must not be reused outside it.
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            task_loss, objective = self.losses()
        (task_loss + self.eta * objective).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for layer in primal_layers(self.model).values():
            layer._objective = None  # its graph would bind the next step to the stream of this one


def use_authors_layers(model: Any) -> None:
    """Replace the attention layers, and the embedding by torch's."""
    model.stem.tokens = nn.Embedding.from_pretrained(model.stem.tokens.weight.detach(), freeze=False)
    for block in model.encoder.blocks:
        ours = block.attention
        block.attention = AuthorsPrimal(ours.embed_dim, ours.num_heads, rank=ours.rank, landmarks=ours.landmarks)
        block.attention.load_state_dict(ours.state_dict())


def measure(task: str, attention: str, args: Namespace) -> Row:
    """Return seconds per 1000 steps (replayed and eager), and the peak of allocated bytes above the start."""
    device: torch.device = args.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = Step(task, attention, device, args.batch_size)
    row: Row = {"kind": "lra-cost", "task": task, "attention": attention, "length": TASKS[task].length}
    row |= {"batch_size": step.batch_size, "compiled": step.is_compiled, "graph": None, "peak_bytes": None, "note": ""}
    if device.type == "cuda":
        step()
        row["peak_bytes"] = measurement.peak_bytes(step, device) - before
        timing = measurement.time_step(step, device, repeats=args.repeats)
        row |= {"graph": 1000 * timing["seconds"]} if timing["method"] == GRAPH else {"note": timing["note"]}
        measurement.free_memory(device)  # the pool of the graph
    with torch.compiler.set_stance("force_eager" if step.is_compiled else "default"):
        row["eager"] = 1000 * measurement.time_step(step, device, eager=True, repeats=args.repeats)["seconds"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return row | {"device": name, "torch": torch.__version__, "repeats": args.repeats}


def run(args: Namespace) -> None:
    """Measure what has no file TASK/ATTENTION.json yet, one after the other.

    Args:
        args: the flags of `primal bench lra`.
    """
    for noun, names, known in (("task", args.tasks, TASKS), ("model", args.models, ATTENTIONS)):
        for name in names or ():
            check_name(name, known, noun)
    files: dict[tuple[str, str], Path] = {}
    for task in args.tasks or TASKS:
        for attention in args.models or ATTENTIONS:
            file = args.results / "lra-efficiency" / task / f"{attention}.json"
            files |= {} if file.exists() else {(task, attention): file}
    with Progress(len(files), "timing") as progress:
        for cell, file in files.items():
            measurement.free_memory(args.device)
            row = measure(*cell, args)
            write_json(file, {**row, **collect(command=args.command, device=args.device, commit=args.commit)})
            graph = "" if row["graph"] is None else f"{row['graph']:.2f} s replayed, "
            progress.advance(f"{' '.join(cell)}: {graph}{row['eager']:.2f} s eager per 1000 steps {row['note']}")
