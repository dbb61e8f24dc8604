"""`primal bench` from end to end, one line for bad input, and nothing but torch needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from primal_attention.bench.measurement import check_report, format_report
from primal_attention.cli import main as cli
from primal_attention.cli.bench import main
from primal_attention.utils.files import read_json

TINY = "--lengths 16 --widths 16:2 --rank 4 --seconds 0.01 --device cpu".split()  # noqa: SIM905
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
    words = ["--only", "sdpa", "primal-cpu", "--landmarks", "5", "--out", str(tmp_path), "--no-plot"]
    assert cli.main(["bench", "attention", *TINY, *words]) == 0
    assert "speed ÷ SDPA's" in capsys.readouterr().out
    report = json.loads((tmp_path / "attention.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("primal bench attention --lengths 16")
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    assert not (tmp_path / "attention.png").exists()
    assert main(["plot", str(tmp_path / "attention.json")]) == 0
    assert (tmp_path / "attention.png").exists()
    assert (tmp_path / "attention.svg").exists()


def test_runs_with_torch_alone_and_starts_with_a_line(tmp_path):
    words = ["attention", *TINY, "--only", "sdpa", "published", "--landmarks", "5", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("primal bench attention: starting\n")
    assert "no plot: matplotlib is not installed" in done.stderr
    assert "Primal (authors' implementation)" in done.stdout


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_stored_results_open(file):
    assert "torch" in format_report(check_report(read_json(file), file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "required: attention | decode | model | lra | plot"),
        ("atention", "invalid choice: 'atention'"),
        ("generate", "generate is now called decode"),
        ("attention --rivals", "--rivals is now called --baselines"),
        ("attention --lengths -1", "--lengths"),
        ("attention --lengths 4Q", "4096, 4K or 1M (got '4Q')"),
        ("attention --widths 512x8", "such as 512:8 (got '512x8')"),
        ("attention --widths 100:8", "divisible by num_heads"),
        ("attention --dtype int8", "invalid choice: 'int8'"),
        ("attention --device tpu", "--device must be cpu, cuda or cuda:N (got 'tpu')"),
        ("attention --tokens 1024 --batch 2", "exclude each other"),
        ("attention --batch 0", "argument --batch: must be at least 1 (got 0)"),
        ("decode --seconds nan", "argument --seconds: must be finite and above 0 (got nan)"),
        ("attention --rank 0", "argument --rank: must be at least 1 (got 0)"),
        ("attention --rank few", "argument --rank: must be at least 1 (got few)"),
        ("attention --decay 2 --causal", "decay must lie in (0, 1] (got 2.0)"),
        ("attention --decay soon --causal", "--decay must be 'learned' or a number (got 'soon')"),
        ("attention --decay learned", "--decay needs --causal"),
        ("attention --only sdpaa", "did you mean 'sdpa'?"),
        ("decode --only lstm", "there are baseline, cosformer, linear, performer, primal"),
        ("attention --out /proc/nowhere", "--out /proc/nowhere cannot be written to"),
        ("model --rows vitt", "no row is called 'vitt': did you mean 'vit'? there are 512x1024, 512x1024-"),
        ("model --layers 0", "argument --layers: must be at least 1 (got 0)"),
        ("plot no-such-file.json", "no-such-file.json does not exist"),
        ("plot other.json", "other.json: hardware is missing"),
    ],
)
def test_bad_input_is_one_line_and_code_two(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"format": 1, "kind": "attention", "rows": []}')
    assert cli.main(["bench", *words.split()]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("primal: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", ["", "attention", "decode", "model", "lra", "plot"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    assert f"Example: primal bench {command}".rstrip() in capsys.readouterr().out
