"""Generation: an all-Primal model's state does not grow, softmax's does."""

from __future__ import annotations

from pathlib import Path

import pytest

from primal_attention.bench import generate, plot, tables
from primal_attention.bench.settings import BenchError
from primal_attention.cli import bench as command

SMALL = {"lengths": (32, 128), "widths": ((16, 2),), "rank": 4, "layers": 2, "seconds": 0.01, "device": "cpu"}


def test_states_times_table_and_picture(tmp_path: Path) -> None:
    report = generate.run(generate.GenerateSettings(**SMALL, out=tmp_path))
    held = {name: [r["state_bytes"] for r in report["rows"] if r["name"] == name] for name in generate.MODELS}
    for name in ("primal-mean", "primal-decay", "primal-delta"):
        assert held[name][0] == held[name][1]
    first, last = held.pop("softmax")
    assert last - first == 2 * 2 * 96 * 16 * 4 + 2 * 96  # two layers' keys and values, and which slots are taken
    assert all(row["status"] == "ok" and row["seconds"] > 0 for row in report["rows"])
    assert (tmp_path / "generate.json").is_file()
    assert "state per sequence, kB" in tables.decode(report)
    pytest.importorskip("matplotlib")
    assert len(plot.draw(report, tmp_path / "generate")) == 2


def test_the_command_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--lengths", "16", "--widths", "8:2", "--rank", "2", "--layers", "1", "--seconds", "0.01"]
    assert command.main([*words, "--only", "primal-mean", "--out", str(tmp_path), "--device", "cpu", "--no-plot"]) == 0
    assert "Primal, mean" in capsys.readouterr().out
    assert command.main([*words, "--only", "lstm"]) == 2
    assert "known are primal, primal-decay, primal-delta, primal-mean, softmax" in capsys.readouterr().err
    with pytest.raises(BenchError, match="--layers must be above 0"):
        generate.run(generate.GenerateSettings(layers=0, out=tmp_path))
