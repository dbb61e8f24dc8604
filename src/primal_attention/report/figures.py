"""Pictures, drawn from plain numbers and saved as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primal_attention.utils.files import write_atomically

COLOURS = {"primal": "#c2410c", "softmax": "#1d4ed8"}
NAMES = {"primal": "Primal-Attention", "softmax": "softmax attention"}


def _axes(title: str, columns: int = 2) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5.2 * columns, 4.0), layout="constrained")
    figure.suptitle(title)
    for axis in axes:
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def time_against_length(axis: Any, seconds: Mapping[str, Mapping[int, float]]) -> None:
    """Milliseconds of one layer's forward and backward pass against the number of tokens, both axes logarithmic."""
    for name, points in seconds.items():
        lengths = sorted(points)
        values = [1e3 * points[n] for n in lengths]
        axis.loglog(lengths, values, "o-", base=2, color=COLOURS.get(name), label=NAMES.get(name, name))
    axis.set_yscale("log", base=10)
    every = sorted({n for points in seconds.values() for n in points})
    axis.set_xticks(every, [f"{n:,}" for n in every], rotation=30)
    axis.minorticks_off()
    axis.set_xlabel("sequence length N (tokens)")
    axis.set_ylabel("forward + backward of one layer (ms)")
    axis.legend(frameon=False)
    axis.set_title("Time on this machine, one CPU thread", fontsize=11)


def singular_value_decay(axis: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Singular values of the attention matrices relative to the largest one, on a logarithmic axis."""
    for name, sigma in values.items():
        # Below this a value is rounding of a zero: the matrix has no such direction.
        shown = [s for s in sigma if s > 1e-6]
        index = range(1, len(shown) + 1)
        axis.semilogy(index, shown, "o-", markersize=4, color=COLOURS.get(name), label=NAMES.get(name, name))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("index i")
    axis.set_ylabel("σᵢ / σ₁ (mean over layers and heads)")
    axis.legend(frameon=False)
    axis.set_title("Singular values of the trained attention", fontsize=11)


def demo(file: Path, seconds: Mapping[str, Mapping[int, float]], sigma: Mapping[str, Sequence[float]]) -> Path:
    """The demo's picture: cost against length, and how fast the singular values fall."""
    import matplotlib.pyplot as plt

    figure, (left, right) = _axes("Primal-Attention and softmax attention, JapaneseVowels")
    time_against_length(left, seconds)
    singular_value_decay(right, sigma)
    save(figure, file)
    plt.close(figure)
    return file


def save(figure: Any, file: Path, dpi: int = 150) -> None:
    """Write a figure as PNG or SVG, by the suffix of `file`; the same figure gives the same bytes."""
    form = file.suffix.removeprefix(".")
    metadata = {"Date": None} if form == "svg" else None
    write_atomically(file, lambda stream: figure.savefig(stream, format=form, dpi=dpi, metadata=metadata))
