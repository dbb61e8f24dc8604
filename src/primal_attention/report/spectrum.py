"""The spectrum's pictures, PNG and SVG, from plain numbers: four panels as in the paper's Figure 1, and a head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primal_attention.report.figures import save

COLOURS = ("#1d4ed8", "#c2410c", "#0d9488", "#7c3aed", "#64748b", "#be185d")
GROUPS = ("shallow", "middle", "deep")
EXPLAINED = 0.999  # where every curve is above it, nothing is left to see


@dataclass(frozen=True)
class Curve:
    """One layer: cumulative explained variance by the number of directions, and its effective rank."""

    kind: str
    mean: Sequence[float]
    deviation: Sequence[float]
    rank: float
    rank_deviation: float


def layer_groups(count: int) -> list[list[int]]:
    """The layers in three runs of about equal length, the later ones longer; fewer layers, fewer runs."""
    parts = min(3, count)
    bounds = [count * i // parts for i in range(parts + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def four_panels(file: Path, models: Mapping[str, Sequence[Curve]], title: str) -> list[Path]:
    """(a)–(c): explained variance of shallow, middle and deep layers, the last one dashed. (d): effective rank."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(17.0, 3.9), layout="constrained")
    curves = [curve for layers in models.values() for curve in layers]
    shown = max(map(needed, curves))
    lowest = min(curve.mean[0] - curve.deviation[0] for curve in curves)
    for colour, (label, layers) in zip(_colours(len(models)), models.items(), strict=True):
        groups = layer_groups(len(layers))
        for panel, group in enumerate(groups):
            for i in group:
                style = {"last": i == len(layers) - 1, "first": i == group[0]}
                _explained(axes[panel], layers[i], shown, i, colour, label, **style)
        index = list(range(len(layers)))
        ranks, spread = [c.rank for c in layers], [c.rank_deviation for c in layers]
        axes[3].errorbar(index, ranks, spread, fmt="-", color=colour, capsize=3, linewidth=1.6, label=label)
        for i, curve in enumerate(layers):
            face = colour if curve.kind == "primal" else "white"
            axes[3].plot(i, curve.rank, "s" if curve.kind == "primal" else "o", color=colour, markerfacecolor=face)
    for panel, (letter, name) in enumerate(zip("abc", GROUPS, strict=True)):
        axis = axes[panel]
        if not axis.lines:
            axis.set_visible(False)
            continue
        _plain(axis, f"({letter}) {name} layers")
        axis.set_xlabel("directions")
        axis.set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1.03)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0].set_ylabel("cumulative explained variance")
    _plain(axes[3], "(d) effective rank (square: Primal-Attention)")
    axes[3].set_xlabel("layer")
    axes[3].set_ylim(bottom=0)
    axes[3].xaxis.get_major_locator().set_params(integer=True)
    axes[3].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return _save(figure, file)


def needed(curve: Curve) -> int:
    """How many directions of a layer are worth drawing, ten at least."""
    return max(sum(share < EXPLAINED for share in curve.mean) + 1, 10)


def _explained(
    axis: Any, curve: Curve, shown: int, number: int, colour: str, label: str, *, last: bool, first: bool
) -> None:
    mean, deviation = curve.mean[:shown], curve.deviation[:shown]
    index = range(1, len(mean) + 1)
    low = [m - d for m, d in zip(mean, deviation, strict=True)]
    high = [min(1.0, m + d) for m, d in zip(mean, deviation, strict=True)]
    axis.fill_between(index, low, high, color=colour, alpha=0.10, linewidth=0)
    style: dict[str, Any] = {"linewidth": 2.6, "linestyle": "--"} if last else {"linewidth": 1.0}
    name = f"{label} L[{number}]" if last else label if first else None
    axis.plot(index, mean, color=colour, label=name, **style)


def head_map(file: Path, matrix: Any, share: Any | None, title: str) -> list[Path]:
    """A head's kernel matrix, and where there are landmarks, their share in each token's output."""
    plt = _pyplot()
    panels = 1 if share is None else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.4 * panels, 4.6), layout="constrained", squeeze=False)
    largest = float(abs(matrix).max()) or 1.0
    signed = float(matrix.min()) < 0
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest} if signed else {"cmap": "magma"}
    left = axes[0, 0]
    figure.colorbar(left.imshow(matrix, interpolation="nearest", **colours), ax=left, shrink=0.85)
    left.set(title="kernel matrix K", xlabel="token j (key)", ylabel="token i (query)")
    if share is not None:
        right = axes[0, 1]
        image = right.imshow(share, interpolation="nearest", aspect="auto", cmap="magma", vmin=0)
        figure.colorbar(image, ax=right, shrink=0.85)
        right.set(title="landmarks' share in each token's output", xlabel="landmark", ylabel="token")
    figure.suptitle(title)
    return _save(figure, file)


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _plain(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, file: Path) -> list[Path]:
    plt = _pyplot()
    files = [file.with_name(file.name + suffix) for suffix in (".png", ".svg")]
    with plt.rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none"}):
        for path in files:
            save(figure, path)
    plt.close(figure)
    return files
