"""What a report is made from: run folders, result files, benchmarks and demos, found under the paths that were given.

    run folder       config.yaml, metrics.csv, summary.json, validation/ (engine/runner.py), maybe spectrum.json or .csv
    result file      the summary of one run (engine/tables/grid.py)
    benchmark        the JSON of `primal bench`
    demo             demo.json of `primal demo`

Only files are read, never a model. What cannot be read is one line that names it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primal_attention.bench import measurement
from primal_attention.report.page_numbers import (
    Numbers,
    Spectrum,
    demo,
    number_at,
    read_spectrum,
)
from primal_attention.report.results import SUMMARY, complete
from primal_attention.train.readers import Table, read_metrics
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import Number, check, read_json, read_yaml

BENCH_KINDS = ("attention", "decode")
CONFIG = {
    "benchmark": str,
    "recipe?": (str, None),
    "command?": (str, None),
    "commit?": (str, None),
    "config": {"seed?": Number(integer=True, least=0), "data?": dict, "model?": dict, "optim?": dict, "trainer?": dict},
}
RESULT = {**SUMMARY, "label": str, "seed": SUMMARY["seed?"]}
RUN_FILES = ("config.yaml", "summary.json", "metrics.csv")


@dataclass(frozen=True)
class Run:
    """One run as its folder or its result file tells it."""

    place: str
    recipe: str
    label: str
    seed: int
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration with the fields that are younger than the run, at the values that leave it as it was."""
    command: str = ""
    commit: str = ""
    metrics: Table = field(default_factory=dict)
    validation: Table = field(default_factory=dict)
    spectrum: Spectrum = field(default_factory=dict)
    in_folder: bool = False

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def task(self) -> str:
        """The data set, or the recipe where the run has not told it."""
        data = self.summary.get("data") or (self.config or {}).get("data") or {}
        name = data.get("set") or data.get("name") if isinstance(data, Mapping) else None
        return str(name or self.recipe)

    def accuracy(self, protocol: str, key: str = "accuracy") -> float | None:
        """In percent."""
        value = number_at(self.summary, ("scores", protocol, key))
        return None if value is None else 100.0 * value


@dataclass
class Found:
    runs: list[Run] = field(default_factory=list)
    benches: list[Numbers] = field(default_factory=list)
    demos: list[Numbers] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def collect(paths: Sequence[Path], *, skip_broken: bool = False) -> Found:
    """Everything under the paths, each file once; the first that is broken raises unless it is to be skipped."""
    found, seen = Found(), set()
    for path in paths:
        try:
            places = list(look(path))
        except RunError as error:
            if not skip_broken:
                raise
            found.broken.append(str(error))
            continue
        for place in places:
            if place.resolve() in seen:
                continue
            seen.add(place.resolve())
            try:
                take(place, found, asked_for=place == path)
            except RunError as error:
                if not skip_broken:
                    raise
                found.broken.append(str(error))
    found.runs = without_copies(found.runs)
    return found


def look(path: Path) -> Iterator[Path]:
    """The run folders and JSON files under a path, in order of their names."""
    if not path.exists():
        raise RunError(f"{path} does not exist")
    if path.is_file() or any((path / name).is_file() for name in RUN_FILES):
        yield path
        return
    found = False
    for folder, inside, files in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if any(name in RUN_FILES for name in files):
            inside.clear()  # what lies below belongs to this run
            yield Path(folder)
            found = True
            continue
        for name in sorted(files):
            if name.endswith(".json") and not name.startswith("."):
                yield Path(folder, name)
                found = True
    if not found:
        raise RunError(f"{path} holds no run: neither config.yaml nor a results file is in it or below it")


def take(place: Path, found: Found, *, asked_for: bool) -> None:
    """Read one place into `found`. A foreign JSON file is refused if it was named itself, else left alone."""
    if place.is_dir():
        found.runs.append(read_run(place))
        return
    content = read_json(place)
    if isinstance(content, dict) and "scores" in content:
        found.runs.append(result(content, place))
    elif isinstance(content, dict) and content.get("kind") in BENCH_KINDS and "rows" in content:
        found.benches.append(Numbers(str(place), measurement.check_report(content, place)))
    elif isinstance(content, dict) and isinstance(content.get("singular_values"), dict):
        found.demos.append(demo(content, place))
    elif asked_for:
        raise RunError(f"{place} is neither a run's result nor a benchmark of this library")


def without_copies(runs: Sequence[Run]) -> list[Run]:
    """A grid leaves each summary twice, in the run folder and as a result file: the folder says more."""

    def told(run: Run) -> str:
        return json.dumps(run.summary, sort_keys=True)

    in_folders = {told(run) for run in runs if run.in_folder}
    return [run for run in runs if run.in_folder or told(run) not in in_folders]


def read_run(folder: Path) -> Run:
    about = read_config(folder)
    summary: dict[str, Any] = {}
    if (file := folder / "summary.json").exists():  # else the run has not finished: its curves are still worth a look
        summary = read_json(file)
        check_summary(summary, SUMMARY, file)
        summary.pop("config", None)  # the same again
    config = about["config"]
    return Run(
        place=str(folder),
        recipe=str(about.get("recipe") or about["benchmark"]),
        label=str(summary.get("label") or label_of(config)),
        seed=config.get("seed", 0),
        summary=summary,
        config=config,
        settings=complete(about["benchmark"], config),
        command=about.get("command") or command_of(str(about.get("recipe")), config),
        commit=about.get("commit") or summary.get("commit") or "",
        metrics=read_metrics(folder / "metrics.csv"),
        validation=read_metrics(folder / "validation" / "metrics.csv"),
        spectrum=read_spectrum(folder),
        in_folder=True,
    )


def read_config(folder: Path) -> dict[str, Any]:
    from primal_attention.train.folder import check_format

    file = folder / "config.yaml"
    if not file.exists():
        raise RunError(f"{folder} is not a run folder: it has no config.yaml")
    about = read_yaml(file, {"format": ...})
    check_format(about, file)
    check(about, CONFIG, file)
    return about


def label_of(config: Mapping[str, Any]) -> str:
    """The variant of a run that has no summary yet."""
    model = config.get("model")
    names = model.get("attention") if isinstance(model, dict) else None
    return "-".join(map(str, names)) if isinstance(names, list) else str(names or "run")


def command_of(recipe: str, config: Mapping[str, Any]) -> str:
    """The command that would start the same run, for one that was started from Python."""
    from primal_attention.train import registry
    from primal_attention.train.config import to_plain
    from primal_attention.train.folder import FREE, differences

    try:
        default = to_plain(registry.get(recipe))
    except RunError:
        return ""
    words = ["primal", "train", recipe]
    for name, _, value in differences(default, config):
        flag = name.replace("_", "-")
        if name in FREE:
            continue
        if isinstance(value, bool):
            room, _, last = flag.rpartition(".")
            words.append(f"--{flag}" if value else f"--{room}.no-{last}" if room else f"--no-{last}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def check_summary(content: Any, schema: Any, file: Path) -> None:
    from primal_attention.train.folder import check_format

    check(content, {"format": ...}, file)
    check_format(content, file)
    check(content, schema, file)


def result(content: dict[str, Any], file: Path) -> Run:
    check_summary(content, RESULT, file)
    config = content.get("config")
    recipe = content.get("recipe") or content.get("benchmark") or ""
    return Run(
        place=str(file),
        recipe=recipe,
        label=content["label"],
        seed=content["seed"],
        summary={key: value for key, value in content.items() if key != "config"},
        config=config,
        settings=complete(content.get("benchmark"), config or {}),
        command=content.get("command") or (command_of(recipe, config) if config else ""),
        commit=content.get("commit") or "",
    )
