"""Schedules, averaged weights, and recorded steps that train as eager ones."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from faults import cut_off
from safetensors.torch import load_file
from torch import nn
from toy import PLAIN, rows

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.train import loop
from primal_attention.train.config import OptimConfig, override
from primal_attention.train.step import TrainingStep, learning_rate, pair_states, records_steps, update_average
from primal_attention.train.task import TrainingModule
from primal_attention.utils.errors import RunError


def test_one_cycle_goes_up_to_the_peak_and_down_to_zero():
    rate = learning_rate(OptimConfig(lr=2.0, schedule="onecycle", warmup=0.3), total=100)
    rates = [rate(step) for step in range(101)]
    assert max(rates) == rates[30] == 2.0
    assert rates[0] == pytest.approx(2 / 25)
    assert rates[100] == pytest.approx(0.0)
    straight = learning_rate(OptimConfig(lr=1.0, schedule="onecycle-linear", warmup=0.2), total=100)
    assert [straight(step) for step in (0, 10, 20, 60, 100)] == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("constant", [1, 1, 1, 1]), ("warmup", [0.5, 1, 1, 1]), ("inverse-sqrt", [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5])],
)
def test_schedules_without_an_end_do_not_depend_on_later_steps(schedule, factors):
    config = OptimConfig(lr=0.1, schedule=schedule, warmup=0.5)
    for total in (4, 400):
        rate = learning_rate(config, total, warmup_total=4)
        assert [rate(step) for step in range(4)] == pytest.approx([0.1 * factor for factor in factors])


@pytest.mark.parametrize("share", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_average_follows_weights_and_copies_counts_and_random_draws(share: float | torch.Tensor):
    model = nn.Sequential(make_attention("performer", 16, 2, seed=0), make_attention("reformer", 16, 2, seed=1))
    model.append(nn.BatchNorm1d(3))
    mean = copy.deepcopy(model)
    model[2].num_batches_tracked.fill_(7)
    for layer in model[:2]:
        layer.redraw()
        nn.init.constant_(layer.in_proj.weight, 3.0)
    half = torch.lerp(mean[0].in_proj.weight.detach(), torch.tensor(3.0), 0.5)
    update_average(*pair_states(mean, model), share)
    assert int(mean[2].num_batches_tracked) == 7
    assert torch.equal(mean[0].frequencies, model[0].frequencies)
    assert torch.equal(mean[1].coarse_rotations, model[1].coarse_rotations)
    assert torch.equal(mean[1].fine_rotations, model[1].fine_rotations)
    assert_close(mean[0].in_proj.weight, half, 1e-6)
    model[0].redraw()
    update_average(*pair_states(mean[0], model[0]), share)  # a layer that is the whole model
    assert torch.equal(mean[0].frequencies, model[0].frequencies)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainer__precision": "16-mixed"}, "loss scaling"),
        ({"trainer__devices": 2, "trainer__strategy": "ddp"}, "one device"),
    ],
)
def test_graph_on_names_what_it_needs_and_auto_runs_eagerly(toy_folder: Path, changes: dict[str, Any], reason: str):
    recipe = toy.recipe(toy_folder, trainer__graph="on", **changes)
    with pytest.raises(RunError, match=f"trainer.graph on needs .*{reason}.*--trainer.graph auto"):
        records_steps(recipe.trainer, torch.device("cuda"))
    assert not records_steps(override(recipe, {"trainer.graph": "auto"}).trainer, torch.device("cuda"))


# On a GPU

LONG = {"trainer__epochs": 8, "trainer__accelerator": "gpu"}  # 4 steps an epoch, the last of another size


def train(folder: Path, data: Path, graph: str, **changes: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="steps run without a CUDA graph.*")
        return loop.train(toy.recipe(data, trainer__graph=graph, **LONG, **changes), folder)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "radam"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_a_gpu_recorded_steps_give_the_numbers_of_eager_ones(
    toy_folder: Path, tmp_path: Path, optimizer: str, precision: str
):
    for graph in ("off", "on"):
        train(tmp_path / graph, toy_folder, graph, optim__name=optimizer, trainer__precision=precision, **PLAIN)
    a, b = rows(tmp_path / "off"), rows(tmp_path / "on")
    # Sums in another order, 32 steps long; in bfloat16 a rounding that tips over costs 2⁻⁸ of an activation.
    tolerance = 1e-3 if precision == "32-true" else 3e-2
    for x, y in zip(a, b, strict=True):
        assert (x["step"], x["epoch"]) == (y["step"], y["epoch"])
        assert x["lr"] == pytest.approx(y["lr"], rel=1e-6)
        assert x["loss"] == pytest.approx(y["loss"], rel=tolerance)
        assert x["J"] == pytest.approx(y["J"], rel=tolerance, abs=tolerance)
    weights = [load_file(tmp_path / graph / "model.safetensors") for graph in ("off", "on")]
    for name, weight in weights[0].items():  # the averaged ones
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=10 * tolerance)


@pytest.mark.gpu
def test_on_a_gpu_steps_are_recorded_and_draw_anew(toy_folder: Path, tmp_path: Path, monkeypatch):
    found: list[TrainingStep] = []
    usual = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda self, b: (found.append(self), usual(self, b))[1])
    replays: list[float] = []
    count = TrainingModule.count_step

    def look(self: TrainingModule) -> None:
        replays.append(float(self._sums["loss"]))
        count(self)

    monkeypatch.setattr(TrainingModule, "count_step", look)
    train(tmp_path, toy_folder, "on", optim__lr=1e-12, trainer__steps_per_epoch=12)
    assert found[-1].recordings, "no step was recorded"
    steps = torch.tensor(replays).view(8, 12).diff(dim=1).flatten()
    assert len({round(float(s), 5) for s in steps}) > len(steps) // 2, "replays repeat each other's random numbers"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["softmax", "performer", "reformer", "linformer", "nystrom", "primal+"])
def test_on_a_gpu_every_attention_trains(toy_folder: Path, tmp_path: Path, attention: str):
    recipe = toy.recipe(toy_folder, trainer__graph="on", model__attention=(attention,), **LONG, **PLAIN)
    summary = loop.train(recipe, tmp_path / "on")
    loop.train(override(recipe, {"trainer.graph": "off"}), tmp_path / "off")
    a, b = rows(tmp_path / "off"), rows(tmp_path / "on")
    assert a[-1]["loss"] == pytest.approx(b[-1]["loss"], rel=1e-2)
    assert summary["epochs"] == 8


@pytest.mark.gpu
def test_on_a_gpu_a_recorded_run_resumes(toy_folder: Path, tmp_path: Path):
    recipe = toy.recipe(toy_folder, trainer__graph="on", **LONG, **PLAIN)
    loop.train(recipe, tmp_path / "whole")
    cut_off(recipe, tmp_path / "cut", step=21)
    loop.train(recipe, tmp_path / "cut", resume=True)
    for x, y in zip(rows(tmp_path / "whole"), rows(tmp_path / "cut"), strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-3)
        assert (x["step"], x["lr"]) == (y["step"], y["lr"])


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_cannot_be_recorded_runs_as_usual(toy_folder: Path, tmp_path: Path, monkeypatch):
    usual = TrainingModule.losses

    def look_at_the_device(self: TrainingModule, batch: Any) -> Any:
        parts = usual(self, batch)
        float(parts["loss"])
        return parts

    monkeypatch.setattr(TrainingModule, "losses", look_at_the_device)
    recipe = toy.recipe(toy_folder, trainer__graph="on", **LONG)
    with pytest.warns(UserWarning, match="steps run without a CUDA graph") as caught:
        summary = loop.train(recipe, tmp_path)
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 1
    assert summary["epochs"] == 8
