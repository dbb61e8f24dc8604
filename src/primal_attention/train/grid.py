"""Many runs side by side: a plan of sets × variants × seeds, and its jobs in local worker processes or on Ray.

A finished run is not run again, an interrupted one continues, and a failing one does not stop the others. Each finished
run leaves its summary as one JSON file in the results folder.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Literal

from primal_attention.train import registry
from primal_attention.train.config import override
from primal_attention.utils.errors import DataError, Preempted, RunError
from primal_attention.utils.files import read_json, write_json

PROTOCOL_SCORES = {
    "last": {"last"},
    "validation": {"validation_chosen"},
    "both": {"last", "best_on_test", "validation_chosen"},
}
QUIET = {"trainer.progress": False, "trainer.logger": ("csv",)}


@dataclass(frozen=True)
class Variant:
    """A row of a table: an attention and the options that it changes in the recipe. `name` is used in file names."""

    part: str
    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        options = {name if name == "eta" else f"model.{name}": value for name, value in self.options.items()}
        return {"model.attention": (self.model,), **options}


@dataclass(frozen=True)
class Plan:
    """The runs behind a table: every set with every variant and seed of one recipe family."""

    family: str
    sets: Sequence[str]
    variants: Sequence[Variant]
    seeds: Sequence[int]
    changes: Mapping[str, Any]
    place: str
    """Folder of the runs and results; tables with the same settings share it."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Data folder of each set, for benchmarks with one folder per set."""
    needed_scores: frozenset[str] | None = None
    """Scores of a finished run; None: those of the protocol."""
    ignored_fields: frozenset[str] = frozenset()
    """Further settings in which a result may differ."""

    def cells(self) -> list[tuple[str, Variant]]:
        return [(name, variant) for name in self.sets for variant in self.variants]

    def settings(self, name: str, variant: Variant) -> dict[str, Any]:
        folder = {"data.folder": self.folders[name]} if name in self.folders else {}
        return {**self.changes, **folder, **variant.changes()}

    def is_finished(self, scores: Iterable[str]) -> bool:
        needed = self.needed_scores or PROTOCOL_SCORES[str(self.changes.get("protocol", "last"))]
        return set(needed) <= set(scores)

    def job(self, name: str, variant: Variant, seed: int, runs: Path, results: Path, commit: str | None = None) -> Job:
        path = Path(self.place, name, f"{variant.name}-seed{seed}")
        changes = {**self.settings(name, variant), "seed": seed}
        return Job(f"{self.family}/{name}", changes, runs / path, results / f"{path}.json", commit)


@dataclass(frozen=True)
class Job:
    """One run: a recipe by name, the fields to change, the run folder, the result file and the code's commit."""

    recipe: str
    changes: Mapping[str, Any]
    run: Path
    result: Path
    commit: str | None = None

    @property
    def command(self) -> str:
        """The `primal train` command that trains the same. The data folder is left out: it belongs to a machine."""
        words = ["primal", "train", self.recipe]
        for name, value in self.changes.items():
            *group, field = name.replace("_", "-").split(".")
            if name in ("data.folder", *QUIET):
                continue
            if isinstance(value, bool):
                words.append("--" + ".".join([*group, field if value else f"no-{field}"]))
            else:
                values = value if isinstance(value, (list, tuple)) else [value]
                words += ["--" + ".".join([*group, field]), *map(str, values)]
        return shlex.join(words)


@dataclass(frozen=True)
class Outcome:
    """A finished job: the run's summary or the reason why there is none."""

    job: Job
    summary: Mapping[str, Any] | None = None
    error: str | None = None


def run_job(job: Job) -> Outcome:
    """Train one job, or return its existing result. Errors are returned, not raised, so that other jobs continue."""
    try:
        if job.result.exists():
            return Outcome(job, summary=read_json(job.result, {"scores": {...: dict}}))
        from primal_attention.train import loop

        gc.collect()  # memory of the previous run in this process would count as this one's
        recipe = override(registry.get(job.recipe), {**QUIET, **job.changes})
        summary = loop.train(recipe, job.run, name=job.recipe, resume=True, command=job.command, commit=job.commit)
        write_json(job.result, summary)
        return Outcome(job, summary=summary)
    except (RunError, DataError) as error:
        return Outcome(job, error=str(error))
    except Preempted:  # the worker was asked to end
        raise
    except Exception as error:
        traceback.print_exc()
        return Outcome(job, error=f"{type(error).__name__}: {error}")


def run(jobs: Sequence[Job], workers: int = 1, launcher: Literal["local", "ray"] = "local") -> Iterable[Outcome]:
    """Run jobs in local processes or on a Ray cluster; yield the outcome of each one as it ends."""
    return (_run_on_ray if launcher == "ray" else _run_locally)(jobs, workers)


def _run_locally(jobs: Sequence[Job], workers: int) -> Iterable[Outcome]:
    from primal_attention.train.distributed import handle_signal

    # Fresh processes: CUDA and OpenMP do not survive a fork.
    context, others = get_context("spawn"), set(active_children())
    numbers = context.Queue()
    for i in range(workers):
        numbers.put(i)
    setup: dict[str, Any] = {"initializer": _init_worker, "initargs": (numbers, workers)}

    def stop(*_: object) -> None:
        raise Preempted("asked to stop")

    with handle_signal(signal.SIGTERM, stop), ProcessPoolExecutor(workers, mp_context=context, **setup) as pool:
        with handle_signal(signal.SIGINT, signal.SIG_IGN):  # inherited: Ctrl-C during imports prints no tracebacks
            running = {pool.submit(run_job, job): job for job in jobs}
        try:
            for done in as_completed(running):
                try:
                    yield done.result()
                except BrokenProcessPool:
                    reason = "a worker process died (out of memory?); the same command continues from here"
                    yield Outcome(running[done], error=reason)
        except BaseException:  # Ctrl-C or SIGTERM: runs continue from their checkpoints, so the workers can be killed
            for process in set(active_children()) - others:
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _init_worker(numbers: Any, workers: int) -> None:
    """Set the device of a worker and its share of the cores."""
    number = numbers.get()
    import torch

    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(number % torch.cuda.device_count())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _run_on_ray(jobs: Sequence[Job], workers: int) -> Iterable[Outcome]:
    try:
        import ray
    except ImportError:
        raise RunError("the ray launcher needs ray: pip install 'primal-attention[ray]'") from None
    local: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
    with ray.init(log_to_driver=False, **local):
        gpus = min(1.0, ray.cluster_resources().get("GPU", 0) / workers)
        remote = ray.remote(num_cpus=1, num_gpus=gpus)(_run_in_folder)
        waiting, running = list(reversed(jobs)), dict[Any, Job]()
        while waiting or running:
            while waiting and len(running) < workers:  # a cluster may have room for more than was asked for
                job = waiting.pop()
                running[remote.remote(Path.cwd(), job)] = job
            (done,), _ = ray.wait(list(running))
            job = running.pop(done)
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                yield Outcome(job, error=f"a Ray worker died: {str(error).splitlines()[0]}")
                continue
            if outcome.summary is not None and not job.result.exists():  # the worker has another disk
                write_json(job.result, outcome.summary)
            yield Outcome(job, outcome.summary, outcome.error)


def _run_in_folder(folder: Path, job: Job) -> Outcome:
    """Run a job from the driver's working directory, where the worker's machine has it."""
    if folder.is_dir():
        os.chdir(folder)
    return run_job(job)
