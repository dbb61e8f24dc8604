"""The command: help with an example everywhere, exit code 0, or 2 with one line on stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toy

from primal_attention.cli import demo
from primal_attention.cli import main as cli
from primal_attention.data.lra import listops, pathfinder
from primal_attention.train import registry

PARTS = [f"bench {name}" for name in ("attention", "generate", "model", "lra", "plot")]
PARTS += ["data listops", "data pathfinder", "data retrieval"]


@pytest.mark.parametrize("command", [*cli.COMMANDS, *PARTS])
def test_every_command_has_help_with_an_example(command: str, primal) -> None:
    code, out, err = primal(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Example: primal {command}" in out


def test_help_lists_every_command(primal) -> None:
    code, out, _ = primal("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in cli.COMMANDS)
    assert primal()[:2] == primal("help")[:2] == (0, out)
    assert primal("--version")[1].strip()[0].isdigit()


def imported_modules(*commands: str) -> set[str]:
    """The top-level packages that commands import, in a process of its own."""
    script = f"""
import contextlib, sys
from primal_attention.cli.main import main
for command in {commands}:
    with contextlib.suppress(SystemExit):
        main(command.split())
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_help_and_recipes_start_without_torch() -> None:
    heavy = {"torch", "numpy", "lightning", "tyro", "rich", "aeon", "transformers", "yaml"}
    pages = [f"{command} --help" for command in (*cli.COMMANDS, *PARTS) if not command.startswith("data")]
    assert not imported_modules("--help", "recipes", *pages) & heavy
    assert "torch" not in imported_modules(*(f"{command} --help" for command in PARTS))
    assert "torch._dynamo" not in imported_modules("train uea/JapaneseVowels --help")  # it takes as long as torch


def test_flags_of_recipes_are_listed_without_the_training_libraries() -> None:
    recipes = ("uea/JapaneseVowels", "lra/text", "image/imagenette", "d4rl/hopper-medium", "lm/wikipedia")
    modules = imported_modules(*(f"train {recipe} --help" for recipe in recipes))
    assert not modules & {"lightning", "aeon", "transformers", "sklearn", "pandas"}


def test_train_then_evaluate_then_resume(workplace: Path, primal) -> None:
    words = ["train", "uea/Toy", *toy.FLAGS, "--protocol", "both", "--seed", "3"]
    words += ["--model.attention", "softmax", "primal"]
    code, out, err = primal(*words)
    assert (code, err) == (0, "")
    for column in ("LAST", "BEST ON TEST", "VALIDATION-CHOSEN"):
        assert column in out
    place = workplace / "runs" / "uea" / "Toy" / "softmax-primal-seed3"
    summary = json.loads((place / "summary.json").read_text())
    assert summary["seed"] == 3
    assert summary["command"].startswith("primal train uea/Toy")
    assert {"date", "commit", "dirty", "commit_source", "versions", "device"} <= summary.keys()
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
    assert primal("train", "my_recipes.py:quick", *toy.FLAGS)[0] == 0
    run = workplace / "runs" / "my_recipes" / "quick" / "primal-seed5"
    assert primal("evaluate", str(run))[0] == 0  # its class is one of the package
    assert primal("train", "my_recipes.py:mine", *toy.FLAGS, "--note", "typed", "--out", "own")[0] == 0
    monkeypatch.setattr(registry, "_OWN_TYPES", {})  # as in a new process
    code, _, err = primal("evaluate", "own")
    assert code == 2
    assert "a recipe of your own needs --recipes FILE.py" in err
    code, out, _ = primal("evaluate", "own", "--recipes", "my_recipes.py")
    assert (code, out.count("as in the run")) == (0, 1)


WRONG = {
    "trian": "did you mean 'train'",
    "train": "which recipe?",
    "train --seed 3": "the recipe comes first",
    "train uae/JapaneseVowels": "did you mean uea/JapaneseVowels",
    "train uea-moden/Handwriting": "did you mean uea-modern/Handwriting",
    "train lra": "did you mean lra/",
    "train uea": "which data set? primal train uea/NAME, or primal train uea --data.file FILE",
    "train uea --data.test-file x.npz": "data.test-file needs --data.file",
    "train uea --data.file x.npz": "x.npz",
    "train uea/Tooy": "did you mean Toy",
    "train uea/Toy --trainer.no-tensorboard": "tensorboard was replaced: use --trainer.logger csv tensorboard",
    "train lra/listops --data.kinds=4": "--data.kinds was replaced: use --data.length-buckets",
    "train uea/Toy --sed 3": "did you mean --seed",
    "train uea/Toy --no-trainer.progress": "did you mean --trainer.progress?",
    "train uea/Toy --model.attention primel": "did you mean 'primal'",
    "train uea/Toy --model.num-heads 7": "num_heads=7",
    "train uea-modern/Toy --augment.warp inf": "augment.warp must be a finite number (got inf)",
    "table uea --sets Toy --set optim.lr=1e999": "optim.lr must be a finite number (got inf)",
    "train uea/Toy --model.rank 3 --trainer.devices 2": "--trainer.strategy ddp",
    "train uea/Toy --trainer.accelerator gpu": "trainer.accelerator gpu",
    "train own.py:slow": "own.py has no recipe 'slow'",
    "train own.py": "use own.py:NAME",
    "train nowhere.py:slow": "nowhere.py is not a file",
    "train broken.py:slow": "broken.py cannot be run (NameError: name 'undefined' is not defined)",
    "evaluate": "required: RUN",
    "export nothing model.onnx": "nothing does not exist",
    "export nothing model.pt": "FILE must end in .onnx (got model.pt)",
    "evaluate data": "data is not a run folder",
    "evaluate file": "file is a file where a folder is needed",
    "data listops --out file": "file already holds a set or other files",
    "table uae": "did you mean 'uea'?",
    "table": "required: NAME",
    "table uea --no-run --seeds 2": "run 'primal table uea --seeds 2' first",
    "table uea --models primel": "did you mean 'primal'?",
    "table uea --sets Tooy": "did you mean Toy?",
    "table lra-ablation --models eta-s": "no model of this table is called 'eta-s'",
    "table uea --sets Toy --set epochs": "FIELD=VALUE",
    "table uea --sets Toy --set trainer.speed=1": "trainer.speed is not a field",
    "table uea --sets Toy --set seed=1": "cannot change seed",
    "table lra --any-length": "add --no-run",
    "table lra --sets text": "no train split",
    "table uea-efficiency --sets Toy --launcher ray": "local launcher",
    "table uea-efficiency --sets Toy --workers 99": "must not share a device",
    "table lra-efficiency --no-run": "has no result of this table",
    "table uea-modern --sets Tooy": "did you mean Toy?): get it from",
    "table uea-modern --sets Toy --models flow": "no model of this table is called 'flow'",
    "table uea-modern --sets Toy --holdout 1.5": "--holdout must be at least 0 and below 1 (got 1.5)",
    "table uea-modern --set epoch=3": "no parameter of PrimalClassifier is called 'epoch': did you mean 'epochs'?",
    "table uea-modern --recipe uea": "--recipe has no meaning for uea-modern",
    "table uea --holdout 0.2": "--holdout has no meaning for uea",
    "table uea --workers 0": "--workers: must be a whole number of at least 1, below 2^63 (got '0')",
    "table uea --data nowhere": "--data nowhere is not a folder",
    "table uea --recipe eua": "no recipe family of uea is called 'eua': did you mean 'uea'? there are uea, uea-modern",
    "table lra --recipe uea": "no recipe family of lra is called 'uea': there are lra, lra-short, lra-modern",
    "table lra-efficiency --set trainer.epochs=2": "--set has no meaning for lra-efficiency",
    "table uea --threads 3": "--threads has no meaning for uea",
    "table uea --seed 3": "unrecognized arguments: --seed 3; did you mean --seeds?",
    "table uea --no-run --results file": "--results file is not a folder",
    "report": "required: RUNS",
    "report nowhere --skip-broken": "nowhere does not exist",
    "report data": "data holds no run",
    "report data -o data": "data is a folder: --out must be a file",
    "report foreign.json": "foreign.json is neither the result of a run nor of primal bench attention or generate",
    "report old.json": "format 99; this is version",
    "recipes cats": "no recipe has 'cats' in its name",
    "info --nonsense": "unrecognized arguments: --nonsense",
    "bench decode": "decode is now called generate",
    "bench attention --rivals": "--rivals is now called --baselines",
    "bench attention --lengths 4Q": "4096, 4K or 1M (got '4Q')",
    "bench attention --widths 512x8": "such as 512:8 (got '512x8')",
    "bench attention --widths 100:8": "divisible by num_heads",
    "bench attention --device tpu": "--device must be cpu, cuda or cuda:N (got 'tpu')",
    "bench attention --tokens 1024 --batch 2": "exclude each other",
    "bench attention --decay learned": "--decay needs --causal",
    "bench attention --decay soon --causal": "--decay must be 'learned' or a number (got 'soon')",
    "bench attention --only sdpaa": "did you mean 'sdpa'?",
    "bench generate --only lstm": "no implementation is called 'lstm': there are sdpa, primal",
    "bench attention --out /proc/nowhere": "--out /proc/nowhere cannot be written to",
    "bench model --rows vitt": "no row is called 'vitt': did you mean 'vit'? there are 512x1024, 512x1024-",
    "bench plot no-such-file.json": "no-such-file.json does not exist",
    "bench plot other.json": "other.json: hardware is missing",
    "data imdb": "no command of primal data is called 'imdb'",
    "data listops --valid 1K": "--valid: must be a whole number of at least 1, below 2^63 (got '1K')",
    "data listops --seed -1": "--seed: must be a whole number of at least 0, below 2^63 (got '-1')",
    f"generate primal-lm-tiny --prompt a --seed {2**63}": "--seed: must be a whole number of at least 0, below 2^63",
    "generate primal-lm-tiny --prompt a --device meta": "--device must be cpu, cuda or cuda:N (got 'meta')",
    "generate primal-lm-tiny --prompt a --top-p 2": "--top-p must lie in (0, 1] (got 2.0)",
    "generate primal-lm-tny --prompt a": "the package includes no model of this name",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words.replace(" ", "-"))
def test_user_errors_are_one_line_and_exit_code_2(words: str, workplace: Path, primal, monkeypatch) -> None:
    (workplace / "file").touch()
    (workplace / "own.py").touch()
    (workplace / "other.json").write_text('{"format": 1, "kind": "attention", "rows": []}')
    (workplace / "foreign.json").write_text('{"a": 1}')
    (workplace / "old.json").write_text('{"scores": {}, "format": 99}')
    (workplace / "broken.py").write_text("undefined")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = primal(*words.split())
    assert code == 2
    assert err.startswith("primal: ")
    assert err.count("\n") == 1, err
    assert WRONG[words] in err


def test_a_missing_package_names_the_extra(primal, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    code, _, err = primal("train", "uea/JapaneseVowels")
    assert code == 2
    assert "pip install 'primal-attention[train]'" in err


def test_recipes_and_info(primal) -> None:
    assert "uea/JapaneseVowels" in primal("recipes")[1]
    assert "uea/" not in primal("recipes", "LRA")[1]
    out = primal("info")[1]
    assert "causal, data-dependent  reference  not cpu: it has no causal data-dependent mode" in out
    assert "[train] lightning" in out


def test_a_small_demo(workplace: Path, primal, monkeypatch) -> None:
    monkeypatch.setattr(demo, "MIN_CPU_SHARE", 2.0)  # as on a machine with other work
    code, out, _ = primal("demo", "--epochs", "1", "--max-length", "128", "--out", "demo")
    assert code == 0
    numbers = json.loads((workplace / "demo" / "demo.json").read_text())
    assert len(numbers["data_sha256"]) == 64
    assert [r["attention"] for r in numbers["results"]] == ["softmax", "primal"]
    assert numbers["results"][1]["objective"].keys() == {"first", "last"}
    assert (workplace / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "mathdefault" not in (workplace / "demo" / "demo.svg").read_text(encoding="utf-8")
    assert "test accuracy" in out
    assert "disturbed the timing" in out


@pytest.mark.parametrize("task", [listops, pathfinder], ids=["listops", "pathfinder"])
def test_a_set_is_made_where_the_recipe_reads_it(task: ModuleType, tmp_path: Path, primal, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = task.__name__.rpartition(".")[2]
    code, out, _ = primal("data", name, "--train", "4", "--valid", "2", "--test", "2")
    assert (code, out.splitlines()[0]) == (0, f"8 samples in data/lra/{name}")
    assert [len(s) for s in task.load(tmp_path / "data" / "lra" / name).splits.values()] == [4, 2, 2]


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    words = [sys.executable, "-m", "primal_attention", "--help"]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: primal COMMAND ?" in done.stdout


@pytest.mark.parametrize("command", ["recipes", "table lra-efficiency"])
def test_a_closed_pipe_ends_the_command(command: str) -> None:
    words = [sys.executable, "-m", "primal_attention", *command.split()]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "primal_attention", "recipes"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left on device" in done.stderr
