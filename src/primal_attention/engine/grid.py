"""Many runs side by side: models × sets × seeds, in worker processes that share the local devices.

    python -m primal_attention.engine.grid --recipe uea --sets Handwriting NATOPS --models softmax primal primal+ \
        --seeds 5 --workers 8 --data data/uea --runs runs/uea --results results/uea --set protocol=both

A run that has finished is not run again, one that was killed goes on, and one that fails does not stop the others. Each
finished run leaves a small JSON file in the results folder, which is what tables are made from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from primal_attention.data.errors import DataError
from primal_attention.engine.errors import RunError


@dataclass(frozen=True)
class Job:
    """One run of a grid: a recipe by name, the fields to change, and where run and result go."""

    recipe: str
    changes: Mapping[str, Any]
    run: Path
    result: Path


@dataclass(frozen=True)
class Outcome:
    job: Job
    summary: Mapping[str, Any] | None = None
    error: str | None = None


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

    def jobs(self) -> list[Job]:
        """Seeds vary slowest: after the first pass every cell of the table has a number."""
        return [
            Job(
                f"{self.family}/{name}",
                {**self.changes, "model.attention": (model,), "seed": seed},
                self.runs / self.family / name / f"{model}-seed{seed}",
                self.results / self.family / name / f"{model}-seed{seed}.json",
            )
            for seed in self.seeds
            for name in self.sets
            for model in self.models
        ]


def run_job(job: Job) -> Outcome:
    """Train one job, or take its result if it is there. Errors are told, not raised: the others go on."""
    if job.result.exists():
        return Outcome(job, summary=json.loads(job.result.read_text()))
    from primal_attention.engine import registry, runner
    from primal_attention.engine.config import override
    from primal_attention.engine.files import write_json

    quiet = {"trainer.progress": False, "trainer.tensorboard": False}
    try:
        recipe = override(registry.get(job.recipe), {**quiet, **job.changes})
        summary = runner.train(recipe, job.run, name=job.recipe, resume=True)
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
    context = get_context("spawn")
    numbers = context.Queue()
    for i in range(workers):
        numbers.put(i)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_settle, initargs=(numbers, workers)) as pool:
        for done in as_completed([pool.submit(run_job, job) for job in jobs]):
            yield done.result()


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
        raise RunError("the ray launcher needs ray: pip install ray") from None
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(num_cpus=workers if "RAY_ADDRESS" not in os.environ else None, log_to_driver=False)
    remote = ray.remote(num_cpus=1, num_gpus=_gpu_share(ray, workers))(run_job)
    waiting = [remote.remote(job) for job in jobs]
    while waiting:
        done, waiting = ray.wait(waiting)
        yield from ray.get(done)
    if started_here:
        ray.shutdown()


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
    parser = argparse.ArgumentParser(prog="python -m primal_attention.engine.grid", description=__doc__)
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
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    found = parser.parse_args(args)
    changes = {name: parse_value(value) for name, _, value in (item.partition("=") for item in found.set)}
    if found.data is not None:
        changes["data.folder"] = found.data
    grid = Grid(found.recipe, found.sets, found.models, range(found.seeds), found.runs, found.results, changes)
    jobs = grid.jobs()
    ended = 0

    def report(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        if outcome.summary is None:
            said = f"failed: {outcome.error}"
        else:
            scores = outcome.summary["scores"]
            said = "  ".join(f"{name} {100 * score['accuracy']:.2f}" for name, score in scores.items())
        print(f"[{ended}/{len(jobs)}] {outcome.job.recipe} {outcome.job.run.name}: {said}", flush=True)

    try:
        outcomes = run(jobs, workers=found.workers, launcher=found.launcher, report=report)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(o.summary is not None for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
