"""`primal table`: runs what is missing, shows it from files, and says in one line what is wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
import toy

from primal_attention.cli import main as cli
from primal_attention.cli import train as commands
from primal_attention.train import grid, registry
from primal_attention.train import grid as plan
from primal_attention.train.config import override

SMALL = """
--set model.embed_dim=8 model.num_heads=2 model.ffn_dim=16 model.rank=3 model.landmarks=4 trainer.accelerator=cpu
""".split()  # noqa: SIM905 (reads as it is typed)
BRIEF = [*SMALL, "trainer.epochs=1", "trainer.batch_size=64"]


class Launched(list):
    """Jobs that were started, run in this process: starting others is what the grid's own tests do."""

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
    torch.set_num_threads(1)
    started = Launched()
    monkeypatch.setitem(grid.LAUNCHERS, "local", started)
    return started


def table(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["table", *words])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_japanese_vowels_in_small_then_only_what_is_missing(launched: Launched, capsys, tmp_path: Path):
    pytest.importorskip("aeon")
    words = ["uea", "--sets", "JapaneseVowels", "--models", "softmax", "primal", "--seeds", "1", *BRIEF]
    code, out, _ = table(capsys, *words, "--markdown", "out/t.md", "--csv", "out/t.csv")
    assert code == 0
    assert launched.names() == ["softmax-seed0", "primal-seed0"]
    for text in ("BEST-ON-TEST (paper's way)", "LAST", "VALIDATION-CHOSEN", "98.7", "98.4", "trainer.epochs 1"):
        assert text in out
    assert "| JapaneseVowels | Transformer (softmax) | 98.7 |" in Path("out/t.md").read_text()
    records = list(csv.DictReader(Path("out/t.csv").read_text().splitlines()))
    summary = json.loads(Path("results/uea/JapaneseVowels/primal-seed0.json").read_text())
    assert float(records[1]["last_mean"]) == pytest.approx(100 * summary["scores"]["last"]["accuracy"])
    assert summary["commit"]
    assert str(tmp_path) not in json.dumps(summary)

    assert table(capsys, *words)[0] == 0
    assert launched.names() == []
    words[words.index("1")] = "2"
    assert table(capsys, *words)[0] == 0
    assert launched.names() == ["softmax-seed1", "primal-seed1"]
    code, again, _ = table(capsys, *words, "--no-run")
    assert code == 0
    assert launched.names() == []
    assert "--no-run" not in again


def test_the_ablation_takes_the_runs_that_it_shares(launched: Launched, capsys):
    common = ["--sets", "Toy", "--seeds", "1", *BRIEF]
    assert table(capsys, "uea", "--models", "primal", "primal+", *common)[0] == 0
    launched.clear()
    code, out, _ = table(capsys, "uea-ablation", "--parts", "data-dependence", "r-scores", *common)
    assert code == 0
    assert launched.names() == ["primal+-independent-seed0", "primal-without-r-seed0", "primal+-without-r-seed0"]
    assert "Data-dependent" in out
    assert "r-scores" in out
    settings = json.loads(Path("results/uea/Toy/primal+-independent-seed0.json").read_text())["config"]["model"]
    assert (settings["data_dependent"], settings["attention"]) == (False, ["primal+"])


def test_the_grid_of_eta_and_s_is_the_papers():
    variants = plan.ablation_variants(["eta-s"])
    assert len(variants) == 12
    assert variants[5].changes() == {"model.attention": ("primal",), "model.rank": 30, "eta": 0.1}
    whole = plan.Plan("uea", ["Handwriting"], variants, range(2), {"protocol": "both"}, "uea")
    assert len(plan.missing(whole, plan.Shelf([]), Path("runs"), Path("results"))) == 24
    default = plan.Plan("uea", ["Handwriting"], plan.model_variants(["primal"]), [0], {}, "uea")
    best = next(v for v in variants if v.options == {"rank": 30, "eta": 0.2})
    assert whole.key("Handwriting", best) == default.key("Handwriting", default.variants[0])


def test_efficiency_is_measured_by_runs_of_its_own(launched: Launched, capsys):
    words = ["uea-efficiency", "--sets", "Toy", "--models", "softmax", "primal", "--seeds", "1", *BRIEF]
    code, out, _ = table(capsys, *words)
    assert code == 0
    assert "s/epoch" in out
    assert "1.00×" in out
    assert "scaled_dot_product_attention" in out
    assert Path("results/uea-efficiency/Toy/softmax-seed0.json").exists()


def test_a_failed_run_leaves_the_others_and_is_told(launched: Launched, capsys, monkeypatch):
    def half(jobs: Sequence[grid.Job], workers: int) -> Iterable[grid.Outcome]:
        return [grid.run_job(jobs[0]), grid.Outcome(jobs[1], error="the loss is not finite")]

    monkeypatch.setitem(grid.LAUNCHERS, "local", half)
    code, out, err = table(capsys, "uea", "--sets", "Toy", "--models", "softmax", "primal", "--seeds", "1", *BRIEF)
    assert code == 2
    assert "Transformer (softmax)" in out
    assert "1 run failed, the first was uea/Toy primal-seed0: the loss is not finite" in err


def test_the_command_in_a_result_trains_the_same(tmp_path: Path):
    changes = {"model.attention": ("softmax", "primal"), "eta": 0.2, "model.r_scores": False, "protocol": "both"}
    job = grid.Job("uea/Toy", {**changes, "data.folder": tmp_path, "seed": 3}, tmp_path, tmp_path)
    words = job.command.split()[3:]
    recipe, _, _ = commands.parse_run("uea/Toy", registry.get("uea/Toy"), words)
    assert recipe == override(registry.get("uea/Toy"), {**changes, "seed": 3})
    assert str(tmp_path) not in job.command


WRONG = {
    "a mistyped table": (["uae"], "did you mean 'uea'?"),
    "no table": ([], "required: NAME"),
    "a mistyped flag": (["uea", "--sed", "3"], "--sed"),
    "an empty folder": (["uea", "--no-run", "--seeds", "2"], "run 'primal table uea --seeds 2' first"),
    "a mistyped model": (["uea", "--models", "primel"], "did you mean 'primal'?"),
    "a mistyped set": (["uea", "--sets", "Tooy"], "did you mean Toy?"),
    "a mistyped family": (["uea", "--recipe", "uea-moden"], "did you mean 'uea-modern'?"),
    "a mistyped part": (["uea-ablation", "--parts", "eta"], "invalid choice: 'eta'"),
    "a change that is none": (["uea", "--sets", "Toy", "--set", "epochs"], "FIELD=VALUE"),
    "a field that is none": (["uea", "--sets", "Toy", "--set", "trainer.speed=1"], "trainer.speed is not a field"),
    "a change of the grid": (["uea", "--sets", "Toy", "--set", "seed=1"], "cannot change seed"),
    "no seeds": (["uea", "--sets", "Toy", "--seeds", "0"], "--seeds must be at least 1"),
    "no workers": (["uea", "--sets", "Toy", "--workers", "0"], "workers must be at least 1"),
    "parts of a table without": (["uea", "--parts", "eta-s"], "--parts belongs to an ablation"),
    "models of the ablation": (["uea-ablation", "--models", "flow"], "are fixed"),
    "timing on a cluster": (["uea-efficiency", "--sets", "Toy", "--launcher", "ray"], "local launcher"),
    "timing side by side": (["uea-efficiency", "--sets", "Toy", "--workers", "99"], "must not share a device"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.replace(" ", "-"))
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(case, launched: Launched, capsys):
    words, said = WRONG[case]
    code, _, err = table(capsys, *words)
    assert code == 2
    assert err.startswith("primal: ")
    assert err.count("\n") == 1, err
    assert said in err
    assert not launched


def test_results_of_other_settings_are_neither_shown_nor_overwritten(launched: Launched, capsys):
    words = ["uea", "--sets", "Toy", "--models", "softmax", "--seeds", "1"]
    assert table(capsys, *words, *BRIEF)[0] == 0
    code, _, err = table(capsys, *words, *SMALL, "trainer.epochs=2", "trainer.batch_size=64")
    assert code == 2
    assert "was run with trainer.epochs 1, not 2: choose another --results" in err
    code, _, err = table(capsys, *words, *SMALL, "--no-run")
    assert code == 2
    assert "no result of this table (1 with other settings)" in err


def test_a_run_folder_is_as_good_as_a_result_file(launched: Launched, capsys):
    words = ["uea", "--sets", "Toy", "--models", "softmax", "--seeds", "1", *BRIEF]
    first = table(capsys, *words)[1]
    code, again, _ = table(capsys, *words, "--no-run", "--results", "runs")
    assert code == 0

    def numbers(out: str) -> list[str]:
        return [line for line in out.splitlines() if "softmax" in line and "Toy" in line and "primal" not in line]

    assert numbers(again) == numbers(first)


def test_sets_that_are_not_here_are_left_out_and_named(launched: Launched, capsys, monkeypatch):
    monkeypatch.setattr("primal_attention.data.uea.INSIDE_AEON", ())
    Path("data/uea/Toy.npz").rename("data/uea/Handwriting.npz")
    code, out, err = table(capsys, "uea", "--models", "softmax", "--seeds", "1", *BRIEF)
    assert code == 0
    assert "left out: EthanolConcentration" in err
    assert "Handwriting" in out
    assert "PEMS-SF" not in out


def test_on_a_local_ray_with_two_workers(launched: Launched, capsys):
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    words = ["uea", "--sets", "Toy", "--models", "softmax", "primal", "--seeds", "1", *BRIEF]
    code, out, err = table(capsys, *words, "--launcher", "ray", "--workers", "2")
    assert code == 0, err
    assert not launched
    assert Path("results/uea/Toy/primal-seed0.json").exists()
    assert Path("runs/results/uea/Toy/primal-seed0/model.safetensors").exists()
    assert "PrimalFormer (primal)" in out
