"""`primal table lm` runs small models and compares them with softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_lm

from primal_attention.cli import table
from primal_attention.train import grid
from primal_attention.train.grid import QUIET
from primal_attention.utils.errors import RunError

texts = test_lm.folder


def test_lm_compares_with_softmax(texts: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid.LAUNCHERS, "local", lambda jobs, workers: map(grid.run_job, jobs))  # in this process
    skipped = {"data.folder", "seed", "model.attention", *QUIET}
    settings = [f"{name}={value}" for name, value in test_lm.SMALL.items() if name not in skipped]
    places = ["--data", str(texts), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    words = ["lm", "--models", "softmax", "primal-mean", "--seeds", "1", *places, "--set", *settings]
    assert table.main(words) == 0
    printed = capsys.readouterr().out
    for part in ("softmax", "primal-mean", "Runs: 2"):
        assert part in printed
    with pytest.raises(RunError, match="sofmax"):
        table.main(["lm", "--models", "sofmax", "--no-run"])
