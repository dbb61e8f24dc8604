"""What the tables share: cells with the runs found for them, averages over sets, and where the numbers come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from primal_attention.report import paper_tables as paper
from primal_attention.report.results import Mean, Result
from primal_attention.report.table import NOTHING

AVERAGE = "Average"


@dataclass(frozen=True)
class Cell:
    """A set and a model, possibly with settings of an ablation, and the runs that were found for it."""

    part: str
    dataset: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Result] = ()

    @property
    def variant(self) -> tuple[Any, ...]:
        return (self.model, *self.options.values())


def model_title(model: str) -> str:
    return f"{paper.MODELS[model]} ({model})" if model in paper.MODELS else model


def comparable_sets(cells: Sequence[Cell]) -> list[str]:
    """The sets on which every variant that has runs at all has some: averages over other sets compare nothing."""
    present = {c.variant for c in cells if c.results}
    by_set: dict[str, set[tuple[Any, ...]]] = {}
    for cell in cells:
        by_set.setdefault(cell.dataset, set()).update([cell.variant] if cell.results else [])
    return [name for name, variants in by_set.items() if present and variants == present]


def average(cells: Sequence[Cell], value: Callable[[Result], float | None]) -> Mean | None:
    """Over the sets for each seed that all of them have, then over these seeds."""
    per_set = [{r.seed: v for r in cell.results if (v := value(r)) is not None} for cell in cells]
    if not per_set:
        return None
    seeds = set.intersection(*(set(values) for values in per_set))
    return Mean.of(fmean(values[seed] for values in per_set) for seed in sorted(seeds))


def mean_record(name: str, mean: Mean | None) -> dict[str, Any]:
    values = (None, None, 0) if mean is None else (mean.mean, mean.std, mean.seeds)
    return dict(zip((f"{name}_mean", f"{name}_std", f"{name}_seeds"), values, strict=True))


def origin_record(cell: Cell, command: str) -> dict[str, Any]:
    return {
        "device": "; ".join(sorted({r.device for r in cell.results})),
        "commit": "; ".join(sorted({r.commit or "unknown" for r in cell.results})),
        "command": command,
    }


def origin(cells: Iterable[Cell], command: str) -> list[str]:
    """Which command makes the table, on which commits and devices its runs ran."""
    results = {r.file: r for cell in cells for r in cell.results}.values()
    commits = Counter(short(r.commit) for r in results)
    devices = Counter(r.device for r in results)
    return [
        f"Command: `{command}`",
        f"Runs: {len(results)}; commit {counted(commits)}; device {counted(devices)}. Each run's own command stands in "
        "its result file.",
    ]


def counted(found: Counter[str]) -> str:
    if len(found) < 2:
        return next(iter(found), NOTHING)
    return ", ".join(f"{name} ({n} run{'s' if n > 1 else ''})" for name, n in found.most_common())


def short(commit: str | None) -> str:
    """Twelve digits, and whether files differed from the commit."""
    if commit is None:
        return "unknown"
    digits, _, changed = commit.partition("-")
    return digits[:12] + (f"-{changed}" if changed else "")
