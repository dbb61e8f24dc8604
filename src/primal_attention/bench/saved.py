"""Read the JSON file of a benchmark, with a schema check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primal_attention.utils.files import COUNT, Number, check, read_json

KINDS = frozenset({"attention", "decode", "generate"})
STATUS = frozenset({"ok", "out of memory", "refused", "unsupported", "skipped", "failed"})
SIZE = (Number(least=0), None)
ROW = {
    "name": str,
    "label": str,
    "embed_dim": COUNT,
    "num_heads": COUNT,
    "batch": COUNT,
    "length": COUNT,
    "status": STATUS,
    "note?": str,
    "seconds": (Number(above=0), None),
    "iqr?": SIZE,
    "method?": (str, None),
    **{f"{name}?": SIZE for name in ("speedup", "peak_bytes", "peak_ratio", "kept_bytes", "kept_ratio", "state_bytes")},
}
REPORT = {
    "format": frozenset({1}),
    "kind": KINDS,
    "date?": (str, None),
    "command?": (str, None),
    "commit?": (str, None),
    "hardware": {
        "device": str,
        "cpu": str,
        "cores": (COUNT, None),
        "threads": COUNT,
        "gpu?": str,
        "load_before?": SIZE,
        "load_after?": SIZE,
    },
    "versions": {"torch": str},
    "settings": {"dtype": str, "causal?": bool, "layers?": COUNT},
    "rows": [ROW],
}
DEFAULTS = {name.removesuffix("?"): None for name in ROW} | {"note": "", "iqr": 0.0}


def read(path: Path) -> dict[str, Any]:
    """A report; raises a `RunError` of one line where the file is not one."""
    return check_report(read_json(path), path)


def check_report(content: Any, path: Path) -> dict[str, Any]:
    """The content of a report's file, with the optional fields of its rows filled in."""
    check(content, REPORT, path)
    rows = [{**DEFAULTS, **row} for row in content["rows"]]
    for i, row in enumerate(rows):
        if row["status"] == "ok":
            measured = ("seconds",) if content["kind"] == "attention" else ("seconds", "state_bytes")
            check(row, {name: Number(least=0) for name in measured}, path, f"rows[{i}]")
    return {**content, "rows": rows}
