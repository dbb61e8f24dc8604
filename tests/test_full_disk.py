"""A full disk under the output of a command: one line with the path, and no file that is written half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import page_cases
from primal_attention.cli import main as cli
from primal_attention.train import registry
from primal_attention.train.config import override, to_plain

resource = pytest.importorskip("resource")
pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

TIMING = "--lengths 16 --widths 8:2 --rank 2 --landmarks 4 --only sdpa --seconds 0.01 --device cpu"
TABLE = "table uea --no-run --sets JapaneseVowels --models primal --results results"
COMMANDS = {
    "bench": (f"bench attention {TIMING} --out out", "out/attention.json"),
    "bench-plot": ("bench plot bench.json", "bench.png"),
    "report": ("report run -o page.html", "page.html"),
    "table-markdown": (f"{TABLE} --markdown table.md", "table.md"),
    "table-csv": (f"{TABLE} --csv table.csv", "table.csv"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, a benchmark and a result."""
    monkeypatch.chdir(tmp_path)
    page_cases.put_run(tmp_path / "run", "primal", 0, 0.9)
    (tmp_path / "bench.json").write_text(json.dumps(page_cases.bench()))
    recipe = override(registry.get(page_cases.RECIPE), {"model.attention": ("primal",)}).resolved()
    (tmp_path / "results").mkdir()
    result = {**page_cases.summary("primal", 0, 0.9), "config": to_plain(recipe)}
    (tmp_path / "results" / "a.json").write_text(json.dumps(result))
    return tmp_path


@pytest.mark.parametrize("before", [None, "the version before"], ids=["new", "replaced"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line(name: str, before: str | None, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, output = COMMANDS[name]
    (home / output).parent.mkdir(exist_ok=True)
    if before is not None:
        (home / output).write_text(before)
    files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # a write of more fails, as on a full disk
    try:
        code = cli.main(command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("primal: ")]
    assert (code, len(lines)) == (2, 1), err
    assert output in lines[0]
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == files


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full stands for a full disk")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "primal_attention", "recipes"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left on device" in done.stderr
