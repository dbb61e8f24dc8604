"""The paper's table of UEA training times and memory, with our numbers beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from primal_attention.report import paper_tables as paper
from primal_attention.report.cells import (
    AVERAGE,
    Cell,
    average,
    comparable_sets,
    mean_record,
    model_title,
    origin,
    origin_record,
)
from primal_attention.report.results import Mean
from primal_attention.report.table import NOTHING, Section, Table

GB = 1e9


def efficiency(title: str, cells: Sequence[Cell], command: str) -> Table:
    """Seconds per epoch and peak memory of training, each beside softmax attention's."""
    columns = ["Dataset (length)", "Model", "Paper s/epoch", "s/epoch", "× softmax", "Paper GB", "Peak GB", "× softmax"]
    base = {c.dataset: c for c in cells if c.model == "softmax"}
    rows = []
    for cell in cells:
        length = next((r.length for r in cell.results), None)
        name = cell.dataset if length is None else f"{cell.dataset} ({length})"
        published = paper.SECONDS.get(cell.model, {}).get(cell.dataset)
        rows.append(efficiency_row(name, cell, published, None, [cell], [base.get(cell.dataset)]))
    sets = comparable_sets(cells)
    if len(sets) > 1:
        for model in dict.fromkeys(c.model for c in cells):
            chosen = [c for c in cells if c.model == model and c.dataset in sets]
            known = [paper.SECONDS[model][s] for s in sets if s in paper.SECONDS.get(model, {})]
            published = fmean(known) if len(known) == len(sets) else None
            reference = [base.get(s) for s in sets]
            rows.append(efficiency_row(AVERAGE, chosen[0], published, paper.MEMORY.get(model), chosen, reference))
    notes = [
        f"Paper: {paper.EFFICIENCY_SOURCE}, {paper.EFFICIENCY_DEVICE}; one memory number for all sets.",
        "Ours: training only, median epoch, mean ± standard deviation over the seeds; one run at a time on a device. "
        "Softmax attention goes through torch's scaled_dot_product_attention, without gradient checkpointing.",
        "× softmax: how many times faster, and how many times less memory, than softmax attention on the same device.",
        "Peak GB: the most that torch had allocated on the GPU during a training epoch, in 10⁹ bytes; the average row "
        "has the largest of the sets. A run on a CPU has none.",
    ]
    if len(sets) > 1:
        notes.append(
            f"{AVERAGE}: over {', '.join(sets)}; the paper's seconds are the mean of its numbers on these sets."
        )
    records = [efficiency_record(cell, base.get(cell.dataset), command) for cell in cells]
    section = Section("", [*columns, "Seeds"], rows)
    return Table(title, [section], [*notes, *origin(cells, command)], records)


def efficiency_row(
    name: str,
    cell: Cell,
    seconds: float | None,
    memory: float | None,
    chosen: Sequence[Cell],
    base: Sequence[Cell | None],
) -> list[str]:
    mean, peak = average(chosen, lambda r: r.seconds_per_epoch), largest_peak(chosen)
    faster, smaller = against(chosen, base)
    return [
        name,
        model_title(cell.model),
        NOTHING if seconds is None else f"{seconds:.1f}",
        mean.show(2) if mean else NOTHING,
        times(faster),
        NOTHING if memory is None else f"{memory:.1f}",
        NOTHING if peak is None else f"{peak / GB:.2f}",
        times(smaller),
        str(mean.seeds if mean else 0),
    ]


def largest_peak(cells: Iterable[Cell]) -> float | None:
    peaks = [r.peak_memory_bytes for c in cells for r in c.results if r.peak_memory_bytes]
    return max(peaks, default=None)


def against(chosen: Sequence[Cell], base: Sequence[Cell | None]) -> tuple[float | None, float | None]:
    """Softmax's seconds and bytes divided by these; None where devices differ or softmax did not run."""
    reference = [c for c in base if c is not None]
    devices = {r.device for c in (*chosen, *reference) for r in c.results}
    mine, theirs = (average(cells, lambda r: r.seconds_per_epoch) for cells in (chosen, reference))
    if len(devices) != 1 or mine is None or theirs is None:
        return None, None
    peak, limit = largest_peak(chosen), largest_peak(reference)
    return theirs.mean / mine.mean, limit / peak if peak and limit else None


def times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}×"


def efficiency_record(cell: Cell, base: Cell | None, command: str) -> dict[str, Any]:
    faster, smaller = against([cell], [base])
    return {
        "dataset": cell.dataset,
        "length": next((r.length for r in cell.results), None),
        "model": cell.model,
        "paper_seconds": paper.SECONDS.get(cell.model, {}).get(cell.dataset),
        **mean_record("seconds", Mean.of(r.seconds_per_epoch for r in cell.results)),
        "times_faster": faster,
        "peak_bytes": largest_peak([cell]),
        "times_less_memory": smaller,
        **origin_record(cell, command),
    }
