"""Results on disk, read into one dataclass: run folders and the summaries that grids store.

    run folder      config.yaml, metrics.csv, summary.json, validation/metrics.csv, spectrum.csv
    summary         one JSON file per run (results/uea/…), fit of a classifier, or cost of a training step
    benchmark       the JSON file of `primal bench`

Tables, the report page and the commands read runs through this module only. Nothing that is read is executed. A file
that does not fit its schema raises a one-line `RunError` with the path and the field.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from primal_attention.bench import measurement
from primal_attention.data.storage import one_line
from primal_attention.train import classifiers, registry
from primal_attention.train.checkpoint import FREE, check_content
from primal_attention.train.classifiers import Fit
from primal_attention.train.config import Recipe, flatten, from_plain, override, to_plain
from primal_attention.train.grid import Job, Plan, Variant
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import COUNT, Number, check, read_cell, read_csv, read_json, read_yaml

PROTOCOLS = {
    "best_on_test": "BEST-ON-TEST",
    "last": "LAST",
    "validation_chosen": "VALIDATION-CHOSEN",
}
SIZE = Number(integer=True, least=0)
SUMMARY = {
    "scores": {...: {...: (Number(finite=False), str, None)}},
    "benchmark": str,
    "label": str,
    "seed": SIZE,
    "device": str,
    "seconds_per_epoch?": Number(above=0),
    "config?": (dict, None),
    "objective?": ({...: (Number(finite=False), None)}, None),
    **{f"{name}?": (str, None) for name in ("recipe", "torch", "version", "command", "commit")},
    **{f"{name}?": (SIZE, None) for name in ("epochs", "parameters", "primal_layers", "peak_memory_bytes")},
    "data?": {
        **dict.fromkeys(("set?", "refused?"), str),
        **{f"{name}?": SIZE for name in ("max_length", "test_cases", "test_samples", "transitions", "bytes_seen")},
        **{f"{name}?": SIZE for name in ("tokens_per_epoch", "images_per_epoch")},
    },
}
CONFIG = {
    "benchmark": str,
    **{f"{name}?": (str, None) for name in ("recipe", "command", "commit")},
    "config": {"seed?": SIZE, **{f"{name}?": dict for name in ("data", "model", "optim", "trainer")}},
}
OPTIONAL = (Number(least=0), None)
BENCHMARK = {
    "format": frozenset({1}),
    "kind": frozenset(measurement.SUBJECTS),
    "command?": (str, None),
    "hardware": {"cpu": str, "gpu?": str, "cores": (COUNT, None), "threads": COUNT, "load_before?": OPTIONAL},
    "versions": {"torch": str},
    "settings": {"dtype?": str, "layers?": (COUNT, None)},
    "rows": [
        {
            **dict.fromkeys(("name", "label?", "note?", "model?"), str),
            "status": frozenset(measurement.STATUSES),
            **dict.fromkeys(measurement.SIZES, COUNT),
            **{f"{name}?": OPTIONAL for name in measurement.NUMBERS},
        }
    ],
}
RUN_FILES = ("config.yaml", "summary.json", "metrics.csv")
# Settings that do not change what a run measures. The protocol decides which scores exist, which is asked separately.
NOT_COMPARED = {*FREE, "protocol", "watch_test", "seed"}
NOT_COMPARED |= {"trainer.accelerator", "trainer.graph", "trainer.compile", "trainer.tf32"}
LENGTH_FIELDS = frozenset({"trainer.epochs", "trainer.steps_per_epoch", "trainer.evaluate_every"})
Metrics = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Run:
    """One run. A run that has not finished has no scores."""

    path: Path
    benchmark: str
    recipe: str
    label: str
    seed: int
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the recipe, or the settings of a classifier's fit, as they were stored."""
    command: str = ""
    commit: str = ""
    device: str = ""
    torch: str = ""
    version: str = ""
    seconds_per_epoch: float = math.nan
    peak_memory_bytes: int | None = None
    epochs: int | None = None
    parameters: int | None = None
    primal_layers: int | None = None
    objective: Mapping[str, float] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    validation: Metrics = field(default_factory=dict)
    spectrum: Mapping[str, Sequence[float]] = field(default_factory=dict)
    is_folder: bool = False

    def score(self, protocol: str, name: str = "accuracy") -> float | None:
        """A score by its name; accuracies in per cent. None where the run has no finite number."""
        value = self.scores.get(protocol, {}).get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return 100.0 * value if name.endswith("accuracy") else float(value)

    @property
    def task(self) -> str:
        """The data set, or the recipe where the run does not name it."""
        own = self.data.get("set") or (self.config.get("data") or {}).get("name")
        return str(own or self.recipe)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The configuration with the fields that are newer than the run, at their defaults."""
        try:
            return to_plain(_recipe(self.benchmark, self.config)) if self.config else {}
        except RunError:  # fields that this version does not have: compare what is there
            return self.config


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Stat | None:
        """None where there is nothing to average."""
        known = [v for v in values if v is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))

    def show(self, digits: int = 1) -> str:
        form = f",.{digits}f" if digits == 0 else f".{digits}f"
        return f"{self.mean:{form}}" + ("" if self.std is None else f" ± {self.std:{form}}")


@dataclass(frozen=True)
class Difference:
    """Mean of differences that are paired over seeds, and half of its 95 % interval by Student's t."""

    mean: float
    half_interval: float | None
    seeds: int

    @classmethod
    def between(cls, values: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
        """The difference over the common seeds of two mappings from seed to value; None where there are none."""
        stat = Stat.over(values[seed] - others[seed] for seed in sorted(values.keys() & others.keys()))
        if stat is None or stat.std is None:
            return None if stat is None else cls(stat.mean, None, 1)
        from scipy.stats import t

        return cls(stat.mean, float(t.ppf(0.975, stat.seeds - 1)) * stat.std / math.sqrt(stat.seeds), stat.seeds)

    def show(self, digits: int = 1) -> str:
        half = "" if self.half_interval is None else f" ± {self.half_interval:.{digits}f}"
        return f"{round(self.mean, digits) + 0.0:+.{digits}f}{half}"  # no negative zero


def in_full(score: Mapping[str, Any]) -> str:
    """The numbers of a score as text."""
    if "accuracy" in score:
        return f"test accuracy {100 * score['accuracy']:6.2f} %"
    if "bits_per_byte" in score:
        return f"test perplexity {score['perplexity']:.2f}  bits per byte {score['bits_per_byte']:.4f}"
    if "validation_accuracy" in score:
        return f"validation accuracy {100 * score['validation_accuracy']:6.2f} %, no test score"
    if "validation_bits_per_byte" in score:
        return f"validation bits per byte {score['validation_bits_per_byte']:.4f}, no test score"
    if "score" not in score:
        return "no episodes were played: 'primal evaluate RUN' plays them"
    text = f"normalised score {score['score']:6.1f}"
    if "return_mean" in score:
        episodes = f"{score['episodes']} episodes, target {score['target']:.0f}"
        text += f"  return {score['return_mean']:.0f} ± {score['return_std']:.0f}  {episodes}"
    return text


# Reading


def read_summaries(folder: Path) -> list[Run]:
    """All summaries with settings below a folder, in the order of their paths; other JSON files are ignored."""
    runs = []
    for file in sorted(folder.rglob("*.json")) if folder.is_dir() else ():
        content = read_json(file)
        if isinstance(content, dict) and {"scores", "recipe", "label", "config"} <= content.keys():
            runs.append(_summary(content, file))
    return runs


def read_folder(folder: Path) -> Run:
    """A run folder, finished or not."""
    file = folder / "config.yaml"
    if not file.exists():
        raise RunError(f"{folder} is not a run folder: it has no config.yaml")
    about = read_yaml(file)
    check_content(about, CONFIG, file)
    fields = {
        "path": folder,
        "recipe": str(about.get("recipe") or about["benchmark"]),
        **{key: about[key] for key in ("command", "commit", "config") if about.get(key)},
        "metrics": read_metrics(folder / "metrics.csv"),
        "validation": read_metrics(folder / "validation" / "metrics.csv"),
        "spectrum": read_spectrum(folder / "spectrum.csv"),
        "is_folder": True,
    }
    if (file := folder / "summary.json").exists():
        return _summary(read_json(file), file, **fields)
    config = about["config"]
    names = (config.get("model") or {}).get("attention")
    label = "-".join(map(str, names)) if isinstance(names, list) else str(names or "run")
    return Run(benchmark=about["benchmark"], label=label, seed=config.get("seed", 0), **fields)


def _summary(content: Any, file: Path, **fields: Any) -> Run:
    """A run from the content of a summary; `fields` take precedence."""
    check_content(content, SUMMARY, file)
    own = {key: content[key] for key in Run.__dataclass_fields__ if content.get(key) is not None}
    own["recipe"] = content.get("recipe") or content["benchmark"]
    return Run(**{"path": file, **own, **fields})


def read_benchmark(file: Path) -> dict[str, Any]:
    """The report of a benchmark, with the optional fields of its rows."""
    content = read_json(file, BENCHMARK)
    for i, row in enumerate(content["rows"]):
        if row["status"] == measurement.OK and row.get("recompilations") is None:  # rows that count graphs have no time
            check(row, {"seconds": Number(above=0)}, file, f"rows[{i}]")
    return {**content, "rows": [{"label": row["name"], "note": "", "seconds": None, **row} for row in content["rows"]]}


def read_metrics(path: Path) -> dict[str, list[float | None]]:
    """Return the columns of metrics.csv; an empty cell is None. A run without a finished epoch has no file."""
    if not path.exists():
        return {}
    header, rows = read_csv(path)
    if "epoch" not in header:
        raise RunError(f"{path}: the column epoch is missing")
    table: dict[str, list[float | None]] = {name: [] for name in header}
    for line, row in enumerate(rows, start=2):
        for name, cell in zip(header, row, strict=True):
            table[name].append(read_cell(cell, f"{path} line {line}: {one_line(name, 60)}"))
        if not (table["epoch"][-1] or 0.5).is_integer():
            raise RunError(f"{path} line {line}: epoch is not a whole number")
    return table


def read_spectrum(file: Path) -> dict[str, list[float]]:
    """Singular values by layer relative to the largest, from the columns layer, index and value of a CSV file."""
    if not file.exists():
        return {}
    header, lines = read_csv(file)
    layers: dict[str, dict[float, float]] = {}
    for number, cells in enumerate(lines, start=2):
        row = dict(zip(header, cells, strict=True))
        index, value = (read_cell(row.get(name, ""), f"{file} line {number}: {name}") for name in ("index", "value"))
        if index is None or value is None or not 0 <= value < math.inf:
            raise RunError(f"{file} line {number} needs numbers of at least 0 in the columns index and value")
        layers.setdefault(row.get("layer") or "all layers", {})[index] = value
    if not layers:
        raise RunError(f"{file} holds no singular values")
    in_order = {name: [layer[i] for i in sorted(layer)] for name, layer in layers.items()}
    return {name: [value / (values[0] or 1.0) for value in values] for name, values in in_order.items()}


@dataclass
class Collection:
    """Everything that a report is made from."""

    runs: list[Run] = field(default_factory=list)
    benches: list[tuple[Path, Mapping[str, Any]]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def collect(paths: Sequence[Path], *, skip_broken: bool = False) -> Collection:
    """Runs and benchmarks under the paths, each file once.

    Args:
        paths: Run folders, folders of them, or files.
        skip_broken: Record the message of a broken file instead of raising it.
    """
    content = Collection()
    places = {place.resolve(): (place, path) for path in reversed(paths) for place in _places(path)}
    for place, path in sorted(places.values(), key=lambda pair: paths.index(pair[1])):
        try:
            _read_place(place, content, is_argument=place == path)
        except RunError as error:
            if not skip_broken:
                raise
            content.broken.append(str(error))

    def identity(run: Run) -> str:
        facts = (run.recipe, run.label, run.seed, run.scores, run.seconds_per_epoch, run.data)
        return json.dumps(facts, sort_keys=True)

    # A grid stores each summary twice, in the run folder and as a result file.
    in_folders = {identity(run) for run in content.runs if run.is_folder}
    content.runs = [run for run in content.runs if run.is_folder or identity(run) not in in_folders]
    return content


def _places(path: Path) -> list[Path]:
    """The run folders and JSON files under a path, in the order of their names."""
    if not path.exists():
        raise RunError(f"{path} does not exist")
    if path.is_file() or any((path / name).is_file() for name in RUN_FILES):
        return [path]
    places: list[Path] = []
    for folder, inside, files in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if any(name in RUN_FILES for name in files):
            inside.clear()  # folders below belong to this run
            places.append(Path(folder))
        else:
            places += [Path(folder, n) for n in sorted(files) if n.endswith(".json") and not n.startswith(".")]
    if not places:
        raise RunError(f"{path} holds no run: neither config.yaml nor a results file is in it or below it")
    return places


def _read_place(place: Path, content: Collection, *, is_argument: bool) -> None:
    """Read one place into `content`. A foreign JSON file is an error if it was named itself, else it is ignored."""
    if place.is_dir():
        content.runs.append(read_folder(place))
        return
    stored = read_json(place)
    fields = stored if isinstance(stored, dict) else {}
    if "scores" in fields:
        content.runs.append(_summary(stored, place))
    elif fields.get("kind") in ("attention", "generate") and "rows" in fields:
        content.benches.append((place, read_benchmark(place)))
    elif is_argument:
        raise RunError(f"{place} is neither the result of a run nor of primal bench attention or generate")


# Finding the runs of a plan


def _recipe(benchmark: str, config: Mapping[str, Any]) -> Recipe:
    kind = registry.recipe_type(benchmark)
    if kind is None:
        raise RunError(f"benchmark {benchmark!r} is unknown to this version")
    return from_plain(kind, config)


class ResultIndex:
    """The stored runs of a plan by cell and seed. A run belongs to a cell if its settings are the cell's.

    The settings of a training are those of its recipe, with defaults for fields that are newer than the run. A fit of a
    classifier and a timed training step (`trains` is False) have a few settings of their own.
    """

    def __init__(self, plan: Plan, runs: Iterable[Run], *, trains: bool = True) -> None:
        self.plan, self.trains = plan, trains
        self.family = plan.family if trains else plan.place
        recipes = {f"{self.family}/{name}" for name in plan.sets}
        self.runs = [run for run in runs if run.recipe in recipes]
        self._by_key: dict[tuple[str, str, int], Run] = {}
        for run in self.runs:
            try:
                key = (run.recipe, json.dumps(self._run_settings(run), sort_keys=True), run.seed)
            except RunError:  # settings that this version does not have: no cell has them
                continue
            # A run folder also holds summaries of its parts: the one with the most scores is the run's.
            if key not in self._by_key or len(run.scores) > len(self._by_key[key].scores):
                self._by_key[key] = run

    def _run_settings(self, run: Run) -> dict[str, Any]:
        if not self.trains:
            return {"model": run.label, **run.config}
        return self._compared(_recipe(run.benchmark, run.config))

    def _compared(self, recipe: Recipe) -> dict[str, Any]:
        """The settings that identify a training, by dotted name."""
        skipped = NOT_COMPARED | self.plan.ignored_fields
        return {name: value for name, value in flatten(to_plain(recipe.resolved())) if name not in skipped}

    def cell_settings(self, name: str, variant: Variant) -> dict[str, Any]:
        """The settings of the runs of a cell. Classifiers of aeon have no parameters of PrimalClassifier."""
        if self.trains:
            return self._compared(override(registry.get(f"{self.family}/{name}"), self.plan.settings(name, variant)))
        takes_all = variant.model in classifiers.PRIMAL_PARAMETERS
        return {"model": variant.model} | {k: v for k, v in self.plan.changes.items() if takes_all or k == "holdout"}

    def _key(self, name: str, variant: Variant) -> tuple[str, str]:
        return f"{self.family}/{name}", json.dumps(self.cell_settings(name, variant), sort_keys=True)

    def find(self, name: str, variant: Variant) -> list[Run]:
        """The runs of a set and a variant, in the order of the plan's seeds; a refused fit has no scores."""
        key = self._key(name, variant)
        return [run for seed in self.plan.seeds if (run := self._by_key.get((*key, seed)))]

    def missing_jobs(self, runs: Path, results: Path, commit: str | None = None, **fields: Any) -> list[Job | Fit]:
        """Jobs for the cells without a finished run; `fields` are further ones of a `Fit`.

        Seeds vary slowest: after one pass every cell has a number.
        """
        jobs: dict[tuple[str, str, int], Job | Fit] = {}
        keys = {(name, variant.name): self._key(name, variant) for name, variant in self.plan.cells()}
        for seed in self.plan.seeds:
            for name, variant in self.plan.cells():
                key = (*keys[name, variant.name], seed)
                stored = self._by_key.get(key)
                if stored is not None and (not self.trains or self.plan.is_finished(stored.scores)):
                    continue
                job: Job | Fit
                if self.trains:
                    job = self.plan.job(name, variant, seed, runs, results, commit)
                    file = job.result
                else:
                    file = results / self.plan.place / name / f"{variant.model}-seed{seed}.json"
                    settings = self.cell_settings(name, variant)
                    job = Fit(name, settings.pop("model"), seed, settings, file, commit=commit, **fields)
                if file.exists():
                    in_place = next((run for run in self.runs if run.path == file), None)
                    reason = self.differences(in_place, name, variant)[0] if in_place else "does not name its settings"
                    raise RunError(f"{file} {reason}: choose another --results, or move it away")
                jobs.setdefault(key, job)  # several rows may need the same run
        return list(jobs.values())

    def differences(self, run: Run, name: str, variant: Variant) -> list[str]:
        """Why a stored run is not one of a cell, one text per setting."""
        try:
            old, new = self._run_settings(run), self.cell_settings(name, variant)
        except RunError as error:
            return [f"is of another version ({error})"]
        if old == new:  # a finished run has all scores of the protocol
            old, new = ({"protocol": place.get("protocol", "last")} for place in (run.config, self.plan.changes))
        names = [name for name in new | old if old.get(name) != new.get(name)]
        return [f"was run with {name} {old.get(name)}, not {new.get(name)}" for name in names]

    def nearest_difference(self) -> str:
        """The first difference between a stored run and the cell that it is nearest to."""
        run = self.runs[0]
        name = run.recipe.partition("/")[2]
        return min((self.differences(run, name, variant) for variant in self.plan.variants), key=len)[0]
