"""What the tables are made of: which runs each needs, which of them are done, and the jobs of those that are not.

A result belongs to a cell when its settings are the cell's, wherever it lies and whichever table asked for it first.

Many runs side by side: models × sets × seeds, in worker processes that share the local devices.

    python -m primal_attention.train.grid --recipe uea --sets Handwriting NATOPS \\
        --models softmax primal primal+ --seeds 5 --workers 8 \\
        --data data/uea --runs runs/uea --results results/uea --set protocol=both

A run that has finished is not run again, one that was killed goes on, and one that fails does not stop the others. Each
finished run leaves a small JSON file in the results folder, which is what tables are made from.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.data.uea import available, default_folder
from primal_attention.report import paper_tables as paper
from primal_attention.report.headline import headline
from primal_attention.train import checkpoint, registry
from primal_attention.train.config import from_plain, override, to_plain
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import read_json, write_json

if TYPE_CHECKING:
    from primal_attention.report.results import Result


# The protocol decides which scores a result has, which is asked for separately; the others say nothing about a number.
NOT_COMPARED = {*checkpoint.FREE, "protocol", "watch_test", "seed"}
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


@dataclass(frozen=True)
class Job:
    """One run of a grid: a recipe by name, the fields to change, where run and result go, the code's commit."""

    recipe: str
    changes: Mapping[str, Any]
    run: Path
    result: Path
    commit: str | None = None

    @property
    def command(self) -> str:
        """What trains the same by hand; where the data lies is left out, for that belongs to a machine."""
        words = ["primal", "train", self.recipe]
        for name, value in self.changes.items():
            if name not in ("data.folder", *QUIET):
                words += flag(name, value)
        return shlex.join(words)


@dataclass(frozen=True)
class Outcome:
    job: Job
    summary: Mapping[str, Any] | None = None
    error: str | None = None


QUIET = {"trainer.progress": False, "trainer.logger": ("csv",)}


def flag(name: str, value: Any) -> list[str]:
    """A change of a recipe's field as the words of `primal train`."""
    *path, last = name.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*path, last if value else f"no-{last}"])]
    values = value if isinstance(value, (list, tuple)) else [value]
    return ["--" + ".".join([*path, last]), *map(str, values)]


@dataclass(frozen=True)
class Grid:
    """The product of sets, models and seeds of one recipe family."""

    family: str
    sets: Sequence[str]
    models: Sequence[str]
    seeds: Sequence[int]
    runs: Path
    results: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None

    def jobs(self) -> list[Job]:
        """Seeds vary slowest: after the first pass every cell of the table has a number."""
        return [
            Job(
                f"{self.family}/{name}",
                {**self.changes, "model.attention": (model,), "seed": seed},
                self.runs / self.family / name / f"{model}-seed{seed}",
                self.results / self.family / name / f"{model}-seed{seed}.json",
                self.commit,
            )
            for seed in self.seeds
            for name in self.sets
            for model in self.models
        ]


@functools.cache
def _engine() -> tuple[Any, Any]:
    """Registry and loop. Their imports make half a million objects, which are there to stay: the garbage collector
    would look through all of them several times meanwhile, and again in every run."""
    gc.disable()
    try:
        from primal_attention.train import loop, registry
    finally:
        gc.freeze()
        gc.enable()
    return registry, loop


def run_job(job: Job) -> Outcome:
    """Train one job, or take its result if it is there. Errors are told, not raised: the others go on."""
    if job.result.exists():
        try:
            return Outcome(job, summary=read_json(job.result, {"scores": {...: dict}}))
        except RunError as error:
            return Outcome(job, error=str(error))
    registry, loop = _engine()
    from primal_attention.train.config import override

    gc.collect()  # what the last run of this process left behind would count as this one's memory
    try:
        recipe = override(registry.get(job.recipe), {**QUIET, **job.changes})
        summary = loop.train(recipe, job.run, name=job.recipe, resume=True, command=job.command, commit=job.commit)
        write_json(job.result, summary)
        return Outcome(job, summary=summary)
    except (RunError, DataError) as error:
        return Outcome(job, error=str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome(job, error=f"{type(error).__name__}: {error}")


def run(
    jobs: Iterable[Job],
    *,
    workers: int = 1,
    launcher: str = "local",
    report: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run the jobs on local processes or on a Ray cluster, calling `report` as each one ends."""
    jobs = list(jobs)
    if workers < 1:
        raise RunError(f"workers must be at least 1 (got {workers})")
    if launcher not in LAUNCHERS:
        raise RunError(f"launcher must be one of {', '.join(LAUNCHERS)} (got {launcher!r})")
    outcomes = []
    for outcome in LAUNCHERS[launcher](jobs, workers):
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def _local(jobs: Sequence[Job], workers: int) -> Iterable[Outcome]:
    # Fresh processes: CUDA and OpenMP do not survive a fork.
    context, others = get_context("spawn"), set(active_children())
    numbers = context.Queue()
    for i in range(workers):
        numbers.put(i)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_settle, initargs=(numbers, workers)) as pool:
        with _ignoring_interrupts():  # which new processes inherit: while they import, Ctrl-C prints no tracebacks
            running = {pool.submit(run_job, job): job for job in jobs}
        try:
            for done in as_completed(running):
                try:
                    yield done.result()
                except BrokenProcessPool:
                    died = "a worker process died (out of memory?); the same command goes on from here"
                    yield Outcome(running[done], error=died)
        except BaseException:  # Ctrl-C: runs continue from their checkpoints, so nothing needs to be waited for
            for process in set(active_children()) - others:
                process.kill()
            raise
        finally:  # do not start what is still waiting
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _settle(numbers: Any, workers: int) -> None:
    """Give a worker its device and its share of the cores."""
    number = numbers.get()
    import torch

    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(number % torch.cuda.device_count())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _ray(jobs: Sequence[Job], workers: int) -> Iterable[Outcome]:
    try:
        import ray
    except ImportError:
        raise RunError("the ray launcher needs ray: pip install 'primal-attention[ray]'") from None
    started_here = not ray.is_initialized()
    if started_here:
        cluster = "RAY_ADDRESS" in os.environ
        ray.init(
            num_cpus=None if cluster else workers, log_to_driver=False, include_dashboard=None if cluster else False
        )
    try:
        remote = ray.remote(num_cpus=1, num_gpus=_gpu_share(ray, workers))(run_job)
        waiting = list(reversed(jobs))
        running: dict[Any, Job] = {}
        while waiting or running:
            # A cluster may have room for more than was asked for.
            while waiting and len(running) < workers:
                job = waiting.pop()
                running[remote.remote(_absolute(job))] = job
            (done,), _ = ray.wait(list(running))
            job = running.pop(done)
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                yield Outcome(job, error=f"a Ray worker died: {str(error).splitlines()[0]}")
                continue
            if outcome.summary is not None and not job.result.exists():  # the worker's disk is another one
                write_json(job.result, outcome.summary)
            yield Outcome(job, outcome.summary, outcome.error)
    finally:
        if started_here:
            ray.shutdown()


def _absolute(job: Job) -> Job:
    """Ray's workers have a working directory of their own."""
    changes = dict(job.changes)
    family, _, name = job.recipe.partition("/")
    folder = changes.get("data.folder")
    if folder is None and family.startswith("uea") and available(name, default_folder()):
        folder = default_folder()
    if folder is not None:
        changes["data.folder"] = Path(folder).resolve()
    return replace(job, changes=changes, run=job.run.resolve(), result=job.result.resolve())


def _gpu_share(ray: Any, workers: int) -> float:
    """Part of a GPU that each worker takes, so that `workers` of them fit; 0 on a cluster without one."""
    return min(1.0, ray.cluster_resources().get("GPU", 0) / workers)


LAUNCHERS: dict[str, Callable[[Sequence[Job], int], Iterable[Outcome]]] = {"local": _local, "ray": _ray}


def parse_value(text: str) -> Any:
    """A value from the command line: a number, true, false, none, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(args: Sequence[str] | None = None) -> int:
    """The grid without tyro, for machines that have little installed."""
    parser = argparse.ArgumentParser(prog="python -m primal_attention.train.grid", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--recipe", default="uea", help="family of recipes: uea or uea-modern")
    parser.add_argument("--sets", nargs="+", required=True)
    parser.add_argument("--models", nargs="+", default=["softmax", "primal", "primal+"])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 … n−1")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--launcher", default="local", choices=list(LAUNCHERS))
    parser.add_argument("--data", type=Path, default=None, help="folder of the archive")
    parser.add_argument("--runs", type=Path, default=Path("runs/grid"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--commit", help="of the code, where git cannot say it")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    found = parser.parse_args(args)
    changes = {name: parse_value(value) for name, _, value in (item.partition("=") for item in found.set)}
    if found.data is not None:
        changes["data.folder"] = found.data
    seeds = range(found.seeds)
    grid = Grid(found.recipe, found.sets, found.models, seeds, found.runs, found.results, changes, found.commit)
    jobs = grid.jobs()
    ended = 0

    def report(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        if outcome.summary is None:
            said = f"failed: {outcome.error}"
        else:
            said = "  ".join(f"{name} {headline(score)}" for name, score in outcome.summary["scores"].items())
        print(f"[{ended}/{len(jobs)}] {outcome.job.recipe} {outcome.job.run.name}: {said}", flush=True)

    try:
        outcomes = run(jobs, workers=found.workers, launcher=found.launcher, report=report)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(o.summary is not None for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
