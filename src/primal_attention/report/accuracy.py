"""The paper's tables of accuracies, ablations included, with our numbers beside its own; its UEA numbers are here.

The three ways to read an accuracy off a run never share a column: the best test epoch (the paper's way), the last
epoch, and the epoch that held-out training cases chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from primal_attention.report.results import PROTOCOLS, Mean
from primal_attention.report.table import NOTHING, Section, Table

HEADINGS = {
    "best_on_test": "BEST-ON-TEST (paper's way)",
    "last": "LAST",
    "validation_chosen": "VALIDATION-CHOSEN",
}


@dataclass(frozen=True)
class Part:
    """How one section of a table names its rows, and where the paper's number of a row stands."""

    title: str
    columns: Sequence[str]
    words: Callable[[Cell], Sequence[str]]
    paper: Callable[[Cell], float | None]
    notes: Sequence[str] = ()


def yes(value: bool) -> str:
    return "yes" if value else "no"


PARTS = {
    "models": Part(
        "",
        ["Model"],
        lambda c: [model_title(c.model)],
        lambda c: paper.ACCURACY.get(c.dataset, {}).get(c.model),
        [f"Paper: {paper.ACCURACY_SOURCE}, the best test epoch of one seed."],
    ),
    "eta-s": Part(
        "Weight η and rank s of PrimalFormer",
        ["s", "η"],
        lambda c: [str(c.options["rank"]), f"{c.options['eta']:g}"],
        lambda c: paper.ETA_RANK.get(c.dataset, {}).get((c.options["rank"], c.options["eta"])),
        [f"Paper, η and s: {paper.ETA_RANK_SOURCE}. Its main table takes the largest number of this grid on test."],
    ),
    "data-dependence": Part(
        "Data-dependent projection weights, Primal.+Trans.",
        ["Data-dependent"],
        lambda c: [yes(c.options["data_dependent"])],
        lambda c: paper.DATA_DEPENDENCE[c.options["data_dependent"]].get(c.dataset),
        [f"Paper, data-dependence: {paper.DATA_DEPENDENCE_SOURCE}."],
    ),
    "r-scores": Part(
        "With and without r-scores in the output",
        ["Model", "r-scores"],
        lambda c: [model_title(c.model), yes(c.options["r_scores"])],
        lambda c: None,
        ["Paper, r-scores: published for LRA only, so nothing stands beside ours; without them r stays in J."],
    ),
}


def accuracy(
    title: str,
    cells: Sequence[Cell],
    command: str,
    known: Mapping[str, Part] = PARTS,
    published: str = "Paper (best on test)",
) -> Table:
    """The table of test accuracies, one section per part. published: heading of the paper's column."""
    parts = list(dict.fromkeys(cell.part for cell in cells))
    notes = [note for part in parts for note in known[part].notes]
    if any(cell.dataset == "SpokenArabicDigits" for cell in cells):
        notes.append(
            "SpokenArabicDigits: the paper's script may have trained on the TEST file; its 100 % is no mark to reach."
        )
    sections = []
    for part in parts:
        section, averaged = accuracy_section(known[part], [c for c in cells if c.part == part], published)
        sections.append(section)
        notes += averaged
    ours = (
        "Ours: accuracy on test in per cent, mean ± standard deviation over the seeds. BEST-ON-TEST lets the test set "
        "choose the epoch, as the paper does, and so is too high. LAST and VALIDATION-CHOSEN never look at test; in "
        "the second, training cases that were held out choose the epoch."
    )
    records = [accuracy_record(known[cell.part], cell, command) for cell in cells]
    return Table(title, sections, [ours, *dict.fromkeys(notes), *origin(cells, command)], records)


def accuracy_section(part: Part, cells: Sequence[Cell], heading: str) -> tuple[Section, list[str]]:
    columns = ["Dataset", *part.columns, heading, *HEADINGS.values(), "Seeds"]
    rows = []
    for cell in cells:
        means = {p: Mean.of(r.accuracy(p) for r in cell.results) for p in PROTOCOLS}
        rows.append(accuracy_row(cell.dataset, part.words(cell), part.paper(cell), means))
    sets = comparable_sets(cells)
    notes = []
    if len(sets) > 1:
        for variant in dict.fromkeys(c.variant for c in cells):
            chosen = [c for c in cells if c.variant == variant and c.dataset in sets]
            published = [part.paper(c) for c in chosen]
            known = [p for p in published if p is not None]
            mean = fmean(known) if len(known) == len(published) else None
            means = {p: average(chosen, lambda r, p=p: r.accuracy(p)) for p in PROTOCOLS}  # type: ignore[misc]
            rows.append(accuracy_row(AVERAGE, part.words(chosen[0]), mean, means))
        notes = [f"{AVERAGE}: over {', '.join(sets)}; the paper's is the mean of its numbers on these sets."]
    return Section(part.title, columns, rows, text_columns=1 + len(part.columns)), notes


def accuracy_row(
    dataset: str, words: Sequence[str], published: float | None, means: Mapping[str, Mean | None]
) -> list[str]:
    counts = [mean.seeds for mean in means.values() if mean]
    # One number where the columns agree; a column may lack runs that followed another protocol.
    seeds = "/".join(str(m.seeds if m else 0) for m in means.values()) if len(set(counts)) > 1 else ""
    return [
        dataset,
        *words,
        NOTHING if published is None else f"{published:.1f}",
        *(mean.show() if mean else NOTHING for mean in means.values()),
        seeds or str(counts[0] if counts else 0),
    ]


def accuracy_record(part: Part, cell: Cell, command: str) -> dict[str, Any]:
    record: dict[str, Any] = {"part": cell.part, "dataset": cell.dataset, "model": cell.model, **cell.options}
    record["paper"] = part.paper(cell)
    for protocol in PROTOCOLS:
        record |= mean_record(protocol, Mean.of(r.accuracy(protocol) for r in cell.results))
    return record | origin_record(cell, command)
