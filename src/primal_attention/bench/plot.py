"""A report as a picture, PNG and SVG: cost against length, both axes logarithmic. Drawn from the JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from primal_attention.bench.settings import show_length
from primal_attention.utils.files import write_atomically
from primal_attention.utils.provenance import device_name

# Primal is warm, softmax blue, everything else cool and thin: the comparison that matters stands out.
STYLES: dict[str, dict[str, Any]] = {
    "primal-fused": {"color": "#c2410c", "marker": "o", "linewidth": 2.4, "zorder": 5},
    "primal-cpu": {"color": "#ea7a1f", "marker": "o", "linewidth": 2.0, "zorder": 4},
    "primal-compiled": {"color": "#eab308", "marker": "s", "linewidth": 1.4},
    "primal-reference": {"color": "#a8896c", "marker": "s", "linewidth": 1.4, "linestyle": "--"},
    "published": {"color": "#44403c", "marker": "D", "linewidth": 1.4, "linestyle": ":"},
    "sdpa": {"color": "#1d4ed8", "marker": "^", "linewidth": 2.4, "zorder": 4},
}
REST = ("#0d9488", "#7c3aed", "#64748b", "#0891b2", "#be185d", "#4d7c0f", "#6366f1", "#9f1239", "#0f766e", "#a16207")
MARKERS = ("v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
Row = dict[str, Any]
Quantity = tuple[str, str, Callable[[Row], float | None]]


def draw(report: dict[str, Any], file: Path) -> list[Path]:
    """FILE.png and FILE.svg; raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if row["status"] == "ok"]
    if not rows:
        return []
    widths = list(dict.fromkeys((row["embed_dim"], row["num_heads"]) for row in rows))
    quantities = attention_quantities(rows) if report["kind"] == "attention" else decode_quantities(rows)
    styles = styles_of(list(dict.fromkeys(row["name"] for row in report["rows"])))
    with plt.rc_context({"svg.hashsalt": "primal", "font.size": 10, "svg.fonttype": "none", "text.parse_math": False}):
        figure, grid = plt.subplots(
            len(widths),
            len(quantities),
            figsize=(5.0 * len(quantities) + 2.4, 3.7 * len(widths) + 0.5),
            squeeze=False,
            layout="constrained",
        )
        for line, (width, heads) in zip(grid, widths, strict=True):
            own = [row for row in rows if (row["embed_dim"], row["num_heads"]) == (width, heads)]
            for axis, quantity in zip(line, quantities, strict=True):
                panel(axis, own, quantity, report["kind"], styles)
                axis.set_title(f"d {width}, {heads} heads", fontsize=10, loc="left")
        handles = {h.get_label(): h for axis in grid.flat for h in axis.get_lines()}
        labels = [label + ending(label, report["rows"]) for label in handles]
        figure.legend(handles.values(), labels, loc="outside right center", frameon=False, fontsize=9)
        figure.suptitle(title(report), fontsize=11)
        files = [file.with_name(file.name + suffix) for suffix in (".png", ".svg")]
        for path in files:
            form = path.suffix.removeprefix(".")
            metadata = {"Date": None} if form == "svg" else None
            write_atomically(path, partial(figure.savefig, format=form, dpi=160, metadata=metadata))
        plt.close(figure)
    return files


def title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    if report["kind"] != "attention":
        model = f" by a model of {settings.get('layers', 'several')} layers" if report["kind"] == "generate" else ""
        what = f"One more token{model} after N tokens were read"
    else:
        what = f"One {'causal ' if settings.get('causal') else ''}attention layer, forward + backward"
        tokens = {row["batch"] * row["length"] for row in report["rows"]}
        if len(tokens) == 1:
            what += f", {tokens.pop():,} tokens per step"
    torch_version = report["versions"]["torch"].split("+")[0]
    return f"{what}\n{device_name(report['hardware'])}, {settings['dtype']}, torch {torch_version}"


def attention_quantities(rows: Sequence[Row]) -> list[Quantity]:
    scale, unit = (
        (1e9, "ns") if max(row["seconds"] / row["batch"] / row["length"] for row in rows) < 1e-5 else (1e6, "µs")
    )

    def per_token(row: Row) -> float:
        return float(scale * row["seconds"] / (row["batch"] * row["length"]))

    what = "peak_bytes" if any(row["peak_bytes"] for row in rows) else "kept_bytes"
    memory = "peak memory of a step" if what == "peak_bytes" else "memory kept for backward"

    def mib(row: Row) -> float | None:
        return row[what] / 1024**2 if row[what] else None

    return [("time per token", unit, per_token), (memory, "MiB", mib)]


def decode_quantities(rows: Sequence[Row]) -> list[Quantity]:
    return [
        ("time per token", "µs", lambda row: 1e6 * row["seconds"]),
        ("state per sequence", "kB", lambda row: row["state_bytes"] / 1e3),
    ]


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One look per name, the same in every panel."""
    others = [name for name in names if name not in STYLES]
    found = dict(STYLES)
    for i, name in enumerate(others):
        found[name] = {"color": REST[i % len(REST)], "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.1}
    return found


def panel(axis: Any, rows: Sequence[Row], quantity: Quantity, kind: str, styles: dict[str, dict[str, Any]]) -> None:
    what, unit, value = quantity
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((row for row in rows if row["name"] == name and value(row)), key=lambda row: row["length"])
        if not own:
            continue
        lengths, values = [row["length"] for row in own], [value(row) for row in own]
        axis.plot(lengths, values, label=own[0]["label"], markersize=5, **styles[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row["length"] for row in rows})
    axis.set_xticks(ticks, [show_length(n) for n in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("tokens read before" if kind != "attention" else "sequence length (tokens)")
    axis.set_ylabel(f"{what} ({unit})")
    plain_ticks(axis)


def ending(label: str, rows: Sequence[Row]) -> str:
    """Why a line stops before the others do."""
    for status, words in (("out of memory", "out of memory"), ("skipped", "too slow")):
        lengths = [row["length"] for row in rows if row["label"] == label and row["status"] == status]
        if lengths:
            return f"\n  {words} at {show_length(min(lengths))}"
    return ""


def plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10, 20 … as numbers, also where the axis spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
