"""Runs: repeatable, resumable after a kill, measured by both protocols, stopped with a reason."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from power_cut import PowerCutError, assert_resumes_to_the_same

from primal_attention.nn.baselines.performer import PerformerAttention
from primal_attention.nn.baselines.reformer import ReformerAttention
from primal_attention.train import callbacks, runner
from primal_attention.train import cuda_graph as graphed
from primal_attention.train.readers import read_weights
from primal_attention.utils.errors import DivergedError, RunError


@pytest.fixture(scope="module")
def both(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """One run with both protocols."""
    place = tmp_path_factory.mktemp("runs") / "both"
    return place, runner.train(toy.recipe(toy_folder, protocol="both"), place, name="uea-modern/Toy")


def rows(place: Path) -> list[dict[str, str]]:
    with (place / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_folder_has_its_files_and_no_leftovers(both):
    place, _ = both
    for part in ("", "validation"):
        names = {p.name for p in (place / part).iterdir()}
        assert {"config.yaml", "metrics.csv", "checkpoints", "model.safetensors", "summary.json"} <= names
    assert not list(place.rglob("*.partial"))


def test_the_protocols_stand_apart(both):
    place, summary = both
    assert set(summary["scores"]) == {"last", "best_on_test", "validation_chosen"}
    main, held = rows(place), rows(place / "validation")
    assert summary["scores"]["last"]["accuracy"] == float(main[-1]["test_accuracy"])
    best = max(float(r["test_accuracy"]) for r in main)
    assert summary["scores"]["best_on_test"]["accuracy"] == best
    assert "test_accuracy" not in held[0], "the training that held cases out must not look at test"
    chosen = summary["scores"]["validation_chosen"]
    assert chosen["validation_accuracy"] == max(float(r["val_accuracy"]) for r in held)
    assert chosen["retrained_accuracy"] == float(main[chosen["epoch"] - 1]["test_accuracy"])


def test_losses_and_j_are_logged_apart(both):
    place, _ = both
    for row in rows(place):
        assert float(row["loss"]) == pytest.approx(float(row["task_loss"]) + 0.1 * float(row["ksvd_loss"]), rel=1e-5)
        assert "J" in row


def test_evaluate_reproduces_the_test_number_exactly(both):
    place, summary = both
    again = runner.evaluate(place)
    assert again[""]["accuracy"] == summary["scores"]["last"]["accuracy"]
    assert again[""]["loss"] == summary["scores"]["last"]["loss"]
    assert again["validation"]["loss"] == summary["scores"]["validation_chosen"]["loss"]


def test_the_same_recipe_twice_gives_identical_files(both, toy_folder: Path, tmp_path: Path):
    place, _ = both
    runner.train(toy.recipe(toy_folder), tmp_path / "again")
    for file in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (place / file).read_bytes()
    runner.train(toy.recipe(toy_folder, seed=1), tmp_path / "other")
    assert (tmp_path / "other" / "metrics.csv").read_bytes() != (place / "metrics.csv").read_bytes()


@pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_run_killed_at_any_moment_resumes_to_bit_identical_weights(tmp_path: Path):
    script = Path(__file__).with_name("killed.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 7
    assert all(line.endswith(": same") for line in lines), done.stdout


def test_a_run_cut_off_between_two_checkpoints_chooses_the_same_weights(
    both, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = toy.recipe(toy_folder, protocol="validation", trainer__checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(callbacks.RunState, "on_train_epoch_start", fail_in_epoch(3, callbacks.RunState))
        with pytest.raises(PowerCutError):
            runner.train(recipe, tmp_path)
    runner.train(recipe, tmp_path, resume=True)
    for file in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / file).read_bytes() == (both[0] / "validation" / file).read_bytes()


def test_watching_test_changes_neither_the_training_nor_what_is_chosen(both, toy_folder: Path, tmp_path: Path):
    runner.train(toy.recipe(toy_folder, protocol="validation", watch_test=True), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (both[0] / "validation" / "model.safetensors").read_bytes()
    rows, usual = ((f / "metrics.csv").read_text().splitlines() for f in (tmp_path, both[0] / "validation"))
    assert rows[0].endswith("test_accuracy,test_loss")
    assert "test" not in usual[0]
    assert [row.rsplit(",", 2)[0] for row in rows] == usual


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("checkpoint_steps", [0, 2])
@pytest.mark.parametrize("attention", ["performer", "reformer"])
def test_random_features_and_hashes_of_a_run_cut_off_are_those_of_an_unbroken_one(
    attention: str, checkpoint_steps: int, graph: str, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Draws that matter within twelve steps, and on short series.
    monkeypatch.setitem(PerformerAttention.__init__.__kwdefaults__, "redraw_every", 3)
    monkeypatch.setitem(ReformerAttention.__init__.__kwdefaults__, "chunk", 3)
    monkeypatch.setattr(graphed, "GROUP", 1)
    changes = {"model__attention": (attention,), "optim__name": "adamw", "trainer__graph": graph}
    recipe = toy.recipe(toy_folder, trainer__checkpoint_steps=checkpoint_steps, **changes)
    assert_resumes_to_the_same(recipe, tmp_path, step=7)


def test_the_oldest_lightning_that_installs_resumes_within_an_epoch():
    # Up to 2.4 it starts such an epoch anew, which throws away where the run stood, without a word.
    wanted = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    oldest = [tuple(map(int, found.split("."))) for found in re.findall(r'"lightning>=([\d.]+)', wanted)]
    assert oldest
    assert all(version >= (2, 5) for version in oldest)


def fail_in_epoch(number: int, kind: type[callbacks.RunState]) -> Any:
    usual = kind.on_train_epoch_start

    def hook(self: callbacks.RunState, trainer: Any, module: Any) -> None:
        if trainer.current_epoch + 1 == number:
            raise PowerCutError
        usual(self, trainer, module)

    return hook


def test_a_finished_run_is_not_trained_again(both, toy_folder: Path):
    place, summary = both
    before = (place / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    assert runner.train(toy.recipe(toy_folder, protocol="both"), place, resume=True) == summary
    assert (place / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


def test_a_folder_with_a_run_is_not_overwritten(both, toy_folder: Path):
    place, _ = both
    with pytest.raises(RunError, match="already holds a run: add --resume"):
        runner.train(toy.recipe(toy_folder, protocol="both"), place)
    with pytest.raises(RunError, match=r"started with --trainer\.epochs 3, not 9"):
        runner.train(toy.recipe(toy_folder, protocol="both", trainer__epochs=9), place, resume=True)


def test_a_run_folder_of_another_version_says_so(both, tmp_path: Path):
    place, _ = both
    other = tmp_path / "old"
    other.mkdir()
    for file in ("config.yaml", "summary.json"):
        (other / file).write_text(re.sub(r'("?format"?): 1', r"\1: 0", (place / file).read_text()))
    with pytest.raises(RunError, match=r"in format 0; this is version .* reads format 1"):
        runner.evaluate(other)
    (other / "summary.json").unlink()
    with pytest.raises(RunError, match="run has not finished"):
        runner.evaluate(other)
    with pytest.raises(RunError, match="nothing is not a run folder"):
        runner.evaluate(tmp_path / "nothing")


def test_early_stopping_needs_held_out_cases_and_stops(toy_folder: Path, tmp_path: Path):
    with pytest.raises(RunError, match="needs held-out cases"):
        runner.train(toy.recipe(toy_folder, trainer__early_stop=1), tmp_path / "a")
    stopping = toy.recipe(toy_folder, protocol="validation", trainer__early_stop=2, trainer__epochs=40, optim__lr=1e-9)
    summary = runner.train(stopping, tmp_path / "b")
    assert summary["epochs"] < 40
    assert set(summary["scores"]) == {"validation_chosen"}


def test_a_recipe_that_cannot_be_built_leaves_no_folder(toy_folder: Path, tmp_path: Path):
    with pytest.raises(RunError, match="embed_dim must be divisible by num_heads"):
        runner.train(toy.recipe(toy_folder, model__num_heads=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attention", [("softmax",), ("primal+",), ("linear", "primal"), ("flow",)], ids="-".join)
def test_any_attention_trains_and_j_is_kept_where_there_is_one(attention, toy_folder: Path, tmp_path: Path):
    summary = runner.train(toy.recipe(toy_folder, model__attention=attention, trainer__epochs=1), tmp_path / "run")
    assert (summary["objective"] is None) == (summary["primal_layers"] == 0)


@pytest.mark.parametrize(
    "changes",
    [{"trainer__precision": "bf16-mixed"}, {"trainer__accumulate": 2}, {"model__kind": "paper"}, {"trainer__ema": 0.0}],
    ids=str,
)
def test_variants_train(changes, toy_folder: Path, tmp_path: Path):
    summary = runner.train(toy.recipe(toy_folder, trainer__epochs=1, **changes), tmp_path / "run")
    assert summary["scores"]["last"]["epoch"] == 1
    assert runner.evaluate(tmp_path / "run")[""] == summary["test"]


def test_a_model_learns_the_toy_set(toy_folder: Path, tmp_path: Path):
    easy = toy.recipe(toy_folder, trainer__epochs=80, model__dropout=0.0, optim__lr=1e-2, trainer__evaluate_every=80)
    summary = runner.train(easy, tmp_path / "run")
    assert summary["scores"]["last"]["accuracy"] > 0.6  # chance is a third
    assert summary["objective"]["last"] < summary["objective"]["first"]


def test_a_loss_that_is_not_finite_names_step_layer_and_cure(toy_folder: Path, tmp_path: Path):
    experiment = runner.build(toy.recipe(toy_folder).resolved())
    module = experiment.module
    batch = next(iter(experiment.train))
    assert "only the loss itself" in module.first_bad_layer(batch)
    with torch.no_grad():
        module.model.encoder.blocks[1].feed_forward[0].weight.fill_(torch.nan)
    assert "'encoder.blocks.1.feed_forward.0.weight'" in module.first_bad_layer(batch)
    with pytest.raises(DivergedError, match=r"step \d+ \(epoch \d+\): .*; try a smaller --optim\.lr"):
        runner.train(toy.recipe(toy_folder, optim__lr=1e30, optim__warmup=0.0, trainer__epochs=5), tmp_path / "run")


def test_saved_weights_are_the_averaged_ones(both, toy_folder: Path):
    place, _ = both
    experiment = runner.build(toy.recipe(toy_folder, protocol="last").resolved())
    experiment.module.final_model.load_state_dict(read_weights(place / "model.safetensors"))
    assert experiment.module.final_model is experiment.module.averaged
