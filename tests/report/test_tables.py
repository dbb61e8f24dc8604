"""Tables from results: columns per protocol, honest averages, where the numbers come from."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from primal_attention.report import results
from primal_attention.report.accuracy import accuracy
from primal_attention.report.cells import Cell, comparable_sets
from primal_attention.report.efficiency import efficiency
from primal_attention.report.results import Mean, Result
from primal_attention.report.table import Section, Table, show, to_markdown
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_csv


def result(seed: int = 0, last: float = 0.5, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "file": Path(f"{seed}-{last}-{sorted(changes.items())}.json"),
        "recipe": "uea/Handwriting",
        "seed": seed,
        "scores": {
            "last": {"accuracy": last, "epoch": 9},
            "best_on_test": {"accuracy": last + 0.1, "epoch": 3},
            "validation_chosen": {"accuracy": last - 0.1, "epoch": 5},
        },
        "config": {},
        "benchmark": "uea",
        "seconds_per_epoch": 2.0,
        "peak_memory_bytes": 10**9,
        "device": "GPU",
        "length": 152,
        "commit": "0123456789abcdef",
    }
    return Result(**{**values, **changes})


def cell(dataset: str, model: str, *found: Result) -> Cell:
    return Cell("models", dataset, model, {}, found)


def rows(table: Table) -> list[list[str]]:
    return [list(row) for section in table.sections for row in section.rows]


def test_the_three_protocols_stand_apart_beside_the_papers_number():
    found = cell("Handwriting", "primal", result(0, 0.5), result(1, 0.6))
    table = accuracy("T", [found], "primal table uea")
    (row,) = rows(table)
    assert table.sections[0].columns[2:6] == [
        "Paper (best on test)",
        "BEST-ON-TEST (paper's way)",
        "LAST",
        "VALIDATION-CHOSEN",
    ]
    assert row == ["Handwriting", "PrimalFormer (primal)", "29.6", "65.0 ± 7.1", "55.0 ± 7.1", "45.0 ± 7.1", "2"]


def test_a_cell_without_runs_is_a_dash_and_one_seed_has_no_deviation():
    table = accuracy("T", [cell("NATOPS", "nystrom"), cell("NATOPS", "primal", result(0, 0.5))], "c")
    assert rows(table)[0][2:] == ["–", "–", "–", "–", "0"]
    assert rows(table)[1][2:] == ["–", "60.0", "50.0", "40.0", "1"]


def test_columns_with_different_numbers_of_seeds_say_so():
    last_only = result(1, 0.6, scores={"last": {"accuracy": 0.6, "epoch": 1}})
    (row,) = rows(accuracy("T", [cell("Handwriting", "primal", result(0, 0.5), last_only)], "c"))
    assert row[-1] == "1/2/1"


def test_the_average_is_over_sets_that_all_models_have():
    cells = [
        cell("Handwriting", "softmax", result(0, 0.2), result(1, 0.4)),
        cell("Handwriting", "flow", result(0, 0.3)),
        cell("Heartbeat", "softmax", result(0, 0.4), result(1, 0.4)),
        cell("Heartbeat", "flow", result(0, 0.5)),
        cell("PEMS-SF", "softmax", result(0, 0.9)),
        cell("PEMS-SF", "flow"),
    ]
    assert comparable_sets(cells) == ["Handwriting", "Heartbeat"]
    table = accuracy("T", cells, "c")
    average = [row for row in rows(table) if row[0] == "Average"]
    # Seed by seed: (20 + 40)/2 and (40 + 40)/2; the paper's column is the mean of its cells on the same sets.
    assert average[0] == ["Average", "Transformer (softmax)", "54.0", "45.0 ± 7.1", "35.0 ± 7.1", "25.0 ± 7.1", "2"]
    assert average[1][2:] == ["55.7", "50.0", "40.0", "30.0", "1"]
    assert any("over Handwriting, Heartbeat" in note for note in table.notes)


def test_the_caption_has_command_commit_and_device():
    changed = result(1, commit="fedcba9876543210-changed")
    notes = "\n".join(accuracy("T", [cell("Handwriting", "primal", result(0), changed)], "primal table uea").notes)
    assert "`primal table uea`" in notes
    assert "0123456789ab (1 run)" in notes
    assert "fedcba987654-changed (1 run)" in notes
    assert "device GPU" in notes


def test_efficiency_is_relative_to_softmax_on_the_same_device():
    cells = [
        cell("Handwriting", "softmax", result(0, seconds_per_epoch=3.0, peak_memory_bytes=4 * 10**9)),
        cell("Handwriting", "primal", result(0)),
        cell("Handwriting", "flow", result(0, device="cpu", peak_memory_bytes=None)),
    ]
    found = rows(efficiency("T", cells, "c"))
    assert found[0] == ["Handwriting (152)", "Transformer (softmax)", "0.3", "3.00", "1.00×", "–", "4.00", "1.00×", "1"]
    assert found[1][2:] == ["0.4", "2.00", "1.50×", "–", "1.00", "4.00×", "1"]
    assert found[2][2:] == ["0.3", "2.00", "–", "–", "–", "–", "1"]


def test_the_efficiency_average_has_the_papers_memory():
    cells = [cell(name, "primal", result(0)) for name in ("Handwriting", "Heartbeat")]
    average = rows(efficiency("T", cells, "c"))[-1]
    assert average == ["Average", "PrimalFormer (primal)", "0.4", "2.00", "–", "2.7", "1.00", "–", "1"]


def test_markdown_shows_a_group_once_and_escapes_bars():
    text = to_markdown(Table("T", [Section("S", ["a", "b", "n"], [["x", "p|q", "1"], ["x", "r", "2"]])], ["note"]))
    assert text.splitlines()[4:8] == ["| a | b | n |", "|---|---|--:|", "| x | p\\|q | 1 |", "|  | r | 2 |"]
    assert text.endswith("- note\n")


def test_the_terminal_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take the captured output for a terminal
    table = accuracy("T", [cell("UWaveGestureLibrary", "primal+", result(0, 0.5), result(1, 0.6))], "c")
    show(table)
    out = capsys.readouterr().out
    assert "…" not in out.split("·")[0]
    assert "55.0 ± 7.1" in out


def test_csv_has_unrounded_numbers(tmp_path: Path):
    table = accuracy("T", [cell("Handwriting", "primal", result(0, 0.512345), result(1, 0.6))], "c")
    write_csv(tmp_path / "t.csv", table.records)
    (row,) = csv.DictReader((tmp_path / "t.csv").open())
    assert float(row["last_mean"]) == pytest.approx(55.61725)
    assert row["last_seeds"] == "2"
    assert row["paper"] == "29.6"
    assert row["commit"] == "0123456789abcdef"


def test_mean_of_nothing_is_nothing():
    assert Mean.of([None]) is None
    assert Mean.of([1.0, None, 3.0]) == Mean(2.0, pytest.approx(2**0.5), 2)


def test_other_files_are_passed_over_and_broken_ones_are_told(tmp_path: Path):
    assert results.read(tmp_path / "nowhere") == []
    (tmp_path / "bench.json").write_text(json.dumps({"kind": "attention"}))
    (tmp_path / "list.json").write_text("[1]")
    assert results.read(tmp_path) == []
    (tmp_path / "half.json").write_text('{"scores": ')
    with pytest.raises(RunError, match=r"half\.json is not JSON"):
        results.read(tmp_path)
    (tmp_path / "half.json").write_text(
        json.dumps({"scores": {}, "recipe": "", "label": "", "config": {}, "format": 0})
    )
    with pytest.raises(RunError, match="format 0"):
        results.read(tmp_path)
    (tmp_path / "half.json").write_text(
        json.dumps({"scores": {}, "recipe": "", "label": "", "config": {}, "format": 1})
    )
    with pytest.raises(RunError, match=r"half\.json: benchmark is missing"):
        results.read(tmp_path)
