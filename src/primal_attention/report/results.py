"""Results of runs, read from disk: the small JSON files that a grid leaves, or the summary.json of run folders."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primal_attention.train.checkpoint import check_format
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import Number, check, read_json

PROTOCOLS = ("best_on_test", "last", "validation_chosen")
NUMBER, COUNT = Number(finite=False), Number(integer=True, least=0)
SUMMARY = {
    "scores": {...: {...: (NUMBER, str, None)}},
    "recipe?": (str, None),
    "benchmark?": str,
    "label?": str,
    "seed?": COUNT,
    "config?": (dict, None),
    "test?": {...: (NUMBER, str, None)},
    "epochs?": COUNT,
    "parameters?": (COUNT, None),
    "primal_layers?": COUNT,
    "objective?": ({...: (NUMBER, None)}, None),
    "seconds_per_epoch?": Number(above=0),
    "peak_memory_bytes?": (COUNT, None),
    "device?": str,
    "torch?": str,
    "version?": str,
    "command?": (str, None),
    "commit?": (str, None),
    "data?": {
        "set?": str,
        "max_length?": COUNT,
        "test_cases?": COUNT,
        "transitions?": COUNT,
        "bytes_seen?": COUNT,
        "tokens_per_epoch?": COUNT,
        "images_per_epoch?": COUNT,
    },
}
NEEDED = ("recipe", "label", "config", "benchmark", "seed", "seconds_per_epoch", "peak_memory_bytes", "device")
RESULT = {**SUMMARY, **{name: SUMMARY[f"{name}?"] for name in NEEDED}, "recipe": str, "config": dict}


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
        value = None if score is None else score.get("accuracy")
        return 100.0 * value if isinstance(value, (int, float)) else None


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
    content = read_json(file)
    if not isinstance(content, dict) or not {"scores", "recipe", "label", "config"} <= content.keys():
        return None
    check_format(content, file)
    check(content, RESULT, file)
    data = content.get("data", {})
    return Result(
        file=file,
        recipe=content["recipe"],
        seed=content["seed"],
        scores=content["scores"],
        config=complete(content["benchmark"], content["config"]),
        benchmark=content["benchmark"],
        seconds_per_epoch=content["seconds_per_epoch"],
        peak_memory_bytes=content["peak_memory_bytes"],
        device=content["device"],
        length=data.get("max_length"),
        commit=content.get("commit"),
        parameters=content.get("parameters"),
        data=data,
    )


def complete(benchmark: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the fields that are younger than the run, at the values that leave it as it was."""
    from primal_attention.train.config import from_plain, to_plain
    from primal_attention.train.registry import RECIPES

    kind = RECIPES.get(str(benchmark))
    if kind is None or not config:
        return config
    try:
        return to_plain(from_plain(kind, config))
    except RunError:  # fields that this version does not know: compare what is there
        return config
