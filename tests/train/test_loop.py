"""Runs: repeatable, resumable after a kill, evaluated by both protocols, extended, logged."""

import importlib.util
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy
from faults import assert_resumes_to_the_same, assert_same, cut_off
from toy import rows

from primal_attention.cli import main as cli
from primal_attention.nn.baselines.performer import PerformerAttention
from primal_attention.nn.baselines.reformer import ReformerAttention
from primal_attention.train import loop
from primal_attention.train.task import TrainingModule
from primal_attention.utils.errors import DivergedError, RunError


@pytest.fixture(scope="module")
def both(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """One run with both protocols."""
    place = tmp_path_factory.mktemp("runs") / "both"
    return place, loop.train(toy.recipe(toy_folder, protocol="both"), place, name="uea-modern/Toy")


def test_a_run_has_its_files_and_separate_scores_by_protocol(both):
    place, summary = both
    for part in ("", "validation"):
        names = {p.name for p in (place / part).iterdir()}
        assert {"config.yaml", "metrics.csv", "checkpoints", "model.safetensors", "summary.json"} <= names
    assert set(summary["scores"]) == {"last", "best_on_test", "validation_chosen"}
    main, validation = rows(place), rows(place / "validation")
    assert summary["scores"]["last"]["accuracy"] == main[-1]["test_accuracy"]
    best = max(r["test_accuracy"] for r in main)
    assert summary["scores"]["best_on_test"]["accuracy"] == best
    assert "test_accuracy" not in validation[0], "training with validation samples must not look at test"
    chosen = summary["scores"]["validation_chosen"]
    assert chosen["validation_accuracy"] == max(r["val_accuracy"] for r in validation)
    for row in main:
        assert row["loss"] == pytest.approx(row["task_loss"] + 0.1 * row["ksvd_loss"], rel=1e-5)
        assert "J" in row


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_run_killed_or_stopped_at_any_moment_resumes_to_bit_identical_weights(tmp_path: Path):
    script = Path(__file__).with_name("faults.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_a_run_cut_off_between_two_checkpoints_chooses_the_same_weights(both, toy_folder: Path, tmp_path: Path):
    recipe = toy.recipe(toy_folder, protocol="validation", trainer__checkpoint_every=2)
    cut_off(recipe, tmp_path, step=7)
    loop.train(recipe, tmp_path, resume=True)
    assert_same(tmp_path, both[0] / "validation")


def test_watching_test_changes_neither_the_training_nor_what_is_chosen(both, toy_folder: Path, tmp_path: Path):
    loop.train(toy.recipe(toy_folder, protocol="validation", watch_test=True), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (both[0] / "validation" / "model.safetensors").read_bytes()
    rows, usual = ((f / "metrics.csv").read_text().splitlines() for f in (tmp_path, both[0] / "validation"))
    assert rows[0].endswith("test_accuracy,test_loss")
    assert "test" not in usual[0]
    assert [row.rsplit(",", 2)[0] for row in rows] == usual


@pytest.mark.parametrize(("attention", "checkpoint_steps", "graph"), [("performer", 2, "on"), ("reformer", 0, "off")])
def test_random_features_and_hashes_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    attention: str, checkpoint_steps: int, graph: str, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Draws that matter within twelve steps, and on short series.
    monkeypatch.setitem(PerformerAttention.__init__.__kwdefaults__, "redraw_every", 3)
    monkeypatch.setitem(ReformerAttention.__init__.__kwdefaults__, "chunk", 3)
    monkeypatch.setattr(loop, "GATHERED", 1)
    changes = {"model__attention": (attention,), "optim__name": "adamw", "trainer__graph": graph}
    recipe = toy.recipe(toy_folder, trainer__checkpoint_steps=checkpoint_steps, **changes)
    assert_resumes_to_the_same(recipe, tmp_path, step=7)


# Extended runs

CONSTANT = {"optim__schedule": "constant", "trainer__ema": 0.9}


def test_an_extended_run_is_a_longer_run(toy_folder: Path, tmp_path: Path):
    one, two, three = (
        toy.recipe(toy_folder, protocol="both", trainer__epochs=epochs, **CONSTANT) for epochs in (1, 2, 3)
    )
    loop.train(three, tmp_path / "uninterrupted")
    loop.train(one, tmp_path / "run", name="first")
    summary = loop.train(three, tmp_path / "run", resume=True, command="second")
    for part in ("", "validation"):
        assert_same(tmp_path / "run" / part, tmp_path / "uninterrupted" / part)
    assert (summary["epochs"], summary["config"]["trainer"]["epochs"]) == (3, 3)
    assert summary["extended_by"] == ["second"]
    assert loop.train(three, tmp_path / "run", resume=True) == summary, "and is finished again"
    with pytest.raises(RunError, match=r"started with --trainer\.epochs 3, not 2"):
        loop.train(two, tmp_path / "run", resume=True)


def test_an_inverse_sqrt_schedule_keeps_its_warmup_when_a_run_is_extended(toy_folder: Path, tmp_path: Path):
    def recipe(epochs: int) -> Any:
        return toy.recipe(toy_folder, optim__schedule="inverse-sqrt", optim__warmup=0.5, trainer__epochs=epochs)

    loop.train(recipe(2), tmp_path)
    loop.train(recipe(4), tmp_path, resume=True)
    rates = [row["lr"] for row in rows(tmp_path)]  # of the last step of each epoch; the warmup was 4 steps
    assert rates == pytest.approx([1e-3 * (4 / step) ** 0.5 for step in (4, 8, 12, 16)])


def test_a_schedule_that_ends_at_zero_needs_a_new_one(toy_folder: Path, tmp_path: Path, capsys):
    words = ["train", "uea-modern/Toy", "--data.folder", str(toy_folder), "--out", str(tmp_path / "run"), *toy.FLAGS]
    assert cli.main(words) == 0
    capsys.readouterr()
    assert cli.main([*words, "--trainer.epochs", "2", "--resume"]) == 2
    err = capsys.readouterr().err
    assert "cannot go on to 2 epochs: its learning rate (--optim.schedule onecycle) ends at zero after 1" in err
    assert err.count("\n") == 1
    for _ in range(2):  # the second time the run is finished
        assert cli.main([*words, "--trainer.epochs", "2", "--resume", "--optim.schedule", "constant"]) == 0
    assert len(rows(tmp_path / "run")) == 2


# Loggers


def without_service(name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace Lightning's logger of a package that is not installed; return the arguments of its runs."""
    module = importlib.import_module("lightning.pytorch.loggers")
    path = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}[name]
    signature, made = inspect.signature(getattr(module, path)), list[dict[str, Any]]()

    class Logger:
        experiment, run_id = None, "one"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(signature.bind(*args, **kwargs).arguments)

        def log_metrics(self, row: dict[str, Any], step: int) -> None: ...

        def finalize(self, status: str) -> None: ...

    monkeypatch.setattr(module, path, Logger)
    monkeypatch.setattr(loop, "check_loggers", lambda names: None)
    return made


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_losses_and_scores_reach_the_loggers(name: str, toy_folder: Path, tmp_path: Path, monkeypatch):
    is_installed = importlib.util.find_spec(name) is not None
    made_runs = [] if is_installed else without_service(name, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged: list[tuple[set[str], int]] = []
    made = loop.make_loggers

    def spy(*args: Any) -> dict[str, Any]:
        loggers = made(*args)
        log = loggers[name].log_metrics
        loggers[name].log_metrics = lambda row, step: (logged.append((set(row), step)), log(row, step))
        return loggers

    monkeypatch.setattr(loop, "make_loggers", spy)
    recipe = toy.recipe(toy_folder, trainer__logger=("csv", name), trainer__epochs=2)
    cut_off(recipe, tmp_path / "run", step=6)
    loop.train(recipe, tmp_path / "run", resume=True)
    wanted = {"task_loss", "J_encoder.blocks.0.attention", "lr", "samples_per_second", "test_accuracy"}
    assert [step for keys, step in logged if wanted <= keys] == [4, 8]
    found = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and {name, "mlruns"} & set(p.parts)]
    assert found or not is_installed, "nothing was written"
    for first, second in itertools.pairwise(made_runs):  # the resumed run continues the run of the service
        assert second["run_id" if name == "mlflow" else "id"] == ("one" if name == "mlflow" else first["id"])
    assert len(rows(tmp_path / "run")) == 2


def test_a_logger_without_its_package_is_one_line(toy_folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"trainer\.logger wandb needs wandb: pip install wandb"):
        loop.train(toy.recipe(toy_folder, trainer__logger=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Finished runs and bad recipes


def test_a_folder_with_a_run_is_neither_trained_again_nor_overwritten(both, toy_folder: Path):
    place, summary = both
    recipe, last = toy.recipe(toy_folder, protocol="both"), place / "checkpoints" / "last.ckpt"
    before = last.stat().st_mtime_ns
    assert loop.train(recipe, place, resume=True) == summary
    with pytest.raises(RunError, match="already holds a run: add --resume"):
        loop.train(recipe, place)
    with pytest.raises(RunError, match=r"started with --model\.rank 3, not 4"):
        loop.train(toy.recipe(toy_folder, protocol="both", model__rank=4), place, resume=True)
    assert last.stat().st_mtime_ns == before


def test_a_run_folder_of_another_version_says_so(both, tmp_path: Path):
    place, _ = both
    other = tmp_path / "old"
    other.mkdir()
    for file in ("config.yaml", "summary.json"):
        (other / file).write_text(re.sub(r'("?format"?): 1', r"\1: 0", (place / file).read_text()))
    with pytest.raises(RunError, match=r"in format 0; this is version .* reads format 1"):
        loop.evaluate(other)
    (other / "summary.json").unlink()
    with pytest.raises(RunError, match="run has not finished"):
        loop.evaluate(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__attention": ("softmax",)},
        {"model__attention": ("linear", "primal"), "trainer__precision": "bf16-mixed"},
        {"trainer__ema": 0.0},
        {"model__kind": "paper"},
        {"model__r_scores": False},
    ],
    ids=str,
)
def test_variants_train(changes, toy_folder: Path, tmp_path: Path):
    summary = loop.train(toy.recipe(toy_folder, trainer__epochs=1, **changes), tmp_path / "run")
    assert summary["scores"]["last"]["epoch"] == 1
    assert (summary["objective"] is None) == (summary["primal_layers"] == 0)
    assert loop.evaluate(tmp_path / "run")[""] == summary["test"]


def test_a_loss_that_is_not_finite_ends_a_run(toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"trainer__epochs": 5}, {"trainer__epochs": 1, "trainer__steps_per_epoch": 1}  # only its weights diverge
    recipe, last = (toy.recipe(toy_folder, optim__lr=1e30, optim__warmup=0.0, **size) for size in sizes)
    message = r"by step \d+ \(epoch \d+\): try a smaller --optim\.lr"
    for name, each in {"run": recipe, "last": last}.items():
        with pytest.raises(DivergedError, match=message):
            loop.train(each, tmp_path / name)
    # As on a GPU, where the loss is checked every so many steps: found before the epoch is evaluated.
    monkeypatch.setattr(TrainingModule, "count_step", lambda self: setattr(self, "_steps", self._steps + 1))
    with pytest.raises(DivergedError, match=message):
        loop.train(recipe, tmp_path / "late")
    assert not list(tmp_path.rglob("model.safetensors"))
