"""`primal table`: runs what is missing and shows stored results."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import test_lm
import toy

import page_cases
from primal_attention.report import tables
from primal_attention.report.results import ResultIndex
from primal_attention.train import classifiers, grid, registry
from primal_attention.train.classifiers import Fit
from primal_attention.train.config import override, to_plain
from primal_attention.utils.files import write_json

BRIEF = ["--set", "trainer.epochs=1", "trainer.batch_size=64"]
TOY = ["--sets", "Toy", "--seeds", "1"]
texts = test_lm.folder


def store_result(job: grid.Job) -> grid.Outcome:
    """Store the summary of a run without training it; the tests of the grid and of language models train."""
    recipe = override(registry.get(job.recipe), job.changes)
    scores = {key: {"accuracy": 0.5 + 0.1 * recipe.seed, "epoch": 1} for key in tables.PROTOCOLS}
    data = {"set": job.recipe.partition("/")[2], "test_samples": 6, "max_length": 12}
    summary = page_cases.summary(recipe.label(), recipe.seed, 0.5) | {
        "recipe": job.recipe, "benchmark": recipe.benchmark, "scores": scores, "data": data,
        "config": to_plain(recipe), "command": job.command, "commit": "abc",
    }  # fmt: skip
    write_json(job.result, summary)
    return grid.Outcome(job, summary)


class Launched(list):
    """Jobs that were started."""

    def __call__(self, jobs: Sequence[grid.Job], workers: int) -> Iterable[grid.Outcome]:
        self.extend(jobs)
        return map(store_result, jobs)

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
    monkeypatch.setattr(grid, "_run_locally", started)
    return started


def test_only_missing_runs_are_started(launched: Launched, primal) -> None:
    words = ["uea", "--sets", "Toy", "Toy", "--models", "softmax", "primal", "--seeds", "1", *BRIEF]
    code, out, _ = primal("table", *words, "--markdown", "out/t.md", "--csv", "out/t.csv")
    assert code == 0
    assert launched.names() == ["softmax-seed0", "primal-seed0"]
    for text in ("BEST-ON-TEST", "LAST", "VALIDATION-CHOSEN", "trainer.epochs 1"):
        assert text in out
    assert Path("out/t.md").read_text().count("| Transformer (softmax) | – |") == 1, "a repeated set is one"
    records = list(csv.DictReader(Path("out/t.csv").read_text().splitlines()))
    assert float(records[1]["last_mean"]) == pytest.approx(50.0)
    words[words.index("1")] = "2"
    assert primal("table", *words)[0] == 0
    assert launched.names() == ["softmax-seed1", "primal-seed1"]
    code, again, _ = primal("table", *words, "--no-run")
    assert code == 0
    assert "55.0 ± 7.1" in again
    assert "--no-run" not in again
    # The ablation shares runs with the main table.
    code, out, _ = primal("table", "uea-ablation", "--models", "data-dependence", "primal-with-r", *TOY, *BRIEF)
    assert code == 0
    assert launched.names() == ["primal+-independent-seed0", "primal+-dependent-seed0"]
    assert "Data-dependent" in out


def test_results_of_other_settings_are_neither_shown_nor_overwritten(launched: Launched, primal) -> None:
    words = ["uea", *TOY, "--models", "softmax"]
    assert primal("table", *words, *BRIEF)[0] == 0
    code, _, err = primal("table", *words, "--set", "trainer.epochs=2", "trainer.batch_size=64")
    assert code == 2
    assert "was run with trainer.epochs 1, not 2: choose another --results" in err
    code, _, err = primal("table", *words, "--no-run")
    assert code == 2
    assert "no result of this table (1 with other settings: one was run with trainer.epochs 1, not 100)" in err


def test_a_failed_run_leaves_the_others(launched: Launched, primal, monkeypatch) -> None:
    def half(jobs: Sequence[grid.Job], workers: int) -> Iterable[grid.Outcome]:
        return [store_result(jobs[0]), grid.Outcome(jobs[1], error="the loss is not finite")]

    monkeypatch.setattr(grid, "_run_locally", half)
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


def test_every_table_looks_for_data_where_the_recipe_does(launched: Launched, primal) -> None:
    for benchmark, folder in (("image", "data/image"), ("lm", "data/lm/wikipedia"), ("lra", "data/lra/text")):
        Path(folder).mkdir(parents=True)
        primal("table", benchmark, "--models", "softmax", "--seeds", "1")
        assert launched.names() == ["softmax-seed0"], benchmark


def test_long_range_arena_and_trainings_of_another_length(launched: Launched, primal) -> None:
    Path("data/lra/listops").mkdir(parents=True)
    words = ["lra", "--models", "primal", "--sets", "listops", "--seeds", "1", "--set", "trainer.batch_size=4"]
    code, out, _ = primal("table", *words, "trainer.steps_per_epoch=2", "trainer.epochs=2")
    assert code == 0
    for text in ("Paper (validation-chosen)", "37.3", "4 steps × 4 samples", "paper 5,000 × 32", "Samples in the test"):
        assert text in out
    assert primal("table", *words, "--no-run")[0] == 2
    code, out, _ = primal("table", *words, "--no-run", "--any-length")
    assert code == 0
    assert "trainings of any length" in out
    words = ["lra-ablation", "--models", "r-scores", "--sets", "listops", "--results", "other"]
    code, out, _ = primal("table", *words)
    assert code == 0
    assert len(list(Path("other/lra/listops").glob("*.json"))) == 4 * 3
    for text in ("36.8", "37.1", "37.3"):
        assert text in out


def test_language_models_are_compared_with_softmax(launched: Launched, texts: Path, primal, monkeypatch) -> None:
    monkeypatch.setattr(grid, "_run_locally", lambda jobs, workers: map(grid.run_job, jobs))  # trains
    skipped = {"data.folder", "seed", "model.attention", *grid.QUIET}
    small = {**toy.SMALL, **test_lm.SMALL, "trainer.steps_per_epoch": 3}
    settings = [f"{name}={value}" for name, value in small.items() if name not in skipped]
    words = ["lm", "--models", "softmax", "primal-mean", "--seeds", "1", "--data", str(texts), "--set", *settings]
    code, out, _ = primal("table", *words)
    assert code == 0
    for part in ("softmax", "primal-mean", "Runs: 2"):
        assert part in out
    summary = json.loads(Path("results/lm/wikipedia/softmax-seed0.json").read_text())
    assert summary["commit"]
    assert str(texts) not in json.dumps(summary)
    assert primal("table", *words, "--no-run", "--results", "runs")[0] == 0  # run folders serve as results


def test_the_grid_of_eta_and_s_is_the_papers(tmp_path) -> None:
    variants = tables.ablation_variants("eta-s")
    assert variants[5].changes() == {"model.attention": ("primal",), "model.rank": 30, "eta": 0.1}
    plan = grid.Plan("uea", ["Handwriting"], variants, range(2), {"protocol": "both"}, "uea")
    index = ResultIndex(plan, [])
    assert len(index.missing_jobs(Path("runs"), tmp_path)) == 24
    best = next(v for v in variants if v.options == {"rank": 30, "eta": 0.2})
    (default,) = tables.model_variants(["primal"])
    assert index.cell_settings("Handwriting", best) == index.cell_settings("Handwriting", default)


def test_classifiers_are_fitted_once_and_settings_do_not_mix(launched: Launched, primal, monkeypatch) -> None:
    started = []

    def run_fits(fits: Sequence[Fit]) -> list[str]:
        started.extend((fit.model, fit.seed) for fit in fits)
        for fit in fits:
            scores = {"last": {"validation_accuracy": 0.5, "validation_calibration_error": 0.1}}
            fields = {"recipe": fit.recipe, "label": fit.model, "seed": fit.seed, "config": dict(fit.settings)}
            stored = {"format": 1, "benchmark": "uea", "device": "cpu", "command": fit.command, "scores": scores}
            write_json(fit.file, stored | fields | {"data": {"set": fit.dataset}})
        return ["Toy primal seed 1: killed"]

    monkeypatch.setattr(classifiers, "run_fits", run_fits)
    models = ["--models", "primal", "primal-features", "multirocket-hydra"]
    pilot = ["uea-modern", "--sets", "Toy", *models, "--seeds", "2", "--holdout", "0.25", "--set", "epochs=1"]
    code, out, err = primal("table", *pilot, "--csv", "t.csv", "--markdown", "t.md")
    assert (code, started) == (2, [(m, seed) for seed in (0, 1) for m in ("primal", "multirocket-hydra")])
    assert "1 run failed, the first was Toy primal seed 1: killed" in err
    assert "no test score was computed" in out
    assert "| Toy | PrimalClassifier | 50.0 ± 0.0 | +0.0 ± 0.0 | 10.0 ± 0.0 |" in Path("t.md").read_text()
    first = next(csv.DictReader(Path("t.csv").read_text().splitlines()))
    assert first["difference_half_interval"] == "0.0"
    stored = json.loads(Path("results/uea-modern-classifiers/Toy/multirocket-hydra-seed1.json").read_text())
    assert stored["config"] == {"holdout": 0.25}  # PrimalClassifier's parameters are not aeon's
    assert stored["command"].startswith("primal table uea-modern --sets Toy --models primal")
    assert primal("table", *pilot, "--no-run")[0] == 0
    code, _, err = primal("table", "uea-modern", "--sets", "Toy", "--no-run")
    assert (code, "(4 with other settings: one was run with holdout 0.25, not 0.0)" in err) == (2, True)
    code, _, err = primal("table", "uea-modern", "--sets", "Toy", "--models", "primal")
    assert (code, "was run with holdout 0.25, not 0.0: choose another --results" in err) == (2, True)
    assert len(started) == 4
