"""Grids: every cell once, side by side, failures apart, finished runs kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import toy

from primal_attention.train import grid
from primal_attention.train.config import to_plain
from primal_attention.utils.errors import RunError

SMALL = ("model.embed_dim", "model.num_heads", "model.layers", "model.ffn_dim", "model.rank", "model.landmarks")


def small(folder: Path, **fields) -> dict:
    plain = to_plain(toy.recipe(folder))
    changes = {name: plain["model"][name.split(".")[1]] for name in SMALL}
    return {**changes, "data.folder": str(folder), "trainer.epochs": 1, "trainer.accelerator": "cpu", **fields}


def test_jobs_are_the_product_with_seeds_slowest(tmp_path: Path):
    jobs = grid.Grid("uea", ["A", "B"], ["softmax", "primal+"], range(2), tmp_path, tmp_path).jobs()
    assert len(jobs) == 8
    assert [job.changes["seed"] for job in jobs] == [0] * 4 + [1] * 4
    assert len({job.run for job in jobs}) == len({job.result for job in jobs}) == 8


def test_two_workers_run_a_grid_and_a_failure_stays_alone(toy_folder: Path, tmp_path: Path):
    cells = grid.Grid(
        "uea", ["Toy", "Gone"], ["softmax", "primal"], [0], tmp_path / "runs", tmp_path / "results", small(toy_folder)
    )
    seen: list[grid.Outcome] = []
    outcomes = grid.run(cells.jobs(), workers=2, report=seen.append)
    assert len(outcomes) == len(seen) == 4
    fine = [o for o in outcomes if o.summary is not None]
    assert {o.job.recipe for o in fine} == {"uea/Toy"}
    assert all("timeseriesclassification.com" in str(o.error) for o in outcomes if o.summary is None)
    results = sorted(tmp_path.joinpath("results").rglob("*.json"))
    assert [r.name for r in results] == ["primal-seed0.json", "softmax-seed0.json"]
    assert json.loads(results[0].read_text())["label"] == "primal"


def test_a_finished_cell_is_not_run_again(toy_folder: Path, tmp_path: Path):
    cell = grid.Grid("uea", ["Toy"], ["primal"], [0], tmp_path / "runs", tmp_path / "results", small(toy_folder))
    (job,) = cell.jobs()
    first = grid.run_job(job)
    assert first.error is None
    before = job.result.stat().st_mtime_ns
    assert grid.run_job(job).summary == first.summary
    assert job.result.stat().st_mtime_ns == before


def test_the_module_runs_by_itself_and_says_what_failed(toy_folder: Path, tmp_path: Path, capsys):
    words = ["--sets", "Gone", "--models", "primal", "--seeds", "1", "--data", str(toy_folder)]
    words += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), "--set", "trainer.epochs=1"]
    assert grid.main(words) == 1
    assert "[1/1] uea/Gone primal-seed0: failed" in capsys.readouterr().out


def test_values_are_read_as_what_they_look_like():
    assert [grid.parse_value(t) for t in ("3", "0.5", "true", "none", "both")] == [3, 0.5, True, None, "both"]


def test_bad_workers_and_launchers_are_one_line(tmp_path: Path):
    with pytest.raises(RunError, match="workers must be at least 1"):
        grid.run([], workers=0)
    with pytest.raises(RunError, match="launcher must be one of local, ray"):
        grid.run([], launcher="slurm")


def test_a_worker_that_dies_is_told_and_ends_the_grid(toy_folder: Path, tmp_path: Path):
    cells = grid.Grid("uea", ["Toy"], ["primal"], [0], tmp_path / "runs", tmp_path / "results", small(toy_folder))
    (job,) = cells.jobs()
    (outcome,) = grid.run([Deadly(job.recipe, job.changes, job.run, job.result)])
    assert outcome.job.recipe == "uea/Toy"
    assert "a worker process died" in str(outcome.error)


class Deadly(grid.Job):
    """A job that ends its process, as the kernel does when memory runs out."""

    @property
    def command(self) -> str:
        os._exit(9)


def test_only_series_are_looked_for_in_the_archive_of_series(toy_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRIMAL_UEA", str(toy_folder))

    def folder(recipe: str, **changes) -> object:
        return grid._absolute(grid.Job(recipe, changes, Path("run"), Path("result"))).changes.get("data.folder")

    assert folder("uea/Toy") == toy_folder.resolve()
    assert folder("uea/JapaneseVowels") is None
    assert folder("lra/listops") is None
    assert folder("lra/listops", **{"data.folder": "nope"}) == Path("nope").resolve()
