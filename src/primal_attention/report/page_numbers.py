"""Numbers in files: JSON, tables of metrics, benchmarks, demos and singular values, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primal_attention.utils.errors import RunError
from primal_attention.utils.files import Number, check, read_cell, read_csv, read_json

Spectrum = dict[str, list[float]]


@dataclass(frozen=True)
class Numbers:
    """The content of a benchmark's or a demo's JSON."""

    place: str
    content: Mapping[str, Any]


def number_at(content: Any, keys: Sequence[str]) -> float | None:
    """A number by its path in nested tables; None where there is none, or none that can be drawn."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return float(content) if isinstance(content, (int, float)) and math.isfinite(content) else None


def demo(content: dict[str, Any], file: Path) -> Numbers:
    check(content, {"seconds?": {...: {...: Number(above=0)}}}, file)
    seconds = content.get("seconds", {})
    if not all(n.isdecimal() for points in seconds.values() for n in points):
        raise RunError(f"{file}: seconds must name the lengths as whole numbers")
    numbers = {
        "singular_values": decay(content["singular_values"], file),
        "seconds": {name: {int(n): float(s) for n, s in points.items()} for name, points in seconds.items()},
    }
    return Numbers(str(file), numbers)


def read_spectrum(folder: Path) -> Spectrum:
    """Singular values that lie in a run folder, by layer, relative to the largest.

    spectrum.json: {"singular_values": {layer: [σ_1, …] or one such list per head}}, or a plain list instead of layers.
    spectrum.csv: columns value and index, and layer and head where there are several.
    """
    file = folder / "spectrum.json"
    if file.exists():
        content = read_json(file)
        values = content.get("singular_values") if isinstance(content, dict) else content
        return decay(values if isinstance(values, dict) else {"singular_values": values}, file)
    file = folder / "spectrum.csv"
    return spectrum_table(file) if file.exists() else {}


def spectrum_table(file: Path) -> Spectrum:
    header, lines = read_csv(file)
    for name in ("index", "value"):
        if name not in header:
            raise RunError(f"{file}: the column {name} is missing")
    rows = []
    for number, cells in enumerate(lines, start=2):
        row = dict(zip(header, cells, strict=True))
        index, value = (read_cell(row[name], f"{file} line {number}: {name}") for name in ("index", "value"))
        if index is None or value is None:
            raise RunError(f"{file} line {number} needs numbers in the columns index and value")
        rows.append((index, row.get("layer") or "all layers", row.get("head") or "", value))
    layers: dict[str, dict[str, list[float]]] = {}
    for _, layer, head, value in sorted(rows, key=lambda row: row[0]):
        layers.setdefault(layer, {}).setdefault(head, []).append(value)
    return decay({layer: list(heads.values()) for layer, heads in layers.items()}, file)


def decay(values: Mapping[str, Any], file: Path) -> Spectrum:
    """σ_i / σ_1 by name, the mean over heads where a name has several lists."""
    sigma = Number(least=0)
    found: Spectrum = {}
    for name, lists in values.items():
        several = isinstance(lists, list) and bool(lists) and isinstance(lists[0], list)
        check(lists, [[sigma]] if several else [sigma], file, name)
        heads = lists if several else [lists]
        if not all(heads):
            raise RunError(f"{file}: {name} has no singular values")
        shares = [[v / (head[0] or 1.0) for v in head] for head in heads]
        count = min(map(len, shares))
        found[str(name)] = [sum(head[i] for head in shares) / len(shares) for i in range(count)]
    if not found:
        raise RunError(f"{file} holds no singular values")
    return found
