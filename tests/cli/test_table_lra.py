"""`primal table lra`, `lra-ablation`, `lra-efficiency`: the paper's numbers, runs in small, and the cost of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from primal_attention.bench import lra as bench_lra
from primal_attention.bench import measurement
from primal_attention.cli import main as cli
from primal_attention.data.lra import listops
from primal_attention.report import paper_lra as paper
from primal_attention.train import grid, lra

SMALL = """
--sets listops --seeds 1 --set model.embed_dim=8 model.ffn_dim=16 model.rank=3 model.landmarks=4 trainer.accelerator=cpu
trainer.steps_per_epoch=2 trainer.batch_size=4 trainer.precision=32-true
""".split()  # noqa: SIM905 (reads as it is typed)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small ListOps, and trainings in this process."""
    shape = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=40)
    listops.write(tmp_path / "data" / "lra" / "listops", train=18, valid=6, test=6, shape=shape)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(grid.LAUNCHERS, "local", lambda jobs, workers: map(grid.run_job, jobs))
    torch.set_num_threads(1)
    return tmp_path


def test_known_cells_and_averages():
    assert paper.ACCURACY["primal+"]["image"] == 43.9
    assert paper.ACCURACY["yoso"]["retrieval"] == 81.2
    assert paper.SECONDS["softmax"]["retrieval"] == 1333.7
    assert paper.MEMORY["primal"]["pathfinder"] == 1.52
    for model, average in paper.AVERAGE_ACCURACY.items():
        assert sum(paper.ACCURACY[model].values()) / 5 == pytest.approx(average, abs=0.051)


def test_the_tables_agree_with_each_other():
    assert {name: (task.steps, task.batch_size) for name, task in lra.TASKS.items()} == paper.TRAINING
    assert paper.DATA_DEPENDENCE[True] == paper.ACCURACY["primal+"]
    for model in ("primal", "primal+"):
        assert paper.R_SCORES[model, True] == paper.ACCURACY[model]


def test_a_table_in_small_and_the_same_training_in_another_length(here: Path, capsys):
    words = ["table", "lra", "--models", "softmax", "primal", *SMALL]
    assert cli.main([*words, "trainer.epochs=2", "watch_test=true"]) == 0
    out = capsys.readouterr().out
    for text in (
        "Paper (validation-chosen)",
        "VALIDATION-CHOSEN",
        "LAST",
        "37.1",
        "37.3",
        "listops 4 × 4",
        "Cases in test",
        "paper 5,000 × 32",
    ):
        assert text in out
    summary = json.loads(Path("results/lra/listops/primal-seed0.json").read_text())
    assert set(summary["scores"]) == {"last", "best_on_test", "validation_chosen"}
    assert cli.main([*words, "--no-run"]) == 2
    assert cli.main([*words, "--no-run", "--any-length"]) == 0
    assert "trainings of any length" in capsys.readouterr().out


def test_the_ablation_in_small(here: Path, capsys):
    assert cli.main(["table", "lra-ablation", *SMALL, "trainer.epochs=1"]) == 0
    out = capsys.readouterr().out
    for text in ("Data-dependent projection weights", "r-scores", "37.0", "36.8", "37.1"):
        assert text in out
    assert len(list(Path("results/lra/listops").glob("*.json"))) == 5, "two parts share a run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lra-ablation", "--parts", "eta-s"], "--parts eta-s is not published for lra-ablation"),
        (["lra", "--any-length"], "add --no-run"),
        (["lra", "--sets", "text"], "no train split"),
        (["lra-efficiency", "--models", "nothing"], "--models nothing is unknown"),
        (["lra-efficiency", "--no-run"], "has no result of this table"),
    ],
)
def test_what_the_user_can_mend(here: Path, capsys, words: list[str], said: str):
    assert cli.main(["table", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_step_is_measured_and_shown(here: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(bench_lra.TASKS, "image", bench_lra.Task(32, 20, 3))
    usual = measurement.time_step
    monkeypatch.setattr(measurement, "time_step", lambda *a, **k: usual(*a, **k, seconds=0.01))
    words = ["--tasks", "image", "--models", "softmax", "primal", "published", "--batch-size", "2", "--device", "cpu"]
    assert cli.main(["bench", "lra", *words]) == 0
    assert cli.main(["table", "lra-efficiency", "--no-run", "--csv", "t.csv"]) == 0
    out = capsys.readouterr().out
    assert "PrimalFormer, the published way" in out
    assert "142.9" in out
    assert Path("t.csv").read_text().count("\n") == 4
