"""The sections about attention itself: time and memory against length, and how fast singular values fall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from primal_attention.report import charts
from primal_attention.report.charts import Series
from primal_attention.report.page_blocks import legend, note, panel, panels, section
from primal_attention.report.page_groups import Group, Palette, by_task
from primal_attention.report.page_numbers import Numbers

MIB = 1024**2
SMALLEST = 1e-6  # a relative singular value below this is the rounding of a zero


def cost(benches: Sequence[Numbers], demos: Sequence[Numbers], palette: Palette) -> str:
    """Time and memory against length, from benchmarks and demos."""
    drawn: list[str] = []
    names: dict[str, int] = {}
    sources: list[str] = []
    for one in benches:
        content, origin = bench_panels(one, palette, names)
        drawn += content
        sources.append(origin)
    for one in demos:
        points = one.content["seconds"]
        lines = []
        for name, by_length in points.items():
            names[name] = palette[name]
            lengths = sorted(by_length)
            values = [1e3 * by_length[n] for n in lengths]
            lines.append(Series(name, lengths, values, palette[name], name, marked=True))
        drawn.append(
            panel("Time of one layer (demo)", against_length(lines, "Time of one layer", "ms, forward + backward"))
        )
        sources.append(f"{one.place}: one CPU thread, one sequence")
    if not any(drawn):
        said = "No benchmark among the given paths: add the JSON of <code>primal bench attention</code>."
        return section("cost", "Time and memory against length", "", note(said))
    lead = "Both axes are logarithmic: a linear cost rises one decade per decade, a quadratic one two."
    origin = '<ul class="sources">' + "".join(f"<li>{escape(text)}</li>" for text in sources) + "</ul>"
    return section("cost", "Time and memory against length", lead, legend(names) + panels(drawn) + origin)


def bench_panels(one: Numbers, palette: Palette, names: dict[str, int]) -> tuple[list[str], str]:
    """Panels of one benchmark, a time and a memory for each width, and the line that says where it comes from."""
    from primal_attention.bench.measurement import busy
    from primal_attention.utils.provenance import device_name

    content = one.content
    rows = [row for row in content["rows"] if row["status"] == "ok" and row["seconds"]]
    decode = content["kind"] == "decode"
    peak = any(row.get("peak_bytes") for row in rows)
    times: Callable[[Mapping[str, Any]], float | None]
    space: Callable[[Mapping[str, Any]], float | None]
    if decode:
        times, time_name = lambda r: 1e6 * r["seconds"], "µs for one more token"
        space, space_name = lambda r: (r.get("state_bytes") or 0) / 1e3, "kB of state per sequence"
    else:
        times, time_name = lambda r: 1e3 * r["seconds"] / r["batch"], "ms per sequence, forward + backward"
        key = "peak_bytes" if peak else "kept_bytes"
        space = lambda r: (r.get(key) or 0) / MIB / (1 if peak else r["batch"])  # noqa: E731
        space_name = "MiB at the peak of a step" if peak else "MiB kept for backward, per sequence"
    causal = "causal, " if content["settings"].get("causal") else ""
    drawn = []
    for width, heads in dict.fromkeys((row["embed_dim"], row["num_heads"]) for row in rows):
        own = [row for row in rows if (row["embed_dim"], row["num_heads"]) == (width, heads)]
        for title, axis, value in (("Time", time_name, times), ("Memory", space_name, space)):
            lines = []
            for name in dict.fromkeys(row["name"] for row in own):
                mine = sorted((row for row in own if row["name"] == name), key=lambda row: row["length"])
                label = str(mine[0]["label"])
                names[label] = palette[name]
                lengths, values = [row["length"] for row in mine], [value(row) for row in mine]
                lines.append(Series(label, lengths, values, palette[name], label, marked=True))
            head = f"{title}{' of decoding' if decode else ''} · {causal}d {width}, {heads} heads"
            drawn.append(panel(head, against_length(lines, head, axis, decode)))
    try:
        hardware = dict(content["hardware"])
        machine, disturbed = device_name(hardware), busy(hardware).strip()
    except KeyError:
        machine, disturbed = "machine not told", ""
    told = [machine, str(content["settings"].get("dtype", "")), str(content.get("date", ""))[:10]]
    words = [f"{one.place}: {', '.join(t for t in told if t)}", disturbed, content.get("command") or ""]
    return drawn, "; ".join(word for word in words if word)


def against_length(lines: Sequence[Series], title: str, y_name: str, decode: bool = False) -> str:
    from primal_attention.bench.measurement import show_length

    lengths = sorted({n for line in lines for n in line.x if n is not None})
    ticks = [(n, show_length(int(n))) for n in lengths]
    x_name = "tokens read before" if decode else "tokens N"
    return charts.lines(lines, title=title, x_name=x_name, y_name=y_name, x_log=True, y_log=True, x_ticks=ticks)


def spectra(groups: Sequence[Group], demos: Sequence[Numbers], palette: Palette) -> str:
    """How fast singular values fall."""
    drawn: list[str] = []
    names: dict[str, int] = {}
    for title, members in by_task(groups).items():
        lines = []
        for one in members:
            for run in one.runs:
                for layer, values in run.spectrum.items():
                    names[one.name] = palette[one.name]
                    lines.append(falling(f"{one.name}, seed {run.seed}, {layer}", values, one.name, palette))
        drawn.append(panel(title, decay_chart(lines, title)))
    for demo in demos:
        lines = []
        for name, values in demo.content["singular_values"].items():
            names[name] = palette[name]
            lines.append(falling(name, values, name, palette))
        drawn.append(panel("Mean over layers, heads and cases (demo)", decay_chart(lines, "demo")))
    if not any(drawn):
        said = "No run here stores its spectrum: a <code>spectrum.json</code> in the run folder would be drawn."
        return section("spectra", "Singular values", "", note(said))
    lead = (
        "Singular values of the trained attention matrices, relative to the largest: the faster they fall, the lower "
        "the rank that the matrix needs."
    )
    return section("spectra", "Singular values", lead, legend(names) + panels(drawn))


def falling(label: str, values: Sequence[float], name: str, palette: Palette) -> Series:
    shown = [v for v in values if v > SMALLEST]
    return Series(label, range(1, len(shown) + 1), shown, palette[name], name, marked=len(shown) <= 40)


def decay_chart(lines: Sequence[Series], title: str) -> str:
    return charts.lines(lines, title=f"Singular values, {title}", x_name="index i", y_name="σᵢ / σ₁", y_log=True)
