"""Reading results: runs, summaries, spectra and benchmarks; every damaged or foreign file is one line that names it."""

import json
from pathlib import Path

import pytest

from page_cases import bench, config, put_run, summary
from primal_attention.report import results
from primal_attention.report.results import Stat, collect, read_folder

ROOT = Path(__file__).parents[2]


def test_every_stored_summary_opens() -> None:
    runs = results.read_summaries(ROOT / "results")
    assert len(runs) >= 400
    trainings = [run for run in runs if "trainer" in run.config]
    assert all(run.device and run.seconds_per_epoch > 0 and run.command and run.settings for run in trainings)
    assert {run.benchmark for run in trainings} == {"uea", "lra", "d4rl", "lm", "image"}
    others = [run for run in runs if run not in trainings]
    assert all(run.score("step", "eager") or run.score("fit", "seconds") or "refused" in run.data for run in others)


def test_a_run_folder_has_curves_scores_and_its_command(tmp_path: Path) -> None:
    run = read_folder(put_run(tmp_path / "run", "primal", 1, 0.96))
    assert (run.label, run.seed, run.task) == ("primal", 1, "JapaneseVowels")
    assert run.score("last") == pytest.approx(96.0)
    assert run.score("validation_chosen") is None
    assert run.metrics["epoch"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert run.command == "primal train uea/JapaneseVowels --seed 1"
    (tmp_path / "run" / "summary.json").unlink()
    unfinished = read_folder(tmp_path / "run")
    assert not unfinished.scores
    assert unfinished.label == "primal"


def test_a_summary_in_a_run_folder_counts_once_and_other_files_are_ignored(tmp_path: Path) -> None:
    put_run(tmp_path / "runs" / "a", "primal", 0, 0.9)
    stored = tmp_path / "results"
    stored.mkdir()
    (stored / "copy.json").write_text((tmp_path / "runs" / "a" / "summary.json").read_text())
    (stored / "other.json").write_text(json.dumps(summary("primal", 7, 0.9) | {"config": config("primal", 7)}))
    (stored / "foreign.json").write_text('{"some": "thing"}')
    (stored / "bench.json").write_text(json.dumps(bench()))
    found = collect([tmp_path / "runs", stored, tmp_path / "runs"])
    assert [run.seed for run in found.runs] == [0, 7]
    assert len(found.benches) == 1
    assert [run.seed for run in results.read_summaries(stored)] == [7]
    assert results.read_summaries(tmp_path / "nowhere") == []


def test_a_spectrum_is_relative_to_the_largest_value_of_a_layer(tmp_path: Path) -> None:
    file = tmp_path / "spectrum.csv"
    file.write_text("layer,index,value\nfirst,2,1.0\nfirst,1,2.0\nsecond,1,4.0\nsecond,2,1.0\n")
    assert results.read_spectrum(file) == {"first": [1.0, 0.5], "second": [1.0, 0.25]}


def test_statistics_over_seeds() -> None:
    assert Stat.over([None]) is None
    assert Stat.over([1.0, None, 3.0]) == Stat(2.0, pytest.approx(2**0.5), 2)
    assert Stat(1234.5, 1.5, 2).show(0) == "1,234 ± 2"
