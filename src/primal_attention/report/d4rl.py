"""The paper's tables of offline reinforcement learning, scores and cost, with our numbers beside its own.

Every row says whose trajectories it was trained on: scores on data that was collected anew are no match for D4RL's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from primal_attention.report import paper_d4rl as paper
from primal_attention.report.cells import AVERAGE, Cell, average, comparable_sets, mean_record, origin, origin_record
from primal_attention.report.efficiency import GB, against, largest_peak, times
from primal_attention.report.results import Mean, Result
from primal_attention.report.table import NOTHING, Section, Table

READING = {"off": "windows of K steps", "rolling": "rolling streams", "whole": "one stream per episode"}


def title_of(model: str) -> str:
    return f"{paper.MODELS[model]} ({model})" if model in paper.MODELS else model


def score_of(result: Result, protocol: str = "last") -> float | None:
    """D4RL's normalised score, or None where a run has not been measured in that way."""
    return result.scores.get(protocol, {}).get("score")


def steps_of(result: Result) -> int:
    trainer = result.config["trainer"]
    return int(trainer["epochs"]) * int(trainer["steps_per_epoch"])


def scores(title: str, cells: Sequence[Cell], command: str) -> Table:
    """Normalised scores of the last step, and of the best checkpoint where episodes were played while training."""
    watched = any(score_of(r, "best_on_test") is not None for c in cells for r in c.results)
    columns = ["Set", "Model", "Paper (on D4RL)", "LAST", *(["BEST-ON-TEST"] if watched else []), "Return", "Seeds"]
    rows = [score_row(cell.dataset, cell, published(cell), [cell], watched) for cell in cells]
    sets = comparable_sets([c for c in cells if c.results])
    notes = []
    if len(sets) > 1:
        for model in dict.fromkeys(c.model for c in cells if c.results):
            chosen = [c for c in cells if c.model == model and c.dataset in sets]
            known = [p for c in chosen if (p := paper.SCORES.get(c.dataset, {}).get(model))]
            mean = f"{fmean(p[0] for p in known):.1f}" if len(known) == len(sets) else NOTHING
            rows.append(score_row(AVERAGE, chosen[0], mean, chosen, watched))
        notes = [f"{AVERAGE}: over {', '.join(sets)}; the paper's is the mean of its numbers on these sets."]
        notes += difference([c for c in cells if c.dataset in sets])
    section = Section("", columns, rows)
    records = [score_record(cell, command) for cell in cells]
    return Table(title, [section], [*reading(cells, watched), *notes, *origin(cells, command)], records)


def published(cell: Cell) -> str:
    found = paper.SCORES.get(cell.dataset, {}).get(cell.model)
    return NOTHING if found is None else f"{found[0]:.1f} ± {found[1]:.1f}"


def score_row(name: str, cell: Cell, theirs: str, chosen: Sequence[Cell], watched: bool) -> list[str]:
    last = average(chosen, score_of)
    best = [average(chosen, lambda r: score_of(r, "best_on_test"))] if watched else []
    earned = Mean.of(r.scores["last"].get("return_mean") for r in cell.results) if name != AVERAGE else None
    shown = [mean.show() if mean else NOTHING for mean in (last, *best)]
    return [
        name,
        title_of(cell.model),
        theirs,
        *shown,
        earned.show(0) if earned else NOTHING,
        str(last.seeds if last else 0),
    ]


def difference(cells: Sequence[Cell]) -> list[str]:
    """How far Primal.+DT stands from DT in the average, and how sure that is."""
    by_model = {m: average([c for c in cells if c.model == m], score_of) for m in ("softmax", "primal+")}
    dt, primal = by_model["softmax"], by_model["primal+"]
    if dt is None or primal is None or dt.std is None or primal.std is None:
        return []
    error = math.sqrt(dt.std**2 / dt.seeds + primal.std**2 / primal.seeds)
    return [f"Average of Primal.+DT less that of DT: {primal.mean - dt.mean:+.1f} ± {error:.1f} (standard error)."]


def reading(cells: Sequence[Cell], watched: bool) -> list[str]:
    """What the numbers are, on which data, after how many steps."""
    found = [r for c in cells for r in c.results]
    sources = sorted({str(r.data.get("source", "unknown data")) for r in found})
    transitions = sorted({int(r.data["transitions"]) for r in found if "transitions" in r.data})
    episodes = sorted({int(r.scores["last"]["episodes"]) for r in found if "episodes" in r.scores["last"]})
    how = sorted({READING[r.config["evaluation"]["streaming"]] for r in found})
    steps = sorted({steps_of(r) for r in found})

    def listed(numbers: Sequence[int]) -> str:
        return " or ".join(f"{n:,}" for n in numbers)

    notes = [
        "Ours: D4RL's normalised score (0 random, 100 expert) of the mean return of "
        f"{listed(episodes)} episodes at the last step, mean ± standard deviation over the seeds; played in "
        f"{' or '.join(how)}. Return: its mean before normalisation.",
        f"Trained on {listed(transitions)} transitions for {listed(steps)} steps. Data: {'; '.join(sources)}.",
        f"Paper: {paper.SCORE_SOURCE}, mean ± deviation of three seeds on D4RL after 100,000 steps.",
    ]
    if any("collected anew" in source for source in sources):
        notes.insert(
            1,
            "The trajectories are not D4RL's but come from other policies: only rows of ours compare with each other.",
        )
    if watched:
        notes.append("BEST-ON-TEST: the best of the checkpoints by the very episodes that measure it, so too high.")
    return notes


def score_record(cell: Cell, command: str) -> dict[str, Any]:
    theirs = paper.SCORES.get(cell.dataset, {}).get(cell.model, (None, None))
    return {
        "dataset": cell.dataset,
        "model": cell.model,
        "paper_mean": theirs[0],
        "paper_std": theirs[1],
        **mean_record("last", Mean.of(score_of(r) for r in cell.results)),
        **mean_record("best_on_test", Mean.of(score_of(r, "best_on_test") for r in cell.results)),
        "steps": "; ".join(sorted({str(steps_of(r)) for r in cell.results})),
        "source": "; ".join(sorted({str(r.data.get("source")) for r in cell.results})),
        **origin_record(cell, command),
    }


def cost(title: str, cells: Sequence[Cell], command: str) -> Table:
    """Seconds per 1000 steps and peak memory of training, each beside DT's."""
    columns = ["Set", "Model", "Paper s/1K", "s/1K", "Steps/s", "× DT", "Paper GB", "Peak GB", "× DT", "Seeds"]
    base = {c.dataset: c for c in cells if c.model == "softmax"}
    rows, records = [], []
    for cell in cells:
        level = cell.dataset.partition("-")[2]
        theirs = paper.SECONDS.get(cell.model, {}).get(level)
        memory = paper.MEMORY.get(cell.model)
        seconds = Mean.of(
            1000 * r.seconds_per_epoch / int(r.config["trainer"]["steps_per_epoch"]) for r in cell.results
        )
        faster, smaller = against([cell], [base.get(cell.dataset)])
        peak = largest_peak([cell])
        rows.append(
            [
                cell.dataset,
                title_of(cell.model),
                NOTHING if theirs is None else f"{theirs:.1f}",
                seconds.show(3) if seconds else NOTHING,
                f"{1000 / seconds.mean:.0f}" if seconds else NOTHING,
                times(faster),
                NOTHING if memory is None else f"{memory:.1f}",
                NOTHING if peak is None else f"{peak / GB:.3f}",
                times(smaller),
                str(seconds.seeds if seconds else 0),
            ]
        )
        records.append(
            {
                "dataset": cell.dataset,
                "model": cell.model,
                "paper_seconds": theirs,
                **mean_record("seconds_per_1000_steps", seconds),
                "times_faster": faster,
                "peak_bytes": peak,
                "times_less_memory": smaller,
                **origin_record(cell, command),
            }
        )
    notes = [
        f"Paper: {paper.EFFICIENCY_SOURCE}, {paper.EFFICIENCY_DEVICE}.",
        "Ours: training as it runs, batches included, median epoch; one run at a time on a device. All sets of an "
        "environment cost the same.",
        "× DT: how many times faster, and how many times less memory, than softmax attention in every layer.",
        "Peak GB: the most that torch had allocated on the GPU during a training epoch, the trajectories included.",
    ]
    return Table(title, [Section("", columns, rows)], [*notes, *origin(cells, command)], records)
