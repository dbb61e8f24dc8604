"""The command: tiny runs from end to end, one line for bad input, and nothing but torch needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from primal_attention.cli import main as cli
from primal_attention.cli.bench import main

TINY = "--lengths 16 --widths 16:2 --rank 4 --seconds 0.01 --device cpu".split()  # noqa: SIM905

BARE = """
import sys
for name in ("rich", "tyro", "matplotlib", "lightning", "aeon", "sklearn", "transformers", "yaml"):
    sys.modules[name] = None  # as if it were not installed
from primal_attention.cli.bench import main
sys.exit(main(sys.argv[1:]))
"""


def test_attention_from_end_to_end(tmp_path, capsys):
    words = ["attention", *TINY, "--only", "sdpa", "primal-cpu", "--landmarks", "5", "--out", str(tmp_path)]
    assert cli.main(["bench", *words]) == 0
    out = capsys.readouterr().out
    assert "SDPA's time ÷ this one's" in out
    report = json.loads((tmp_path / "attention.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("primal bench attention --lengths 16")
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    assert (tmp_path / "attention.png").exists()
    assert (tmp_path / "attention.svg").exists()


def test_a_picture_can_be_drawn_later(tmp_path, capsys):
    words = ["decode", *TINY, "--only", "primal-reference", "--out", str(tmp_path), "--name", "steps", "--no-plot"]
    assert main(words) == 0
    assert not (tmp_path / "steps.png").exists()
    assert main(["plot", str(tmp_path / "steps.json")]) == 0
    assert (tmp_path / "steps.png").exists()
    assert "one token after N tokens" in capsys.readouterr().out


def test_it_runs_with_torch_alone(tmp_path):
    words = ["attention", *TINY, "--only", "sdpa", "published", "--landmarks", "5", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no picture: matplotlib is missing" in done.stderr
    assert (tmp_path / "attention.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: attention | decode | generate | model | plot"),
        (["atention"], "invalid choice: 'atention'"),
        (["attention", "--lengths", "-1"], "4096, 4K or 1M (got '-1')"),
        (["attention", "--lengths", "4Q"], "4096, 4K or 1M (got '4Q')"),
        (["attention", "--widths", "512x8"], "such as 512:8 (got '512x8')"),
        (["attention", "--widths", "100:8"], "divisible by num_heads"),
        (["attention", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["attention", "--device", "tpu"], "--device must be cpu, cuda or cuda:N (got 'tpu')"),
        (["attention", "--tokens", "1024", "--batch", "2"], "exclude each other"),
        (["attention", "--batch", "0"], "--batch must be above 0 (got 0)"),
        (["attention", "--seconds", "nan"], "--seconds must be finite (got nan)"),
        (["decode", "--seconds", "inf"], "--seconds must be finite (got inf)"),
        (["decode", "--name", "a/b"], "without a folder (got 'a/b')"),
        (["attention", "--rank", "0"], "rank must be at least 1"),
        (["attention", "--decay", "2", "--causal"], "in (0, 1] (got '2')"),
        (["attention", "--decay", "learned"], "--decay needs --causal"),
        (["attention", "--only", "sdpaa"], "did you mean 'sdpa'?"),
        (["attention", "--rivals"], "--rivals is now called --baselines"),
        (["attention", "--out", "/proc/nowhere"], "--out /proc/nowhere cannot be written to"),
        (["decode", "--batch", "0"], "--batch must be above 0"),
        (["plot", "no-such-file.json"], "no-such-file.json does not exist"),
        (["plot", "other.json"], "other.json: hardware is missing"),
    ],
)
def test_bad_input_is_one_line_and_code_two(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"format": 1, "kind": "attention", "rows": []}')
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("primal: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_has_an_example(capsys):
    for words in ([], ["attention"], ["decode"], ["model"], ["plot"]):
        with pytest.raises(SystemExit) as leaving:
            main([*words, "--help"])
        assert leaving.value.code == 0
        assert f"Example: {' '.join(['primal bench', *words])}" in capsys.readouterr().out
