"""Numbers in files: JSON, tables of metrics, benchmarks, demos and singular values, checked as they are read."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primal_attention.engine.errors import RunError

Table = dict[str, list[float | None]]
Spectrum = dict[str, list[float]]
BENCH_FIELDS = {"name", "label", "embed_dim", "num_heads", "batch", "length", "status", "seconds"}
BENCH_KINDS = ("attention", "decode")


@dataclass(frozen=True)
class Numbers:
    """The content of a benchmark's or a demo's JSON."""

    place: str
    content: Mapping[str, Any]


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read as JSON ({error})") from error


def number_at(content: Any, keys: Sequence[str]) -> float | None:
    """A number by its path in nested tables; None where there is none, or none that can be drawn."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return float(content) if isinstance(content, (int, float)) and math.isfinite(content) else None


def benchmark(content: dict[str, Any], file: Path) -> Numbers:
    rows = content["rows"]
    fits = isinstance(rows, list) and all(isinstance(row, dict) and set(row) >= BENCH_FIELDS for row in rows)
    if not fits or not isinstance(content.get("hardware"), dict) or not isinstance(content.get("settings"), dict):
        raise RunError(f"{file} is not a benchmark that this version can read")
    return Numbers(str(file), content)


def demo(content: dict[str, Any], file: Path) -> Numbers:
    try:
        numbers = {
            "singular_values": decay(content["singular_values"]),
            "seconds": {
                str(name): {int(n): float(s) for n, s in points.items()}
                for name, points in content.get("seconds", {}).items()
            },
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file} is not what primal demo writes ({error})") from error
    return Numbers(str(file), numbers)


def read_table(file: Path) -> Table:
    """Columns of metrics.csv; a run that has not ended its first epoch has none."""
    if not file.exists():
        return {}
    table: Table = {}
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        for row in reader:
            if len(row) != len(header):
                raise RunError(f"{file} line {reader.line_num} has {len(row)} cells, the header {len(header)}")
            for name, cell in zip(header, row, strict=True):
                try:
                    table.setdefault(name, []).append(float(cell) if cell else None)
                except ValueError:
                    raise RunError(f"{file} line {reader.line_num}: {name} is no number ({cell!r})") from None
    return table


def read_spectrum(folder: Path) -> Spectrum:
    """Singular values that lie in a run folder, by layer, relative to the largest.

    spectrum.json: {"singular_values": {layer: [σ_1, …] or one such list per head}}, or a plain list instead of layers.
    spectrum.csv: columns value and index, and layer and head where there are several.
    """
    file = folder / "spectrum.json"
    if file.exists():
        content = read_json(file)
        values = content.get("singular_values") if isinstance(content, dict) else content
        try:
            return decay(values if isinstance(values, dict) else {"all layers": values})
        except (TypeError, ValueError) as error:
            raise RunError(f"{file} holds no singular values ({error})") from error
    file = folder / "spectrum.csv"
    return spectrum_table(file) if file.exists() else {}


def spectrum_table(file: Path) -> Spectrum:
    layers: dict[str, dict[str, list[float]]] = {}
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = sorted(csv.DictReader(lines), key=lambda row: int(row["index"]))
        for row in rows:
            heads = layers.setdefault(row.get("layer") or "all layers", {})
            heads.setdefault(row.get("head") or "", []).append(float(row["value"]))
        return decay({layer: list(heads.values()) for layer, heads in layers.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} needs numbers in the columns index and value ({error})") from error


def decay(values: Mapping[str, Any]) -> Spectrum:
    """σ_i / σ_1 by name, the mean over heads where a name has several lists."""
    found: Spectrum = {}
    for name, lists in values.items():
        if not isinstance(lists, list) or not lists:
            raise ValueError(f"{name} has none")
        heads = [[float(v) for v in head] for head in (lists if isinstance(lists[0], list) else [lists])]
        if any(not head or not all(math.isfinite(v) and v >= 0 for v in head) for head in heads):
            raise ValueError(f"{name} has values that are negative or not finite")
        shares = [[v / (head[0] or 1.0) for v in head] for head in heads]
        count = min(map(len, shares))
        found[str(name)] = [sum(head[i] for head in shares) / len(shares) for i in range(count)]
    return found
