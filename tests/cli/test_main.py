"""The command: help with an example everywhere, exit code 0, or 2 with one line on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.cli import main as cli
from primal_attention.data import uea
from primal_attention.data.uea import SeriesData, Split
from primal_attention.utils.errors import RunError

pytest.importorskip("tyro")
pytest.importorskip("lightning")

SMALL = """
--model.embed-dim 8 --model.num-heads 2 --model.layers 2 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
--trainer.epochs 2 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
""".split()  # noqa: SIM905 (reads as it is typed)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small set under data/uea."""
    rng = np.random.default_rng(0)
    halves = [Split([rng.standard_normal((9, 2)) for _ in range(n)], np.arange(n, dtype=np.int64) % 2) for n in (16, 8)]
    uea.save_npz(SeriesData("Toy", *halves, ("a", "b")), tmp_path / "data" / "uea")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    code, out, err = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: primal {command}" in out
    assert err == ""


def test_help_lists_every_command_and_version_is_the_packages(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {command} " in out for command in cli.COMMANDS)
    assert run(capsys)[:2] == (0, out)
    assert run(capsys, "--version")[1].strip()[0].isdigit()


def test_train_then_evaluate_then_resume(workplace: Path, capsys):
    words = ["train", "uea/Toy", *SMALL, "--protocol", "both", "--seed", "3"]
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    for column in ("LAST", "BEST ON TEST", "VALIDATION-CHOSEN"):
        assert column in out
    place = workplace / "runs" / "uea" / "Toy" / "primal-seed3"
    assert json.loads((place / "summary.json").read_text())["seed"] == 3
    assert "primal train uea/Toy" in (place / "config.yaml").read_text()
    code, out, _ = run(capsys, "evaluate", str(place))
    assert code == 0
    assert out.count("as in the run") == 2
    assert run(capsys, *words, "--resume")[0] == 0


def test_the_same_command_twice_gives_identical_metrics(workplace: Path, capsys):
    for _ in range(2):
        assert run(capsys, "train", "uea/Toy", *SMALL)[0] == 0
    home = workplace / "runs" / "uea" / "Toy"
    first, second = (home / name / "metrics.csv" for name in ("primal-seed0", "primal-seed0-2"))
    assert first.read_bytes() == second.read_bytes()


def test_attention_per_layer_by_flag(workplace: Path, capsys):
    code, _, _ = run(capsys, "train", "uea/Toy", *SMALL, "--model.attention", "softmax", "primal", "--out", "here")
    assert code == 0
    assert (workplace / "here" / "summary.json").exists()


WRONG = {
    "an unknown command": ("trian",),
    "no recipe": ("train",),
    "a flag before the recipe": ("train", "--seed", "3"),
    "a mistyped recipe": ("train", "uae/Toy"),
    "a mistyped set": ("train", "uea/Tooy"),
    "a mistyped flag": ("train", "uea/Toy", "--sed", "3"),
    "a value that is no number": ("train", "uea/Toy", "--seed", "three"),
    "a value out of range": ("train", "uea/Toy", "--trainer.epochs", "0"),
    "an unknown choice": ("train", "uea/Toy", "--optim.name", "sgd"),
    "a mistyped attention": ("train", "uea/Toy", "--model.attention", "primel"),
    "heads that do not divide the width": ("train", "uea/Toy", "--model.num-heads", "7"),
    "devices without a strategy": ("train", "uea/Toy", *SMALL, "--trainer.devices", "2"),
    "a folder that is no run": ("evaluate", "data"),
    "a run that is not there": ("evaluate", "nowhere"),
    "a file for a run": ("evaluate", "file"),
    "a file for a folder": ("data", "listops", "--out", "file"),
    "a recipe that its family lacks": ("train", "lm/cats"),
    "a GPU where there is none": ("train", "uea/Toy", "--trainer.accelerator", "gpu"),
    "no workers": ("table", "uea", "--workers", "0"),
    "a table's data nowhere": ("table", "uea", "--data", "nowhere"),
    "a family that is not there": ("table", "uea", "--recipe", "eua"),
    "no run": ("evaluate",),
    "too many words": ("recipes", "uea"),
}
SAID = {
    "an unknown command": "did you mean 'train'",
    "a mistyped recipe": "did you mean uea/",
    "a mistyped set": "did you mean Toy",
    "a mistyped flag": "did you mean --seed",
    "a value out of range": "trainer.epochs must be at least 1 (got 0)",
    "a mistyped attention": "did you mean 'primal'",
    "heads that do not divide the width": "num_heads=7",
    "devices without a strategy": "--trainer.strategy ddp",
    "a run that is not there": "nowhere is not a run folder",
    "a file for a run": "file is a file where a folder is needed",
    "a file for a folder": "file is a file where a folder is needed",
    "a recipe that its family lacks": "did you mean lm/wikipedia?",
    "a GPU where there is none": "trainer.accelerator gpu",
    "no workers": "--workers must be at least 1 (got 0)",
    "a table's data nowhere": "--data nowhere is not a folder",
    "a family that is not there": "there are uea, uea-modern, lra",
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.replace(" ", "-"))
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(case, workplace: Path, capsys, monkeypatch):
    (workplace / "file").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run(capsys, *WRONG[case])
    assert code == 2
    assert err.count("\n") == 1, err
    assert err.startswith("primal: ")
    assert SAID.get(case, "") in err


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    code, _, err = run(capsys, "recipes")
    assert code == 2
    assert "pip install 'primal-attention[train]'" in err


def test_recipes_and_info_speak(capsys):
    assert "uea/JapaneseVowels" in run(capsys, "recipes")[1]
    assert "torch" in run(capsys, "info")[1]


def test_the_demo_in_small(workplace: Path, capsys):
    pytest.importorskip("aeon")
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, "demo", "--epochs", "2", "--max-length", "256", "--out", "demo")
    assert code == 0
    numbers = json.loads((workplace / "demo" / "demo.json").read_text())
    assert [r["attention"] for r in numbers["results"]] == ["primal", "softmax"]
    assert numbers["results"][0]["j_before"] is not None
    assert (workplace / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "test accuracy" in out


def test_help_does_not_load_the_training_libraries():
    heavy = ("lightning", "tyro", "rich", "aeon")
    script = "import sys, primal_attention.cli.main as c; c.main(['--help'])\n"
    script += f"print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("[]"), done.stdout


def test_a_terminal_without_greek_letters_gets_question_marks():
    words = [sys.executable, "-m", "primal_attention", "--help"]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: primal COMMAND ?" in done.stdout


def test_a_run_folder_with_other_bytes_is_one_line(tmp_path: Path, capsys):
    from primal_attention.train import loop as runner

    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    code, _, err = run(capsys, "evaluate", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "config.yaml is not UTF-8 text" in err
    for content, said in (
        (b"\xff\xfe", "summary.json is not UTF-8 text"),
        (b"[]", "summary.json: the content must be a mapping"),
    ):
        (tmp_path / "summary.json").write_bytes(content)
        with pytest.raises(RunError, match=said):
            runner.read_summary(tmp_path)
