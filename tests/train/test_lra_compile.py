"""Compiled trainings of the arena: the same files as without, graphs for training alone, one line where it fails."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from primal_attention.data.lra import listops
from primal_attention.models.lra import LRAClassifier
from primal_attention.train import loop as runner
from primal_attention.train.config import TrainerConfig, from_plain, override
from primal_attention.train.lra import LRARecipe, short_recipe
from primal_attention.train.task import compiles
from primal_attention.utils.errors import RunError

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALL = {
    "model.embed_dim": 8,
    "model.ffn_dim": 16,
    "model.rank": 3,
    "model.landmarks": 4,
    "trainer.epochs": 2,
    "trainer.steps_per_epoch": 4,
    "trainer.batch_size": 4,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "trainer.progress": False,
}


@pytest.fixture(scope="module")
def expressions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    shape = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=90)
    return listops.write(tmp_path_factory.mktemp("listops"), train=48, valid=6, test=6, shape=shape)


def small(folder: Path, **changes: Any) -> LRARecipe:
    given = {k.replace("__", "."): v for k, v in changes.items()}
    return override(short_recipe("listops"), {**SMALL, "data.folder": folder, **given})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each graph that is compiled: whether it is for gradients. They run as they are, so that no number changes."""
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(torch.is_grad_enabled())
        return graph.forward

    usual = LRAClassifier.compile
    monkeypatch.setattr(LRAClassifier, "compile", lambda self, **given: usual(self, backend=backend, **given))
    return found


@pytest.mark.parametrize(("attention", "graph"), [("primal+", "on"), ("reformer", "off")])
def test_a_compiled_training_is_the_training(
    expressions: Path, tmp_path: Path, graphs: list[bool], attention: str, graph: str
):
    """Batches of several widths, both kinds of loop, hashes that are drawn anew at every step."""
    for way in ("off", "on"):
        recipe = small(expressions, trainer__compile=way, trainer__graph=graph, model__attention=(attention,))
        runner.train(recipe, tmp_path / way)
    for file in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "on" / file).read_bytes() == (tmp_path / "off" / file).read_bytes()
    kinds = 2 if attention.endswith("+") else 1
    assert len(graphs) == 2 + kinds, "stem, mean and each kind of block: one graph for all widths"
    assert all(graphs), "evaluations run as written: their shapes come once"
    torch.compiler.reset()
    assert runner.evaluate(tmp_path / "on") == runner.evaluate(tmp_path / "off")


def test_where_auto_compiles(monkeypatch: pytest.MonkeyPatch):
    recipe = short_recipe("text").trainer
    assert recipe.compile == "auto"
    assert not compiles(override(recipe, {"accelerator": "cpu"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiles(recipe)
    for other in ({"accelerator": "cpu"}, {"devices": 2, "strategy": "ddp"}, {"deterministic": True}):
        assert not compiles(override(recipe, other))
        assert compiles(override(recipe, {**other, "compile": "on"}))
    assert not compiles(TrainerConfig())


def test_older_configurations_and_plain_yaml_say_true_and_false():
    assert from_plain(TrainerConfig, {"compile": False}).compile == "off"
    assert from_plain(TrainerConfig, {"compile": True, "graph": False}) == TrainerConfig(compile="on", graph="off")
    with pytest.raises(RunError, match=r"trainer.compile must be auto, on or off \(got True\)"):
        TrainerConfig(compile=True)  # type: ignore[arg-type]


def test_a_compiler_that_fails_is_one_line(expressions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        raise OSError("no compiler here")

    usual = LRAClassifier.compile
    monkeypatch.setattr(LRAClassifier, "compile", lambda self, **given: usual(self, backend=backend, **given))
    recipe = small(expressions, trainer__compile="on")
    with pytest.raises(RunError, match=r"no compiler here.*add --trainer.compile off"):
        runner.train(recipe, tmp_path / "run")


@pytest.mark.parametrize("marked", [pytest.param(None, marks=GPU)], ids=["gpu"])
@pytest.mark.parametrize(("attention", "kinds"), [("primal+", 2), ("reformer", 1)])
def test_on_a_gpu_compiled_steps_are_recorded_and_train_alike(
    expressions: Path, tmp_path: Path, attention: str, kinds: int, marked: None
):
    from torch._dynamo.utils import counters

    settings = {
        "model__attention": (attention,),
        "model__dropout": 0.0,
        "model__embed_dim": 32,
        "trainer__accelerator": "gpu",
        "trainer__precision": "bf16-mixed",
        "trainer__epochs": 4,
        "trainer__steps_per_epoch": 16,
    }
    losses = []
    for way in ("off", "auto"):
        counters.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "steps run without a CUDA graph")
            runner.train(small(expressions, trainer__compile=way, **settings), tmp_path / way)
        with (tmp_path / way / "metrics.csv").open() as file:
            losses.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)  # bfloat16, rounded in other places
    assert counters["stats"]["unique_graphs"] == 2 + kinds, "one graph of each part for all widths"
    assert not counters["graph_break"]
