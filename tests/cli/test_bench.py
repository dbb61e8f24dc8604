"""`primal bench` from end to end, one line for bad input, and nothing but torch needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from primal_attention.bench.measurement import format_report
from primal_attention.cli import main as cli
from primal_attention.cli.bench import main
from primal_attention.report.results import read_benchmark

TINY = "--lengths 16 --widths 16:2 --rank 4 --device cpu".split()  # noqa: SIM905
RESULTS = sorted((Path(__file__).parents[2] / "results" / "bench").glob("*.json"))
BARE = """
import sys
for name in ("rich", "tyro", "matplotlib", "lightning", "aeon", "sklearn", "transformers", "yaml", "pandas"):
    sys.modules[name] = None  # as if it were not installed
from primal_attention.cli.bench import main
assert "torch" not in sys.modules
sys.exit(main(sys.argv[1:]))
"""


def test_attention_then_plot(tmp_path, capsys):
    words = ["--only", "sdpa", "primal-cpu", "--landmarks", "5", "--out", str(tmp_path)]
    assert cli.main(["bench", "attention", *TINY, *words]) == 0
    assert "speed ÷ SDPA's" in capsys.readouterr().out
    report = json.loads((tmp_path / "attention.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("primal bench attention --lengths 16")
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    assert not (tmp_path / "attention.png").exists()
    assert main(["plot", str(tmp_path / "attention.json")]) == 0
    assert (tmp_path / "attention.png").exists()
    assert (tmp_path / "attention.svg").exists()
    capsys.readouterr()
    assert main(["plot", str(RESULTS[0].parent / "model.json")]) == 0
    assert "no plot, which shows" in capsys.readouterr().out


def test_runs_with_torch_alone_and_starts_with_a_line(tmp_path):
    words = ["attention", *TINY, "--only", "sdpa", "published", "--landmarks", "5", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("primal bench attention: starting\n")
    assert "published" in done.stdout


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_stored_results_open(file):
    assert "torch" in format_report(read_benchmark(file))
