"""The table of `primal table uea-modern` from the files that `bench/classifiers.py` writes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.bench.classifiers import FOLDER, MODELS

BASELINE = "multirocket-hydra"
PARTS = {"networks": "its networks alone", "features": "its features alone"}  # ablations of the same fits
HEADING = ["Set", "Model", "Accuracy", "− MultiRocketHydra", "ECE", "Fit s", "Predict s", "CPU s", "Seeds"]
Runs = dict[int, dict[str, Any]]  # by seed


def read_runs(results: Path, sets: Sequence[str], models: Sequence[str]) -> dict[tuple[str, str], Runs]:
    """Stored runs by set and model; refused fits are left out."""
    found: dict[tuple[str, str], Runs] = {}
    for name, model in ((name, model) for name in sets for model in models):
        files = sorted((results / FOLDER / name).glob(f"{model}-seed*.json"))
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        found[name, MODELS[model][0]] = {row["seed"]: row for row in rows if "accuracy" in row}
        for part, title in PARTS.items() if model == "primal" else ():
            found[name, title] = {
                row["seed"]: {**row["parts"][part], "fit": {"seconds": row["fit_seconds"][part]}} for row in rows
            }
    return found


def paired_difference(own: Runs, other: Runs) -> tuple[float, float] | None:
    """Mean difference of the accuracies in points over the common seeds, and half of its 95 % interval."""
    from scipy import stats

    points = [100 * (own[seed]["accuracy"] - other[seed]["accuracy"]) for seed in sorted(own.keys() & other.keys())]
    if not points:
        return None
    half = stats.t.ppf(0.975, len(points) - 1) * stats.sem(points) if len(points) > 1 else math.nan
    return statistics.mean(points), float(half)


def mean(runs: Runs, *keys: str, scale: float = 1.0) -> str:
    """The mean of a field with one decimal; empty if a run lacks it."""
    values: list[Any] = list(runs.values())
    for key in keys:
        values = [value.get(key, {}) for value in values]
    return "" if {} in values else f"{scale * statistics.mean(values):.1f}"


def make_line(name: str, title: str, runs: Runs, base: Runs) -> list[str]:
    """The cells of a set and model."""
    scores = [100 * run["accuracy"] for run in runs.values()]
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    gap = None if title == MODELS[BASELINE][0] else paired_difference(runs, base)
    difference = "" if gap is None else f"{gap[0]:+.1f}" + ("" if math.isnan(gap[1]) else f" ± {gap[1]:.1f}")
    error = mean(runs, "calibration_error", scale=100)
    seconds = [mean(runs, "fit", "seconds"), mean(runs, "predict", "seconds"), mean(runs, "fit", "cpu_seconds")]
    return [name, title, f"{statistics.mean(scores):.1f}{spread}", difference, error, *seconds, str(len(runs))]


def to_markdown(found: dict[tuple[str, str], Runs], command: str) -> str:
    """One line per set and model, and averages over the sets that every model accepts."""
    sets, titles = (list(dict.fromkeys(part)) for part in zip(*found, strict=True))
    titles = [title for title in titles if any(found[name, title] for name in sets)]
    common = [name for name in sets if all(found[name, title] for title in titles)]
    lines = [HEADING, ["---"] * 2 + ["--:"] * 7]
    for name in sets:
        base = found.get((name, MODELS[BASELINE][0]), {})
        lines += [make_line(name, title, found[name, title], base) for title in titles if found[name, title]]
    for title in titles if common else ():
        averages = [
            100 * statistics.mean(statistics.mean(run[key] for run in found[name, title].values()) for name in common)
            for key in ("accuracy", "calibration_error")
        ]
        lines.append([f"Average of {len(common)}", title, f"{averages[0]:.1f}", "", f"{averages[1]:.1f}", *[""] * 4])
    rows = [run for runs in found.values() for run in runs.values() if "origin" in run]
    commits = sorted({str(run["origin"]["commit"])[:7] for run in rows})
    devices = sorted({run["origin"]["hardware"]["cpu"] for run in rows})
    notes = [
        "Accuracy on test in per cent, mean ± standard deviation over the seeds. Differences are paired over the "
        "seeds, with their 95 % interval.",
        "ECE: expected calibration error in points, 15 bins. MultiRocketHydra predicts probabilities 0 and 1 only.",
        "CPU s: of the fit, over two threads. Each fit is a process of its own.",
        *([f"Average: over {', '.join(common)}, the sets that every model accepts."] if common else []),
        f"Command: `{command}`",
        f"`results/{FOLDER}`: {len(rows)} fits; commit {', '.join(commits)}; device {', '.join(devices)}, two threads.",
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"
