"""The table of image classifiers: our accuracies, speed and memory, and the paper's numbers on ImageNet beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primal_attention.report import paper_images as paper
from primal_attention.report.accuracy import HEADINGS
from primal_attention.report.cells import Cell, mean_record, origin, origin_record
from primal_attention.report.results import PROTOCOLS, Mean, Result
from primal_attention.report.table import NOTHING, Section, Table

GB = 1e9


def images(title: str, cells: Sequence[Cell], command: str) -> Table:
    """One row per set and model; a second section repeats the paper's table, which is about other sets."""
    rows = [row(cell) for cell in cells]
    columns = ["Images", "Model", *HEADINGS.values(), "Images/s", "Peak GB", "Seeds"]
    published = [["Paper", name, *(f"{value:.1f}" for value in numbers)] for name, numbers in paper.TABLE.items()]
    sections = [
        Section("", columns, rows),
        Section(f"The paper's own ({paper.SOURCE}, {paper.DEVICE})", ["", "Model", *paper.COLUMNS], published),
    ]
    notes = [
        "Ours: accuracy on test in per cent, mean ± standard deviation over the seeds, all three from one training "
        "that holds a tenth of the training images out. BEST-ON-TEST lets the test set choose the epoch and so is too "
        "high. LAST and VALIDATION-CHOSEN never look at test; in the second, the held-out images choose the epoch.",
        "Images/s: training images per second of the median epoch, reading and augmentation included, one run at a "
        "time. Peak GB: the most that torch had allocated on the GPU in a training epoch, in 10⁹ bytes, the pixels of "
        "a set that is kept on the device included. Softmax goes through torch's scaled_dot_product_attention.",
    ]
    records = [record(cell, command) for cell in cells]
    return Table(title, sections, [*notes, *origin(cells, command)], records)


def row(cell: Cell) -> list[str]:
    accuracies = [Mean.of(r.accuracy(protocol) for r in cell.results) for protocol in PROTOCOLS]
    speed, memory = Mean.of(map(images_per_second, cell.results)), Mean.of(map(peak, cell.results))
    return [
        cell.dataset,
        paper.TITLES.get(cell.model, cell.model),
        *(mean.show() if mean else NOTHING for mean in accuracies),
        speed.show(0) if speed else NOTHING,
        memory.show(2) if memory else NOTHING,
        str(len(cell.results)),
    ]


def record(cell: Cell, command: str) -> dict[str, Any]:
    found: dict[str, Any] = {"set": cell.dataset, "model": cell.model}
    for protocol in PROTOCOLS:
        found |= mean_record(protocol, Mean.of(r.accuracy(protocol) for r in cell.results))
    found |= mean_record("images_per_second", Mean.of(map(images_per_second, cell.results)))
    found |= mean_record("peak_gb", Mean.of(map(peak, cell.results)))
    return found | origin_record(cell, command)


def images_per_second(result: Result) -> float | None:
    seen = result.data.get("images_per_epoch")
    return seen / result.seconds_per_epoch if seen and result.seconds_per_epoch else None


def peak(result: Result) -> float | None:
    return result.peak_memory_bytes / GB if result.peak_memory_bytes else None
