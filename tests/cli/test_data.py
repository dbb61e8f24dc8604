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
