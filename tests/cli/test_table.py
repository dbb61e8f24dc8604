"""`primal table`: runs what is missing, shows stored results, and reports bad input in one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import test_lm
import toy

from primal_attention.data.lra import listops
from primal_attention.report import tables
from primal_attention.report.results import ResultIndex
from primal_attention.train import grid

SIZES = "model.embed_dim=8 model.ffn_dim=16 model.rank=3 model.landmarks=4 trainer.accelerator=cpu"
SMALL = ["--set", *SIZES.split(), "model.num_heads=2"]
BRIEF = [*SMALL, "trainer.epochs=1", "trainer.batch_size=64"]
TOY = ["--sets", "Toy", "--seeds", "1"]
texts = test_lm.folder


class Launched(list):
    """Jobs that were started, run in this process; the grid's own tests start others."""

    def __call__(self, jobs: Sequence[grid.Job], workers: int) -> Iterable[grid.Outcome]:
        self.extend(jobs)
        return map(grid.run_job, jobs)

    def names(self) -> list[str]:
        names = [job.run.name for job in self]
        self.clear()
        return names


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """An empty working directory with the toy set in its data folder."""
    toy.folder(tmp_path / "data" / "uea")
    monkeypatch.chdir(tmp_path)
    started = Launched()
    monkeypatch.setitem(grid.LAUNCHERS, "local", started)
    return started


def test_only_missing_runs_are_started(launched: Launched, primal, tmp_path: Path) -> None:
    words = ["uea", "--sets", "Toy", "--models", "softmax", "primal", "--seeds", "1", *BRIEF]
    code, out, _ = primal("table", *words, "--markdown", "out/t.md", "--csv", "out/t.csv")
    assert code == 0
    assert launched.names() == ["softmax-seed0", "primal-seed0"]
    for text in ("BEST-ON-TEST", "LAST", "VALIDATION-CHOSEN", "trainer.epochs 1"):
        assert text in out
    assert "| Toy | Transformer (softmax) | – |" in Path("out/t.md").read_text()
    records = list(csv.DictReader(Path("out/t.csv").read_text().splitlines()))
    summary = json.loads(Path("results/uea/Toy/primal-seed0.json").read_text())
    assert float(records[1]["last_mean"]) == pytest.approx(100 * summary["scores"]["last"]["accuracy"])
    assert summary["commit"]
    assert str(tmp_path) not in json.dumps(summary)

    words[words.index("1")] = "2"
    assert primal("table", *words)[0] == 0
    assert launched.names() == ["softmax-seed1", "primal-seed1"]
    code, again, _ = primal("table", *words, "--no-run", "--results", "runs")  # run folders serve as results
    assert code == 0
    assert "--no-run" not in again
    # The ablation shares runs with the main table.
    code, out, _ = primal("table", "uea-ablation", "--parts", "data-dependence", "r-scores", *TOY, *BRIEF)
    assert code == 0
    names = ["primal+-independent", "primal+-dependent", "primal-without-r", "primal+-without-r"]
    assert launched.names() == [f"{name}-seed0" for name in names]
    assert "Data-dependent" in out


def test_results_of_other_settings_are_neither_shown_nor_overwritten(launched: Launched, primal) -> None:
    words = ["uea", *TOY, "--models", "softmax"]
    assert primal("table", *words, *BRIEF)[0] == 0
    code, _, err = primal("table", *words, *SMALL, "trainer.epochs=2", "trainer.batch_size=64")
    assert code == 2
    assert "was run with trainer.epochs 1, not 2: choose another --results" in err
    code, _, err = primal("table", *words, *SMALL, "--no-run")
    assert code == 2
    assert "no result of this table (1 with other settings)" in err


def test_a_failed_run_leaves_the_others(launched: Launched, primal, monkeypatch) -> None:
    def half(jobs: Sequence[grid.Job], workers: int) -> Iterable[grid.Outcome]:
        return [grid.run_job(jobs[0]), grid.Outcome(jobs[1], error="the loss is not finite")]

    monkeypatch.setitem(grid.LAUNCHERS, "local", half)
    words = ["uea-efficiency", *TOY, "--models", "softmax", "primal", *BRIEF]
    code, out, err = primal("table", *words)
    assert code == 2
    assert "1.00×" in out
    assert "1 run failed, the first was uea/Toy primal-seed0: the loss is not finite" in err
    assert Path("results/uea-efficiency/Toy/softmax-seed0.json").exists()


def test_sets_without_data_are_left_out_and_named(launched: Launched, primal, monkeypatch) -> None:
    monkeypatch.setattr("primal_attention.data.uea.INSIDE_AEON", ())
    for part in ("TRAIN", "TEST"):
        Path(f"data/uea/Toy_{part}.npz").rename(f"data/uea/Handwriting_{part}.npz")
    code, out, err = primal("table", "uea", "--models", "softmax", "--seeds", "1", *BRIEF)
    assert code == 0
    assert "no data, left out: EthanolConcentration" in err
    assert "Handwriting" in out
    assert "PEMS-SF" not in out
    Path("data/uea").rename("data/elsewhere")  # stored results are shown without the data
    code, out, _ = primal("table", "uea", "--models", "softmax", "--seeds", "1", "--sets", "Handwriting", *BRIEF)
    assert code == 0
    assert "Handwriting" in out


def test_long_range_arena_and_trainings_of_another_length(launched: Launched, primal) -> None:
    shape = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=40)
    listops.write(Path("data/lra/listops"), train=18, valid=6, test=6, shape=shape)
    lra = ["--sets", "listops", "--seeds", "1", "--set", *SIZES.split(), "trainer.steps_per_epoch=2"]
    lra += ["trainer.batch_size=4", "trainer.precision=32-true"]
    code, out, _ = primal("table", "lra", "--models", "primal", *lra, "trainer.epochs=2", "watch_test=true")
    assert code == 0
    for text in ("Paper (validation-chosen)", "37.3", "4 steps × 4 samples", "paper 5,000 × 32", "Samples in the test"):
        assert text in out
    assert set(json.loads(Path("results/lra/listops/primal-seed0.json").read_text())["scores"]) == set(tables.PROTOCOLS)
    assert primal("table", "lra", "--models", "primal", *lra, "--no-run")[0] == 2
    code, out, _ = primal("table", "lra", "--models", "primal", *lra, "--no-run", "--any-length")
    assert code == 0
    assert "trainings of any length" in out
    code, out, _ = primal(
        "table", "lra-ablation", "--parts", "r-scores", *lra, "trainer.epochs=1", "--results", "other"
    )
    assert code == 0
    assert len(list(Path("other/lra/listops").glob("*.json"))) == 4
    for text in ("36.8", "37.1", "37.3"):
        assert text in out


def test_language_models_are_compared_with_softmax(launched: Launched, texts: Path, primal) -> None:
    skipped = {"data.folder", "seed", "model.attention", *grid.QUIET}
    settings = [f"{name}={value}" for name, value in test_lm.SMALL.items() if name not in skipped]
    words = ["lm", "--models", "softmax", "primal-mean", "--seeds", "1", "--data", str(texts), "--set", *settings]
    code, out, _ = primal("table", *words)
    assert code == 0
    for part in ("softmax", "primal-mean", "Runs: 2"):
        assert part in out


def test_the_grid_of_eta_and_s_is_the_papers() -> None:
    variants = tables.ablation_variants(["eta-s"])
    assert variants[5].changes() == {"model.attention": ("primal",), "model.rank": 30, "eta": 0.1}
    plan = grid.Plan("uea", ["Handwriting"], variants, range(2), {"protocol": "both"}, "uea")
    index = ResultIndex(plan, [])
    assert len(index.missing_jobs(Path("runs"), Path("results"))) == 24
    best = next(v for v in variants if v.options == {"rank": 30, "eta": 0.2})
    (default,) = tables.model_variants(["primal"])
    assert index.cell_key("Handwriting", best) == index.cell_key("Handwriting", default)


WRONG = {
    "uae": "did you mean 'uea'?",
    "": "required: NAME",
    "uea --no-run --seeds 2": "run 'primal table uea --seeds 2' first",
    "uea --models primel": "did you mean 'primal'?",
    "lm --models sofmax --no-run": "did you mean 'softmax'?",
    "uea --sets Tooy": "did you mean Toy?",
    "uea-ablation --parts eta": "invalid choice: 'eta'",
    "lra-ablation --parts eta-s": "no part of lra-ablation is called 'eta-s'",
    "uea --sets Toy --set epochs": "FIELD=VALUE",
    "uea --sets Toy --set trainer.speed=1": "trainer.speed is not a field",
    "uea --sets Toy --set seed=1": "cannot change seed",
    "uea --parts eta-s": "--parts belongs to an ablation",
    "uea-ablation --models flow": "are fixed",
    "lra --any-length": "add --no-run",
    "lra --sets text": "no train split",
    "uea-efficiency --sets Toy --launcher ray": "local launcher",
    "uea-efficiency --sets Toy --workers 99": "must not share a device",
    "lra-efficiency --models nothing": "no model of this table is called 'nothing'",
    "lra-efficiency --no-run": "has no result of this table",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words.replace(" ", "-"))
def test_bad_input_is_one_line_and_exit_code_2(words: str, launched: Launched, primal) -> None:
    code, _, err = primal("table", *words.split())
    assert code == 2
    assert err.startswith("primal: ")
    assert err.count("\n") == 1, err
    assert WRONG[words] in err
    assert not launched
