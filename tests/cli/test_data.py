"""`primal data`: files in the released layouts, the same for the same seed; user errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from primal_attention.data.lra import listops, pathfinder

SIZES = ("--train", "4", "--valid", "2", "--test", "2")


@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_a_set_is_made_where_the_recipe_reads_it(task: str, tmp_path: Path, primal, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = primal("data", task, *SIZES)
    assert code == 0
    assert "8 " in out
    load = {"listops": listops.load, "pathfinder": pathfinder.load}[task]
    assert [len(s) for s in load(tmp_path / "data" / "lra" / task).splits.values()] == [4, 2, 2]
    code, _, err = primal("data", task, *SIZES)
    assert code == 2
    assert "already holds a set" in err


@pytest.mark.parametrize("words", [(), ("listops", "--help"), ("pathfinder", "--help")], ids=str)
def test_help_has_an_example(words: tuple[str, ...], primal) -> None:
    code, out, _ = primal("data", *words)
    assert code == 0
    assert f"Example: primal data {words[0] if words else 'listops'}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("imdb",), "invalid choice: 'imdb'"),
        (("listops", "--train", "0"), "at least one"),
        (("listops", "--seed", "-1"), "--seed must not be negative (got -1)"),
        (("listops", "--trian", "5"), "did you mean --train"),
        (("pathfinder", "--contour-length", "99"), "contour_length must lie between"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path, primal, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = primal("data", *words)
    assert code == 2
    assert message in err
    assert err.strip().count("\n") == 0
