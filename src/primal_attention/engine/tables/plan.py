"""What the tables are made of: which runs each needs, which of them are done, and the jobs of those that are not.

A result belongs to a cell when its settings are the cell's, wherever it lies and whichever table asked for it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.engine import folder as run_folder
from primal_attention.engine import registry
from primal_attention.engine.config import from_plain, override, to_plain
from primal_attention.engine.errors import RunError
from primal_attention.engine.tables.grid import Job
from primal_attention.report import paper_tables as paper

if TYPE_CHECKING:
    from primal_attention.report.results import Result

# The protocol decides which scores a result has, which is asked for separately; the others say nothing about a number.
NOT_COMPARED = {*run_folder.FREE, "protocol", "watch_test", "seed"}
NOT_COMPARED |= {"trainer.accelerator", "trainer.graph", "trainer.compile", "trainer.tf32"}  # how a device computes
NOT_COMPARED |= {"trainer.checkpoint_every", "trainer.checkpoint_steps"}  # what is kept on the way
# How long a training was and how often it was measured: left out of the comparison only where that is asked for.
LENGTH = frozenset({"trainer.epochs", "trainer.steps_per_epoch", "trainer.evaluate_every"})
SCORES = {
    "last": {"last"},
    "validation": {"validation_chosen"},
    "both": {"last", "best_on_test", "validation_chosen"},
}
ABLATIONS = ("eta-s", "data-dependence", "r-scores")


@dataclass(frozen=True)
class Variant:
    """A row of a table on every set: a model and what an ablation changes in it. `name` is used for files."""

    part: str
    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        fields = {option: option if option == "eta" else f"model.{option}" for option in self.options}
        return {"model.attention": (self.model,), **{fields[k]: v for k, v in self.options.items()}}


@dataclass(frozen=True)
class Plan:
    """The grid behind a table."""

    family: str
    sets: Sequence[str]
    variants: Sequence[Variant]
    seeds: Sequence[int]
    changes: Mapping[str, Any]
    place: str
    """Folder of the table's runs and results; tables with the same settings share it."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Where a set's files lie, for benchmarks that have a folder for each."""
    needs: frozenset[str] | None = None
    """Scores that a finished run has; None: those of its protocol."""
    free: frozenset[str] = frozenset()
    """Further settings in which a result may differ."""

    def cells(self) -> list[tuple[str, Variant]]:
        return [(name, variant) for name in self.sets for variant in self.variants]

    def settings(self, name: str, variant: Variant) -> dict[str, Any]:
        where = {"data.folder": self.folders[name]} if name in self.folders else {}
        return {**self.changes, **where, **variant.changes()}

    def key(self, name: str, variant: Variant) -> str:
        recipe = override(registry.get(f"{self.family}/{name}"), self.settings(name, variant))
        return settings_key(recipe.benchmark, to_plain(recipe), self.free)

    def needed_scores(self) -> frozenset[str] | set[str]:
        return self.needs or SCORES[str(self.changes.get("protocol", "last"))]

    def job(self, name: str, variant: Variant, seed: int, runs: Path, results: Path, commit: str | None) -> Job:
        where = Path(self.place, name, f"{variant.name}-seed{seed}")
        changes = {**self.settings(name, variant), "seed": seed}
        result = results / where.with_name(f"{where.name}.json")
        return Job(f"{self.family}/{name}", changes, runs / where, result, commit)


def model_variants(models: Iterable[str]) -> list[Variant]:
    return [Variant("models", model, model) for model in models]


def ablation_variants(parts: Iterable[str]) -> list[Variant]:
    """The paper's grids over η and s (PrimalFormer), with W_e and W_r alone (Primal.+), and without r-scores (both)."""
    variants: list[Variant] = []
    for part in parts:
        if part == "eta-s":
            variants += [
                Variant(part, f"primal-s{s}-eta{eta:g}", "primal", {"rank": s, "eta": eta})
                for s in paper.RANKS
                for eta in paper.ETAS
            ]
        elif part == "data-dependence":
            variants += [
                Variant(part, f"primal+-{word}", "primal+", {"data_dependent": dependent})
                for dependent, word in ((False, "independent"), (True, "dependent"))
            ]
        else:
            variants += [
                Variant(part, f"{model}-{word}-r", model, {"r_scores": scores})
                for model in ("primal", "primal+")
                for scores, word in ((False, "without"), (True, "with"))
            ]
    return variants


def settings_key(benchmark: str, config: Mapping[str, Any], free: frozenset[str] = frozenset()) -> str:
    """A string that two runs share if and only if their settings are the same but for seed, protocol and `free`."""
    found = compared(benchmark, config)
    return json.dumps({name: value for name, value in found.items() if name not in free}, sort_keys=True)


def compared(benchmark: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that count, by dotted name, with fields that an older result lacks at their defaults."""
    kind = registry.RECIPES.get(benchmark)
    if kind is None:
        raise RunError(f"benchmark {benchmark!r} is unknown to this version")
    plain = to_plain(from_plain(kind, config).resolved())
    return {name: value for name, value in _flat(plain) if name not in NOT_COMPARED}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Shelf:
    """Results by recipe, settings and seed."""

    def __init__(self, results: Iterable[Result], free: frozenset[str] = frozenset()) -> None:
        self.results = list(results)
        self._found: dict[tuple[str, str, int], Result] = {}
        for result in self.results:
            try:
                key = settings_key(result.benchmark, result.config, free)
            except RunError:  # settings that this version does not have: no cell asks for them
                continue
            place = (result.recipe, key, result.seed)
            # The parts of a run folder are runs too: the one with the most scores is the whole.
            if place not in self._found or len(result.scores) > len(self._found[place].scores):
                self._found[place] = result

    def get(self, recipe: str, key: str, seed: int) -> Result | None:
        return self._found.get((recipe, key, seed))


def find(plan: Plan, shelf: Shelf) -> dict[tuple[str, str], list[Result]]:
    """The results of each cell, by set and the variant's name."""
    found = {}
    for name, variant in plan.cells():
        key = plan.key(name, variant)
        results = (shelf.get(f"{plan.family}/{name}", key, seed) for seed in plan.seeds)
        found[name, variant.name] = [r for r in results if r is not None]
    return found


def missing(plan: Plan, shelf: Shelf, runs: Path, results: Path, commit: str | None = None) -> list[Job]:
    """The jobs that are not done, seeds slowest: after the first pass every cell has a number.

    A file in the place of a job's result that belongs to other settings is an error: it would be taken for this one.
    """
    needed = plan.needed_scores()
    jobs: dict[tuple[str, str, int], Job] = {}
    keys = {(name, variant.name): plan.key(name, variant) for name, variant in plan.cells()}
    for seed in plan.seeds:
        for name, variant in plan.cells():
            recipe, key = f"{plan.family}/{name}", keys[name, variant.name]
            done = shelf.get(recipe, key, seed)
            if done is not None and needed <= set(done.scores):
                continue
            job = plan.job(name, variant, seed, runs, results, commit)
            if job.result.exists():
                raise RunError(f"{job.result} {why_not(job, shelf)}: choose another --results, or move it away")
            jobs.setdefault((recipe, key, seed), job)  # two parts may ask for the same run
    return list(jobs.values())


def why_not(job: Job, shelf: Shelf) -> str:
    """What keeps the result in a job's place from being the job's."""
    there = next((r for r in shelf.results if r.file == job.result), None)
    if there is None:
        return "says nothing about its settings"
    recipe = override(registry.get(job.recipe), job.changes)
    try:
        old = compared(there.benchmark, there.config)
    except RunError as error:
        return f"is of another version ({error})"
    new = compared(recipe.benchmark, to_plain(recipe))
    for name in new:
        if old.get(name) != new[name]:
            return f"was run with {name} {old.get(name)}, not {new[name]}"
    return f"was run with protocol {there.config.get('protocol')}, not {job.changes.get('protocol', 'last')}"
