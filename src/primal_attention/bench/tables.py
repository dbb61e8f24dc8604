"""A report as text: one table per width and quantity, contenders down, lengths across."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from primal_attention.bench.settings import show_length
from primal_attention.utils.provenance import device_name

MIB = 1024**2
SHORT = {"out of memory": "OOM", "refused": "wrong", "unsupported": "–", "skipped": "slow", "failed": "failed"}
Row = dict[str, Any]


def attention(report: dict[str, Any]) -> str:
    """Times, ratios and memory of `primal bench attention`, and below them why anything is missing."""
    parts = [headline(report)]
    for width, heads in dict.fromkeys((row["embed_dim"], row["num_heads"]) for row in report["rows"]):
        rows = [row for row in report["rows"] if (row["embed_dim"], row["num_heads"]) == (width, heads)]
        about = f"d {width}, {heads} heads"
        parts.append(grid(f"{about}: forward + backward, ms (± half the distance of the quartiles)", rows, show_time))
        parts.append(grid(f"{about}: SDPA's time ÷ this one's", rows, lambda r: f"{r['speedup']:.2f}×", "speedup"))
        if any(row["peak_bytes"] is not None for row in rows):
            parts.append(grid(f"{about}: peak memory of a step, MiB (÷ SDPA's)", rows, bytes_of("peak"), "peak_bytes"))
        parts.append(grid(f"{about}: kept for backward, MiB (÷ SDPA's)", rows, bytes_of("kept"), "kept_bytes"))
    return "\n\n".join([part for part in parts if part] + notes(report["rows"]))


def decode(report: dict[str, Any]) -> str:
    """Time per token and state of `primal bench decode`."""
    parts = [headline(report)]
    for width, heads in dict.fromkeys((row["embed_dim"], row["num_heads"]) for row in report["rows"]):
        rows = [row for row in report["rows"] if (row["embed_dim"], row["num_heads"]) == (width, heads)]
        about = f"d {width}, {heads} heads, batch {rows[0]['batch']}"
        parts.append(
            grid(f"{about}: one token after N tokens were read, µs", rows, lambda r: f"{1e6 * r['seconds']:.1f}")
        )
        parts.append(
            grid(f"{about}: state per sequence, kB", rows, lambda r: f"{r['state_bytes'] / 1e3:,.1f}", "state_bytes")
        )
    return "\n\n".join(parts + notes(report["rows"]))


def model(report: dict[str, Any]) -> str:
    """Training steps of `primal bench model`, and below them errors and recompilations."""
    columns = {"wall_ms": "ms/step", "ratio": "× SDPA", "busy_ms": "GPU busy, ms", "first_s": "first step, s",
               "peak_mib": "peak, MiB", "peak_ratio": "× SDPA"}  # fmt: skip
    body, rest = [], []
    for row in report["rows"]:
        name = f"{row['name']}, {row['kind']}"
        body.append([name, *("–" if row[key] is None else number(row[key]) for key in columns)])
        if row["error"]:
            rest.append(f"{name}: {row['error']}")
        elif "graphs" in row:
            rest.append(f"{name}: {row['recompilations']} recompilations, {row['graphs']} graphs over ten lengths")
    where = f"{device_name(report['hardware'])}; torch {report['versions']['torch']}{busy(report['hardware'])}"
    title = f"training steps of whole models, {report['settings']['tokens']:,} tokens each unless the batch is limited"
    return "\n\n".join([where, table(title, ["", *columns.values()], body), *(["\n".join(rest)] if rest else [])])


def headline(report: dict[str, Any]) -> str:
    settings, versions = report["settings"], report["versions"]
    kind = "causal" if settings.get("causal") or report["kind"] != "attention" else "not causal"
    methods = " and ".join(sorted({row["method"] for row in report["rows"] if row.get("method")}))
    tokens = {row["batch"] * row["length"] for row in report["rows"]}
    per_step = f", {tokens.pop():,} tokens per step" if len(tokens) == 1 and report["kind"] == "attention" else ""
    where = f"{device_name(report['hardware'])}; torch {versions['torch']}"
    how = f"; {methods}" if methods else ""
    return f"{where}; {settings['dtype']}, {kind}{per_step}{how}{busy(report['hardware'])}"


def busy(hardware: dict[str, Any]) -> str:
    """A warning where other programs wanted the same cores: threads that wait for each other suffer many times over."""
    before, after = hardware.get("load_before") or 0.0, hardware.get("load_after") or 0.0
    cores, threads = hardware["cores"] or 1, hardware["threads"]
    if hardware["device"] != "cpu" or (before < 0.5 * cores and after < threads + 0.5):
        return ""
    return f"\nthe machine had other work (load {before:g} before, {after:g} after, {cores} cores): times are too long"


def show_time(row: Row) -> str:
    return f"{number(1e3 * row['seconds'])} ±{number(5e2 * row['iqr'], 2)}"


def number(value: float, digits: int = 3) -> str:
    """Some digits, never an exponent."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def bytes_of(what: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        against = "" if row[f"{what}_ratio"] is None else f" ({row[f'{what}_ratio']:.2f})"
        return f"{row[f'{what}_bytes'] / MIB:,.4g}{against}"

    return show


def grid(title: str, rows: Sequence[Row], show: Callable[[Row], str], needs: str = "seconds") -> str:
    """Text, or nothing when no row has the quantity."""
    if not any(row.get(needs) is not None for row in rows):
        return ""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["length"]): _cell(row, show, needs) for row in rows}
    labels = list(dict.fromkeys(row["label"] for row in rows if row["status"] != "unsupported"))
    body = [[label, *(cells.get((label, n), "") for n in lengths)] for label in labels]
    return table(title, ["N =", *map(show_length, lengths)], body)


def _cell(row: Row, show: Callable[[Row], str], needs: str) -> str:
    if row["status"] != "ok":
        return SHORT[row["status"]]
    if row.get(needs) is None:
        return "–"
    return show(row) + ("*" if needs == "seconds" and row["note"] else "")


def table(title: str, headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (headings, *body)) for i in range(len(headings))]

    def join(line: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join((first, *rest)).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, join(headings), rule, *map(join, body)])


def notes(rows: Sequence[Row]) -> list[str]:
    """Why a cell is empty or carries a star, each reason once."""
    lengths: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row["note"]:
            lengths.setdefault((row["label"], row["status"], row["note"]), []).append(row["length"])
    everywhere = {row["length"] for row in rows}
    lines = []
    for (label, status, note), found in lengths.items():
        where = "" if set(found) == everywhere else " at N = " + ", ".join(map(show_length, sorted(set(found))))
        lines.append(f"{label}{where}: {'*' if status == 'ok' else status}, {note}")
    return ["\n".join(lines)] if lines else []
