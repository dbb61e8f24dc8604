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
from primal_attention.train import registry

pytest.importorskip("tyro")
pytest.importorskip("lightning")

SMALL = """
--model.embed-dim 8 --model.num-heads 2 --model.layers 2 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
--trainer.epochs 2 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
""".split()  # noqa: SIM905 (reads as it is typed)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small data set under data/uea."""
    rng = np.random.default_rng(0)
    splits = [Split([rng.standard_normal((9, 2)) for _ in range(n)], np.arange(n, dtype=np.int64) % 2) for n in (16, 8)]
    uea.save_npz(SeriesData("Toy", *splits, ("a", "b")), tmp_path / "data" / "uea")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_an_example(command: str, primal) -> None:
    code, out, err = primal(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: primal {command}" in out


def test_help_lists_every_command(primal) -> None:
    code, out, _ = primal("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in cli.COMMANDS)
    assert primal()[:2] == (0, out)
    assert primal("--version")[1].strip()[0].isdigit()


def imported_modules(*commands: str) -> set[str]:
    """The top-level packages that commands import, in a process of its own."""
    script = f"""
import contextlib, sys
from primal_attention.cli.main import main
for command in {commands}:
    with contextlib.suppress(SystemExit):
        main(command.split())
print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_help_and_recipes_start_without_torch() -> None:
    heavy = {"torch", "numpy", "lightning", "tyro", "rich", "aeon", "transformers", "yaml"}
    assert not imported_modules("--help", "recipes", "train --help", "table --help") & heavy


def test_flags_of_recipes_are_listed_without_the_training_libraries() -> None:
    recipes = ("uea/JapaneseVowels", "lra/text", "image/imagenette", "d4rl/hopper-medium", "lm/wikipedia")
    modules = imported_modules(*(f"train {recipe} --help" for recipe in recipes))
    assert not modules & {"lightning", "aeon", "transformers", "sklearn", "pandas"}


def test_train_then_evaluate_then_resume(workplace: Path, primal) -> None:
    words = ["train", "uea/Toy", *SMALL, "--protocol", "both", "--seed", "3", "--model.attention", "softmax", "primal"]
    code, out, err = primal(*words)
    assert (code, err) == (0, "")
    for column in ("LAST", "BEST ON TEST", "VALIDATION-CHOSEN"):
        assert column in out
    place = workplace / "runs" / "uea" / "Toy" / "softmax-primal-seed3"
    summary = json.loads((place / "summary.json").read_text())
    assert summary["seed"] == 3
    assert summary["command"].startswith("primal train uea/Toy")
    assert {"date", "commit", "dirty", "commit_source", "versions"} <= summary.keys()
    code, out, _ = primal("evaluate", str(place))
    assert code == 0
    assert out.count("as in the run") == 2
    assert primal(*words, "--resume")[0] == 0
    assert primal(*words)[0] == 0
    other = place.with_name("softmax-primal-seed3-2")
    assert (place / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()


OWN_RECIPES = """
from dataclasses import dataclass, replace
from typing import ClassVar
from primal_attention.train import registry
from primal_attention.train.uea import UEARecipe

quick = replace(registry.get("uea/Toy"), seed=5)

@dataclass(frozen=True)
class Mine(UEARecipe):
    benchmark: ClassVar[str] = "mine"
    note: str = "none"

def mine():
    return Mine(data=quick.data, note="own")
"""


def test_recipes_of_a_file_train_and_evaluate(workplace: Path, primal, monkeypatch) -> None:
    (workplace / "my_recipes.py").write_text(OWN_RECIPES)
    assert primal("train", "my_recipes.py:quick", *SMALL)[0] == 0
    run = workplace / "runs" / "my_recipes" / "quick" / "primal-seed5"
    assert primal("evaluate", str(run))[0] == 0  # its class is one of the package
    assert primal("train", "my_recipes.py:mine", *SMALL, "--note", "typed", "--out", "own")[0] == 0
    monkeypatch.setattr(registry, "_OWN_TYPES", {})  # as in a new process
    code, _, err = primal("evaluate", "own")
    assert code == 2
    assert "a recipe of your own needs --recipes FILE.py" in err
    code, out, _ = primal("evaluate", "own", "--recipes", "my_recipes.py")
    assert (code, out.count("as in the run")) == (0, 1)


WRONG = {
    "an unknown command": ("trian",),
    "no recipe": ("train",),
    "a flag before the recipe": ("train", "--seed", "3"),
    "a mistyped recipe": ("train", "uae/Toy"),
    "a mistyped set": ("train", "uea/Tooy"),
    "a mistyped flag": ("train", "uea/Toy", "--sed", "3"),
    "not a number": ("train", "uea/Toy", "--seed", "three"),
    "out of range": ("train", "uea/Toy", "--trainer.epochs", "0"),
    "an unknown choice": ("train", "uea/Toy", "--optim.name", "sgd"),
    "a mistyped attention": ("train", "uea/Toy", "--model.attention", "primel"),
    "heads that do not divide the width": ("train", "uea/Toy", "--model.num-heads", "7"),
    "devices without a strategy": ("train", "uea/Toy", *SMALL, "--trainer.devices", "2"),
    "a GPU where there is none": ("train", "uea/Toy", "--trainer.accelerator", "gpu"),
    "an unknown member": ("train", "lm/cats"),
    "a file without that recipe": ("train", "own.py:slow"),
    "a file without a name": ("train", "own.py"),
    "a file that does not exist": ("train", "nowhere.py:slow"),
    "a file that fails": ("train", "broken.py:slow"),
    "no run": ("evaluate",),
    "not a run": ("evaluate", "data"),
    "a run that does not exist": ("evaluate", "nowhere"),
    "a file as a run": ("evaluate", "file"),
    "a damaged run": ("evaluate", "damaged"),
    "a file as a folder": ("data", "listops", "--out", "file"),
    "no workers": ("table", "uea", "--workers", "0"),
    "a table's data nowhere": ("table", "uea", "--data", "nowhere"),
    "an unknown family": ("table", "uea", "--recipe", "eua"),
    "too many arguments": ("recipes", "uea", "lra"),
    "no such recipe": ("recipes", "cats"),
    "a flag that does not exist": ("info", "--nonsense"),
}
MESSAGES = {
    "an unknown command": "did you mean 'train'",
    "a mistyped recipe": "did you mean uea/",
    "a mistyped set": "did you mean Toy",
    "a mistyped flag": "did you mean --seed",
    "out of range": "trainer.epochs must be at least 1 (got 0)",
    "a mistyped attention": "did you mean 'primal'",
    "heads that do not divide the width": "num_heads=7",
    "devices without a strategy": "--trainer.strategy ddp",
    "a GPU where there is none": "trainer.accelerator gpu",
    "an unknown member": "did you mean lm/wikipedia?",
    "a file without that recipe": "own.py has no recipe 'slow'",
    "a file without a name": "use own.py:NAME",
    "a file that does not exist": "nowhere.py is not a file",
    "a file that fails": "broken.py cannot be run (NameError: name 'undefined' is not defined)",
    "a run that does not exist": "nowhere is not a run folder",
    "a file as a run": "file is a file where a folder is needed",
    "a damaged run": "config.yaml is not UTF-8 text",
    "a file as a folder": "file is a file where a folder is needed",
    "no workers": "--workers: must be at least 1 (got 0)",
    "a table's data nowhere": "--data nowhere is not a folder",
    "an unknown family": "there are uea, uea-modern, lra",
    "no such recipe": "no recipe has 'cats' in its name",
}


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.replace(" ", "-"))
def test_user_errors_are_one_line_and_exit_code_2(mistake: str, workplace: Path, primal, monkeypatch) -> None:
    (workplace / "file").touch()
    (workplace / "own.py").touch()
    (workplace / "broken.py").write_text("undefined")
    (workplace / "damaged").mkdir()
    (workplace / "damaged" / "config.yaml").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = primal(*WRONG[mistake])
    assert code == 2
    assert err.startswith("primal: ")
    assert err.count("\n") == 1, err
    assert MESSAGES.get(mistake, "") in err


def test_a_missing_package_names_the_extra(primal, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    code, _, err = primal("train", "uea/JapaneseVowels")
    assert code == 2
    assert "pip install 'primal-attention[train]'" in err


def test_recipes_and_info(primal) -> None:
    assert "uea/JapaneseVowels" in primal("recipes")[1]
    assert "uea/" not in primal("recipes", "lra")[1]
    out = primal("info")[1]
    assert "causal, data-dependent  reference  not cpu: it has no causal data-dependent mode" in out
    assert "[train] lightning" in out


def test_a_small_demo(workplace: Path, primal) -> None:
    pytest.importorskip("aeon")
    pytest.importorskip("matplotlib")
    code, out, _ = primal("demo", "--epochs", "1", "--max-length", "128", "--out", "demo")
    assert code == 0
    numbers = json.loads((workplace / "demo" / "demo.json").read_text())
    assert [r["attention"] for r in numbers["results"]] == ["primal", "softmax"]
    assert numbers["results"][0]["objective"].keys() == {"first", "last"}
    assert (workplace / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "test accuracy" in out


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    words = [sys.executable, "-m", "primal_attention", "--help"]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: primal COMMAND ?" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "primal_attention", "recipes"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left on device" in done.stderr
