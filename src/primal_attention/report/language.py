"""The table of language models: how well each predicts the text, what it costs, and how far it is from softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from primal_attention.report.cells import Cell, mean_record, origin, origin_record
from primal_attention.report.results import Mean, Result
from primal_attention.report.table import NOTHING, Section, Table

PAPER = {"softmax": 33.0, "flow": 30.8, "primal+-mean": 31.0}
PAPER_SET = "wikitext-103"
PAPER_SOURCE = "its large-scale experiments, part (b), test perplexity on WikiText-103, one seed"
GB, MILLION = 1e9, 1e6
SCORES = ("validation_perplexity", "perplexity", "validation_bits_per_byte", "bits_per_byte")
BASE = "softmax"


def language(title: str, cells: Sequence[Cell], command: str) -> Table:
    """One row per model and amount of text: models that saw different amounts are not compared."""
    published = any(cell.dataset == PAPER_SET for cell in cells)
    columns = ["Text (seen)", "Model", "Parameters M", *(["Paper ppl"] if published else []), "Valid ppl", "Test ppl"]
    columns += ["Valid bits/byte", "Test bits/byte", "than softmax", "Tokens/s", "Peak GB", "Seeds"]
    rows, records = [], []
    for name, seen, group in by_amount(cells):
        base = next((found for cell, found in group if cell_name(cell) == BASE), [])
        for cell, found in group:
            cells_of_row = row(cell, found, base)
            paper = [f"{PAPER[cell_name(cell)]:.1f}" if published and cell_name(cell) in PAPER else NOTHING]
            rows.append([f"{name} ({seen})", *cells_of_row[:2], *(paper if published else []), *cells_of_row[2:]])
            records.append(record(cell, found, base, command))
    notes = [
        "All models of a text saw the same tokens; the last step is measured, nothing is chosen by validation or test.",
        "Bits per byte: the loss of all tokens of the split, each predicted once in windows of one length, over the "
        "bytes of its text. Than softmax: test bits per byte relative to softmax's; negative is better.",
        "Tokens/s: of training, median epoch. Peak GB: the most that torch had allocated while training, 10⁹ bytes.",
    ]
    if published:
        notes.append(f"Paper: {PAPER_SOURCE}.")
    return Table(title, [Section("", columns, rows)], [*notes, *origin(cells, command)], records)


def by_amount(cells: Sequence[Cell]) -> list[tuple[str, str, list[tuple[Cell, list[Result]]]]]:
    """The cells of each text by how much of it they saw; those without a run stand with the longest."""
    groups = []
    for name in dict.fromkeys(cell.dataset for cell in cells):
        own = [cell for cell in cells if cell.dataset == name]
        amounts = sorted({seen_bytes(r) for cell in own for r in cell.results}, reverse=True)
        for place, amount in enumerate(amounts):
            group = []
            for cell in own:
                found = [r for r in cell.results if seen_bytes(r) == amount]
                if found or (place == 0 and not cell.results):
                    group.append((cell, found))
            groups.append((name, f"{amount / MILLION:.0f} MB", group))
    return groups


def cell_name(cell: Cell) -> str:
    """The variant's own name, as its files have it."""
    options = dict(cell.options)
    if cell.model == "primal+" and options == {"primal_mode": "mean"}:
        return "primal+-mean"
    return cell.model if not options else describe(cell)


def describe(cell: Cell) -> str:
    """The model in words: attention, mode, and what stands at it."""
    options = dict(cell.options)
    names = options.get("attention", (cell.model,))
    softmax = sum(name == "softmax" for name in names)
    words = {"primal": "PrimalFormer", "primal+": "Primal.+", "linear": "linear", "flow": "Flowformer"}
    said = f"hybrid, {softmax} of {len(names)} softmax" if softmax and len(names) > 1 else words.get(names[0], names[0])
    parts = [said] + ([str(options["primal_mode"])] if "primal_mode" in options else [])
    if options.get("conv"):
        place = "inside" if options.get("primal_mode") == "delta" else str(options.get("conv_place", "beside"))
        parts.append(f"convolution {place}")
    return ", ".join(parts + (["gate"] if options.get("gate") else []))


def row(cell: Cell, found: Sequence[Result], base: Sequence[Result]) -> list[str]:
    parameters = next((r.parameters for r in found if r.parameters), None)
    perplexities = [mean(found, score(name)) for name in SCORES[:2]]
    bits = [mean(found, score(name)) for name in SCORES[2:]]
    speed, peak = mean(found, tokens_per_second), mean(found, lambda r: r.peak_memory_bytes)
    return [
        describe(cell) if cell.model != BASE else "softmax, rotary",
        NOTHING if parameters is None else f"{parameters / MILLION:.2f}",
        *(NOTHING if m is None else m.show(2) for m in perplexities),
        *(NOTHING if m is None else m.show(4) for m in bits),
        NOTHING if (gap := against(found, base)) is None else f"{100 * gap:+.2f} %",
        NOTHING if speed is None else f"{speed.mean:,.0f}",
        NOTHING if peak is None else f"{peak.mean / GB:.2f}",
        str(len(found)),
    ]


def score(name: str) -> Callable[[Result], float | None]:
    return lambda r: r.scores.get("last", {}).get(name)


def mean(found: Sequence[Result], value: Callable[[Result], float | None]) -> Mean | None:
    return Mean.of(value(r) for r in found)


def seen_bytes(result: Result) -> int:
    return int(result.data.get("bytes_seen", 0))


def tokens_per_second(result: Result) -> float | None:
    tokens = result.data.get("tokens_per_epoch")
    return None if not tokens else tokens / result.seconds_per_epoch


def against(found: Sequence[Result], base: Sequence[Result]) -> float | None:
    """Test bits per byte relative to softmax's."""
    mine, theirs = mean(found, score("bits_per_byte")), mean(base, score("bits_per_byte"))
    return None if mine is None or theirs is None else mine.mean / theirs.mean - 1


def record(cell: Cell, found: Sequence[Result], base: Sequence[Result], command: str) -> dict[str, Any]:
    return {
        "text": cell.dataset,
        "model": describe(cell),
        "bytes_seen": next((seen_bytes(r) for r in found), None),
        "parameters": next((r.parameters for r in found), None),
        **{key: value for name in SCORES for key, value in mean_record(name, mean(found, score(name))).items()},
        "bits_per_byte_over_softmax": against(found, base),
        "tokens_per_second": None if not found else tokens_per_second(found[0]),
        "peak_bytes": next((r.peak_memory_bytes for r in found), None),
        **origin_record(cell, command),
    }
