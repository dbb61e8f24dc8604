"""`primal bench lra`: time and memory of a training step on Long-Range Arena, for every attention of the paper's table.

The models and batch sizes are the paper's, the tokens random, with as much padding as the task has. One attention
exists here only: "published", Primal-Attention as the authors' code computes it, which is never compiled.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from primal_attention.bench import measurement
from primal_attention.bench.attention import AuthorsPrimal
from primal_attention.bench.measurement import GRAPH, Row
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.nn.objective import primal_layers
from primal_attention.train import lra
from primal_attention.train.config import override
from primal_attention.train.optimizer import make_optimizer
from primal_attention.utils.errors import check_name
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect

PUBLISHED = "published"
ATTENTIONS = ("softmax", "nystrom", "linformer", "performer", "reformer", "primal+", "primal", PUBLISHED)


class Task(NamedTuple):
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
        is_published, is_gpu = attention == PUBLISHED, device.type == "cuda"
        self.device, self.is_compiled = device, is_gpu and not is_published
        changes = {"trainer.compile": "on" if self.is_compiled else "off"}
        changes |= {"model.attention": ("primal" if is_published else attention,)}  # type: ignore[dict-item]
        recipe = override(lra.paper_recipe(task), changes).resolved()
        data = TASKS[task].random_data(batch_size or recipe.trainer.batch_size)
        model = lra.make_model(recipe.model, data)
        if is_published:
            use_authors_layers(model)
        for module in model.modules():
            if hasattr(module, "redraw_every"):
                module.redraw_every = None  # type: ignore[assignment]  # a captured graph cannot draw again
        self.module = lra.SequenceModule(model, recipe, padded=data.padded).to(device).train()
        self.optimizer = make_optimizer(model, recipe.optim, recordable=is_gpu)
        arrays = (data.train.tokens, data.train.second, data.train.labels)
        self.batch = tuple(torch.from_numpy(array).to(device) for array in arrays if array is not None)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # Weights that are cast inside a captured graph must not be reused outside it.
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            loss = self.module.losses(self.batch)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for layer in primal_layers(self.module).values():
            layer._objective = None  # its graph would bind the next step to the stream of this one


def use_authors_layers(model: Any) -> None:
    """Replace the attention layers, and the embedding by torch's."""
    model.stem.tokens = nn.Embedding.from_pretrained(model.stem.tokens.weight.detach(), freeze=False)
    for block in model.encoder.blocks:
        ours = block.attention
        block.attention = AuthorsPrimal(ours.embed_dim, ours.num_heads, rank=ours.rank, landmarks=ours.landmarks)
        block.attention.load_state_dict(ours.state_dict())


def measure(task: str, attention: str, args: Namespace) -> Row:
    """Return a summary: seconds per 1000 steps, replayed and eager, and the peak of allocated bytes above the start."""
    device: torch.device = args.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = Step(task, attention, device, args.batch_size)
    facts: Row = {"set": task, "max_length": TASKS[task].length, "batch_size": len(step.batch[-1]), "note": ""}
    facts |= {"compiled": step.is_compiled, "repeats": args.repeats}
    scores, peak = {"graph": None}, None
    if device.type == "cuda":
        step()
        peak = measurement.peak_bytes(step, device) - before
        timing = measurement.time_step(step, device, repeats=args.repeats)
        if timing["method"] == GRAPH:
            scores["graph"] = 1000 * timing["seconds"]
        facts["note"] = timing["note"]
        measurement.free_memory(device)  # the pool of the graph
    with torch.compiler.set_stance("force_eager" if step.is_compiled else "default"):
        scores["eager"] = 1000 * measurement.time_step(step, device, eager=True, repeats=args.repeats)["seconds"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"format": 1, "benchmark": "lra", "recipe": f"lra-efficiency/{task}", "label": attention, "seed": 0}
    result = {"scores": {"step": scores}, "config": {}, "peak_memory_bytes": peak, "data": facts}
    return {**about, **result, "device": name, "torch": torch.__version__}


def run(args: Namespace) -> None:
    """Measure what has no file TASK/ATTENTION.json yet; args: the flags of the command."""
    for noun, names, known in (("task", args.tasks, TASKS), ("model", args.models, ATTENTIONS)):
        for name in names:
            check_name(name, known, noun)
    cells = [(task, attention) for task in args.tasks or TASKS for attention in args.models or ATTENTIONS]
    cells = [(task, attention) for task, attention in cells if not (args.out / task / f"{attention}.json").exists()]
    with Progress(len(cells), "timing") as progress:
        for task, attention in cells:
            measurement.free_memory(args.device)
            row = measure(task, attention, args)
            origin = collect(command=args.command, device=args.device, commit=args.commit)
            write_json(args.out / task / f"{attention}.json", {**row, **origin})
            cost = row["scores"]["step"]
            graph = "" if cost["graph"] is None else f"{cost['graph']:.2f} s replayed, "
            progress.advance(
                f"{task} {attention}: {graph}{cost['eager']:.2f} s eager per 1000 steps {row['data']['note']}"
            )
