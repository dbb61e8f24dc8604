"""Results of runs, read from disk: the small JSON files that a grid leaves, or the summary.json of run folders."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primal_attention.engine.errors import RunError
from primal_attention.engine.folder import check_format

PROTOCOLS = ("best_on_test", "last", "validation_chosen")


@dataclass(frozen=True)
class Result:
    """One finished run."""

    file: Path
    recipe: str
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    """By protocol: the accuracy on test, and the epoch it belongs to."""
    config: Mapping[str, Any]
    benchmark: str
    seconds_per_epoch: float
    peak_memory_bytes: int | None
    device: str
    length: int | None
    commit: str | None
    parameters: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the run said about its data."""

    def accuracy(self, protocol: str) -> float | None:
        """Per cent, or None where this run did not follow the protocol."""
        score = self.scores.get(protocol)
        return None if score is None else 100.0 * score["accuracy"]


@dataclass(frozen=True)
class Mean:
    """Mean and sample deviation over seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean | None:
        """None where there is nothing to average."""
        found = [v for v in values if v is not None]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))

    def show(self, digits: int = 1) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


def read(folder: Path) -> list[Result]:
    """All results below a folder in the order of their paths; other JSON files are passed over."""
    if not folder.is_dir():
        return []
    return [r for file in sorted(folder.rglob("*.json")) if (r := read_file(file)) is not None]


def read_file(file: Path) -> Result | None:
    """The result in a file, or None if it holds something else or says nothing about its settings."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read as JSON ({error}): remove it, and the run writes it again") from error
    if not isinstance(content, dict) or not {"scores", "recipe", "label", "config"} <= content.keys():
        return None
    check_format(content, file)
    try:
        return Result(
            file=file,
            recipe=content["recipe"],
            seed=content["seed"],
            scores=content["scores"],
            config=content["config"],
            benchmark=content["benchmark"],
            seconds_per_epoch=content["seconds_per_epoch"],
            peak_memory_bytes=content["peak_memory_bytes"],
            device=content["device"],
            length=content.get("data", {}).get("max_length"),
            commit=content.get("commit"),
            parameters=content.get("parameters"),
            data=content.get("data", {}),
        )
    except KeyError as missing:
        raise RunError(f"{file} lacks {missing.args[0]!r}: it is no result of this version") from None
