"""primal spectrum: pictures and numbers of runs, and one line for a run that it cannot look at."""

import csv
from pathlib import Path

import pytest
import toy

from primal_attention.report.results import read_spectrum


def test_runs_give_a_table_numbers_and_plots(workplace: Path, primal) -> None:
    assert primal("train", "uea/Toy", *toy.FLAGS, "--model.attention", "primal+", "--out", "one")[0] == 0
    assert primal("data", "listops", "--train", "8", "--valid", "2", "--test", "4")[0] == 0
    steps = ["--trainer.steps-per-epoch", "1", "--trainer.precision", "32-true"]
    assert primal("train", "lra/listops", *toy.FLAGS, *steps, "--out", "two")[0] == 0
    assert primal("spectrum", "two", "--samples", "2")[0] == 0
    code, out, _ = primal("spectrum", "one", "--samples", "5")
    assert code == 0
    assert "softmax" in out
    assert out.startswith(f"{workplace.name}/one\n"), "the run and its folder"
    folder = workplace / "results" / "spectrum"
    for name in ("spectrum.csv", "spectrum.png", "spectrum.svg"):
        assert (folder / name).stat().st_size > 0
    with (folder / "spectrum.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 12  # layers × the longest series
    assert float(rows[11]["explained_mean"]) == pytest.approx(1)
    assert {row["kind"] for row in rows} == {"softmax", "primal"}
    layers = read_spectrum(folder / "spectrum.csv")  # as the page of runs reads it
    assert [len(values) for values in layers.values()] == [12, 12]
    config = workplace / "two" / "config.yaml"
    head = config.read_text().replace("benchmark: lra", "benchmark: lm").partition("config:")[0]
    config.write_text(head + "config: {}")
    code, _, err = primal("spectrum", "two")
    assert code == 2
    assert "two is a run of lm: primal spectrum supports uea, lra, image" in err
