"""The paper's Long-Range Arena tables with our numbers beside its own: accuracy, ablations, and the cost of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

from primal_attention.report import accuracy as shared
from primal_attention.report import paper_lra as paper
from primal_attention.report.accuracy import Part, yes
from primal_attention.report.cells import Cell, short
from primal_attention.report.table import NOTHING, Section, Table

GB = 1e9
PUBLISHED = "published"
"""Primal-Attention as the research code computes it, on the same card; see `bench.published`."""


def title_of(model: str) -> str:
    if model == PUBLISHED:
        return "PrimalFormer, the published way"
    return f"{paper.MODELS[model]} ({model})" if model in paper.MODELS else model


PARTS = {
    "models": Part(
        "",
        ["Model"],
        lambda c: [title_of(c.model)],
        lambda c: paper.ACCURACY.get(c.model, {}).get(c.dataset),
        [f"Paper: {paper.ACCURACY_SOURCE}, the step that validation data chose, one seed."],
    ),
    "data-dependence": Part(
        "Data-dependent projection weights, Primal.+Trans.",
        ["Data-dependent"],
        lambda c: [yes(c.options["data_dependent"])],
        lambda c: paper.DATA_DEPENDENCE[c.options["data_dependent"]].get(c.dataset),
        [
            f"Paper, data-dependence: {paper.DATA_DEPENDENCE_SOURCE}, whose columns are printed in another order than "
            f"its headings; put right here by {paper.ACCURACY_SOURCE}."
        ],
    ),
    "r-scores": Part(
        "With and without r-scores in the output",
        ["Model", "r-scores"],
        lambda c: [title_of(c.model), yes(c.options["r_scores"])],
        lambda c: paper.R_SCORES.get((c.model, c.options["r_scores"]), {}).get(c.dataset),
        [f"Paper, r-scores: {paper.R_SCORES_SOURCE}; without them r stays in J."],
    ),
}
PATHFINDER = "pathfinder: our own drawing of the task, not the images behind the paper's numbers."


def accuracy(title: str, cells: Sequence[Cell], command: str) -> Table:
    """Test accuracies; the paper's were chosen by validation data, as our third column."""
    table = shared.accuracy(title, cells, command, PARTS, published="Paper (validation-chosen)")
    notes = [*table.notes, *([PATHFINDER] if any(c.dataset == "pathfinder" for c in cells) else [])]
    notes += size_note(cells)
    lengths = sorted({(c.dataset, *training_of(r.config)) for c in cells for r in c.results})
    notes.append("Steps of training × cases in each: " + ", ".join(training_note(*found) for found in lengths) + ".")
    return Table(table.title, table.sections, notes, table.records)


def size_note(cells: Sequence[Cell]) -> list[str]:
    """How far an accuracy may lie off because the test cases are that many and not more."""
    found: dict[tuple[str, int], list[float]] = {}
    for cell in cells:
        for result in cell.results:
            accuracy = result.accuracy("validation_chosen")
            if accuracy is not None and "test_cases" in result.data:
                found.setdefault((cell.dataset, int(result.data["test_cases"])), []).append(accuracy)
    errors = {key: sqrt(fmean(a * (100 - a) for a in each) / key[1]) for key, each in found.items()}
    if not errors:
        return []
    said = ", ".join(f"{task} {cases:,} (± {error:.1f})" for (task, cases), error in sorted(errors.items()))
    return [f"Cases in test, and the standard error that their number leaves in one accuracy: {said}."]


def training_of(config: Mapping[str, Any]) -> tuple[int, int, float]:
    """Steps, cases in each, and the learning rate."""
    trainer = config["trainer"]
    steps = int(trainer["epochs"]) * int(trainer["steps_per_epoch"])
    return steps, int(trainer["batch_size"]), float(config["optim"]["lr"])


def training_note(task: str, steps: int, batch_size: int, lr: float) -> str:
    """How long a training was, and beside it the paper's where that differs."""
    ours = f"{task} {steps:,} × {batch_size} at learning rate {lr:g}"
    theirs = paper.TRAINING.get(task)
    if theirs in (None, (steps, batch_size)):
        return ours
    part = steps * batch_size / (theirs[0] * theirs[1])
    return (
        f"{ours} (paper {theirs[0]:,} × {theirs[1]} at {paper.LEARNING_RATE:g}: {100 * part:.2g} % of its cases seen)"
    )


def cost(title: str, costs: Sequence[Mapping[str, Any]], command: str) -> Table:
    """Seconds per 1000 steps and peak memory. `costs` are the files that `engine.lra_cost` leaves."""
    columns = ["Task (length)", "Model", "Paper s/1K", "s/1K graph", "s/1K eager", "× softmax", "× published"]
    columns += ["Paper GB", "Peak GB", "less than softmax"]
    by_task = {task: [c for c in costs if c["task"] == task] for task in paper.TASKS}
    rows = []
    for task, found in by_task.items():
        base = {c["attention"]: c for c in found}
        rows += [cost_row(task, c, base) for c in found]
    devices = sorted({(str(c["device"]), str(c["torch"])) for c in costs})
    commits = sorted({short(c.get("commit")) for c in costs})
    notes = [
        f"Paper: {paper.EFFICIENCY_SOURCE}, {paper.EFFICIENCY_DEVICE}; its softmax attention ran with gradient "
        "checkpointing, which costs time and saves memory. Ours runs without, through scaled_dot_product_attention.",
        "A step: forward, losses, backward, optimiser, at the paper's batch size and in bfloat16 autocast, on random "
        "tokens with padding as long as the task's own. graph: as the trainings run, that is the model through "
        "torch.compile and the whole step replayed as one CUDA graph (the published way: not compiled); eager: as "
        "written, kernel by kernel. Median step between CUDA events, times 1000.",
        "× softmax, × published: how many times faster than softmax attention and than the research code's way of "
        "computing Primal-Attention, graph against graph (in brackets: eager against eager).",
        "Peak GB: the most that torch had allocated in a step that is not recorded, compiled as in the trainings, over "
        "what it had before the model was made, in 10⁹ bytes. Reformer's new hashes for every step are drawn outside "
        "of the time.",
        f"Device: {'; '.join(f'{d}, torch {t}' for d, t in devices)}; commit {', '.join(commits)}.",
        f"Command: `{command}`",
    ]
    return Table(title, [Section("", columns, rows)], notes, list(costs))


def cost_row(task: str, cost: Mapping[str, Any], base: Mapping[str, Mapping[str, Any]]) -> list[str]:
    softmax, published = base.get("softmax"), base.get(PUBLISHED)
    model = str(cost["attention"])
    ours = model in ("primal", "primal+")
    return [
        f"{task} ({cost['length']})",
        title_of(model),
        number(paper.SECONDS.get(model, {}).get(task), 1),
        number(cost["graph"], 2),
        number(cost["eager"], 2),
        ratio(softmax, cost, "graph"),
        f"{ratio(published, cost, 'graph')} ({ratio(published, cost, 'eager')})" if ours else "",
        number(paper.MEMORY.get(model, {}).get(task), 2),
        number(cost["peak_bytes"] and cost["peak_bytes"] / GB, 2),
        ratio(softmax, cost, "peak_bytes"),
    ]


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def ratio(other: Mapping[str, Any] | None, cost: Mapping[str, Any], field: str) -> str:
    """The other's number over ours; nothing where either is missing or another device measured it."""
    if other is None or other["device"] != cost["device"]:
        return NOTHING
    theirs, mine = other[field], cost[field]
    return f"{theirs / mine:.1f}×" if theirs and mine else NOTHING
