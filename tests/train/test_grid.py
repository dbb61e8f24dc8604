"""Grids: every cell once, side by side in processes or on Ray, failures apart, finished runs kept."""

import os
import re
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import toy

from primal_attention.cli import train as commands
from primal_attention.report.tables import model_variants
from primal_attention.train import grid, registry
from primal_attention.train.config import override
from primal_attention.utils.files import read_json


def jobs(data: Path, place: Path, sets: tuple[str, ...] = ("Toy",)) -> list[grid.Job]:
    changes = {**toy.SMALL, "data.folder": str(data), "trainer.epochs": 1}
    plan = grid.Plan("uea", sets, model_variants(("primal",)), [0], changes, "uea")
    return [plan.job(name, variant, 0, place / "runs", place / "results") for name, variant in plan.cells()]


def test_two_workers_run_a_grid_and_a_failure_stays_alone(toy_folder: Path, tmp_path: Path) -> None:
    todo = jobs(toy_folder, tmp_path, ("Toy", "Gone"))
    outcomes = list(grid.run(todo, workers=2))
    done = {outcome.job.recipe: outcome for outcome in outcomes}
    assert len(outcomes) == len(done) == 2
    assert "timeseriesclassification.com" in str(done["uea/Gone"].error)
    assert [file.name for file in (tmp_path / "results").rglob("*.json")] == ["primal-seed0.json"]
    # A finished job is not run again.
    before = todo[0].result.stat().st_mtime_ns
    assert grid.run_job(todo[0]).summary == done["uea/Toy"].summary
    assert todo[0].result.stat().st_mtime_ns == before


def test_ray_trains_a_job_from_the_working_directory(toy_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Workers are started by Ray, with the modules of this process.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (job,) = jobs(toy_folder, Path())  # a worker finds the run and the result by their relative paths
    (outcome,) = grid.run([job], launcher="ray")
    assert outcome.error is None
    assert outcome.summary["epochs"] == 1
    assert read_json(job.result) == read_json(job.run / "summary.json") == outcome.summary
    assert re.fullmatch("[0-9a-f]{64}", outcome.summary["data"]["sha256"])


def kill_the_first_worker() -> None:
    """As the kernel does when memory runs out."""
    while not active_children():
        time.sleep(0.01)
    active_children()[0].kill()


def test_a_worker_that_dies_is_reported(toy_folder: Path, tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_the_first_worker)
    killer.start()
    (outcome,) = grid.run(jobs(toy_folder, tmp_path))
    killer.join()
    assert "a worker process died" in str(outcome.error)


def test_the_command_in_a_result_trains_the_same(tmp_path: Path) -> None:
    changes = {"model.attention": ("softmax", "primal"), "eta": 0.2, "model.r_scores": False, "protocol": "both"}
    job = grid.Job("uea/Toy", {**changes, "data.folder": tmp_path, "seed": 3}, tmp_path, tmp_path)
    recipe, _, _ = commands.parse_run("uea/Toy", registry.get("uea/Toy"), job.command.split()[3:])
    assert recipe == override(registry.get("uea/Toy"), {**changes, "seed": 3})
    assert str(tmp_path) not in job.command
