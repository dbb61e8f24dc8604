"""Figures of several commands, drawn by matplotlib as PNG and SVG."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from primal_attention.utils.files import write_atomically


@contextlib.contextmanager
def new_figure(file: Path, rows: int, columns: int) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, then write FILE.png and FILE.svg; raise ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same numbers give the same bytes, and dollar signs in names do not start a formula.
    with matplotlib.rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(4.4 * columns + 3.0, 4.0 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, axes
        for axis in axes.flat:
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        for kind, metadata in (("png", None), ("svg", {"Date": None})):
            path = file.with_name(f"{file.name}.{kind}")
            write_atomically(path, partial(figure.savefig, format=kind, dpi=150, metadata=metadata))


def draw_lengths(axis: Any, rows: Sequence[Mapping[str, Any]], field: str, label: str, unit: str) -> None:
    """Draw a field of rows against the sequence length, one line per name, both axes logarithmic."""
    from matplotlib.ticker import EngFormatter, LogLocator

    for name in dict.fromkeys(row["name"] for row in rows):
        points = sorted((row["length"], row.get(field) or math.nan) for row in rows if row["name"] == name)
        axis.loglog(*zip(*points, strict=True), "o-", label=name)
    ticks = sorted({row["length"] for row in rows})
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # values within one power of ten have ticks too
    axis.yaxis.set_major_formatter(EngFormatter(unit))
    axis.set(xlabel="sequence length (tokens)", ylabel=label)
