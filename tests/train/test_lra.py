"""Long-Range Arena recipes: the paper's settings, steps for epochs, repeatable runs on sets made small."""

from __future__ import annotations

import csv
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import assert_resumes_to_the_same

from primal_attention.data.lra import listops, pathfinder
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.train import loop as runner
from primal_attention.train import lra, registry
from primal_attention.train.config import override
from primal_attention.train.lra import SHORT, TASKS, LRARecipe, build_from, paper_recipe, short_recipe
from primal_attention.utils.errors import DataError, RunError

SMALL = {
    "model.embed_dim": 8,
    "model.ffn_dim": 16,
    "model.rank": 3,
    "model.landmarks": 4,
    "trainer.epochs": 2,
    "trainer.steps_per_epoch": 3,
    "trainer.batch_size": 4,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "trainer.progress": False,
}


def small(task: str = "listops", folder: Path | None = None, **changes: Any) -> LRARecipe:
    given = {k.replace("__", "."): v for k, v in changes.items()}
    return override(paper_recipe(task), {**SMALL, "data.folder": folder, **given})


@pytest.fixture(scope="module")
def expressions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    shape = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=40)
    return listops.write(tmp_path_factory.mktemp("listops"), train=18, valid=6, test=6, shape=shape)


def made_up(task: str, *, pairs: bool = False) -> TokenData:
    rng = np.random.default_rng(0)

    def split(cases: int) -> TokenSplit:
        draw = [rng.integers(1, 20, (cases, 12), dtype=np.uint8) for _ in range(2)]
        for tokens in draw:
            tokens[0, 7:] = 0
        return TokenSplit(draw[0], np.arange(cases) % 2, draw[1] if pairs else None)

    return TokenData(task, split(8), split(4), split(4), vocabulary=20, classes=2, padded=True)


@pytest.mark.parametrize(
    ("task", "steps", "warmup", "batch", "former", "plus"),
    [
        ("listops", 5000, 1000, 32, (20, 0.1), (30, 0.05)),
        ("text", 20000, 8000, 32, (20, 0.05), (30, 0.1)),
        ("retrieval", 30000, 800, 32, (30, 0.0), (20, 0.05)),
        ("image", 35000, 175, 256, (30, 0.1), (30, 0.1)),
        ("pathfinder", 62400, 312, 256, (30, 0.1), (20, 0.05)),
    ],
)
def test_the_papers_settings(task, steps, warmup, batch, former, plus):
    recipe = registry.get(f"lra/{task}").resolved()
    trainer, optim, model = recipe.trainer, recipe.optim, recipe.model
    assert trainer.epochs * trainer.steps_per_epoch == steps
    assert round(optim.warmup * steps) == warmup
    assert trainer.batch_size == batch
    assert (optim.name, optim.lr, optim.eps, optim.weight_decay, optim.schedule) == (
        "adamw",
        1e-4,
        1e-6,
        0.0,
        "onecycle-linear",
    )
    assert (model.embed_dim, model.num_heads, model.layers, model.ffn_dim, model.dropout) == (64, 2, 2, 128, 0.1)
    assert (model.rank, recipe.eta, model.landmarks) == (*former, 10 * former[0])
    both = override(recipe, {"model.attention": ("primal+",), "model.rank": None, "model.landmarks": None, "eta": None})
    assert (both.resolved().model.rank, both.resolved().eta) == plus


@pytest.mark.parametrize("task", TASKS)
def test_the_short_training_is_of_the_same_model(task):
    short, paper = registry.get(f"lra-short/{task}").resolved(), registry.get(f"lra/{task}").resolved()
    # Where positions start and which rows are landmarks in training are no part of what is trained.
    model = dataclasses.replace(short.model, positions=paper.model.positions, sampling=paper.model.sampling)
    assert (model, short.eta) == (paper.model, paper.eta)
    trainer = short.trainer
    cases = trainer.epochs * trainer.steps_per_epoch * trainer.batch_size
    assert trainer.epochs * trainer.steps_per_epoch == SHORT[task].steps
    assert cases <= paper.trainer.epochs * paper.trainer.steps_per_epoch * paper.trainer.batch_size


@pytest.mark.parametrize("attention", ["primal", "primal+", "nystrom", "linformer"])
def test_a_batch_may_be_cut_where_its_padding_begins(attention):
    """Losses, J included, are those of the whole batch."""
    torch.set_num_threads(1)
    data = made_up("listops")
    module = build_from(small(model__attention=(attention,), model__dropout=0.0).resolved(), data).module
    tokens, labels = torch.from_numpy(data.train.tokens[:1]), torch.from_numpy(data.train.labels[:1])
    assert not tokens[:, 7:].any()
    whole, cut = (module.losses((t, labels)) for t in (tokens, tokens[:, :7]))
    for name in whole:
        torch.testing.assert_close(whole[name], cut[name])


def test_a_run_counts_steps_and_validation_chooses(expressions: Path, tmp_path: Path):
    summary = runner.train(small(folder=expressions), tmp_path / "run", name="lra/listops")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [3, 6]
    assert "test_accuracy" not in rows[0], "test is measured once, at the end"
    assert set(summary["scores"]) == {"validation_chosen"}
    assert summary["data"]["max_length"] == 2000
    for row in rows:  # the whole batch's J is squared, so J² of a step is its loss; here one epoch's mean of squares
        assert float(row["ksvd_loss"]) >= float(row["J"]) ** 2 - 1e-6
    assert runner.evaluate(tmp_path / "run")[""] == summary["test"]


def test_a_run_cut_off_within_an_epoch_of_steps_resumes_to_the_same_metrics_and_weights(
    expressions: Path, tmp_path: Path
):
    assert_resumes_to_the_same(small(folder=expressions), tmp_path, step=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__attention": ("primal+",)},
        {"model__attention": ("softmax",)},
        {"model__attention": ("linformer",)},
        {"model__r_scores": False},
        {"model__data_dependent": False},
        {"model__published_padding": True},
    ],
    ids=str,
)
def test_variants_build_and_step(changes):
    torch.set_num_threads(1)
    experiment = build_from(small(**changes).resolved(), made_up("listops"))
    loss = experiment.module.training_step(next(iter(experiment.train)), 0)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [({}, False), ({"model.published_padding": True}, True)],
    ids=["padding-left-out", "padding-takes-part"],
)
def test_only_where_padding_takes_part_sequences_stay_whole(changes, whole, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lra, "EVALUATED_TOKENS", 0)  # batches as small as the trainings'
    data = lengthened(made_up("listops"), 100)
    changes = {**SMALL, "data.kinds": 2, "trainer.batch_size": 3, "watch_test": True, **changes}
    experiment = build_from(override(paper_recipe("listops"), changes).resolved(), data)
    for batches in (experiment.train, experiment.test, *experiment.watched.values()):
        widths = {tokens.shape[1] for tokens, _ in batches}
        assert (widths == {100}) == whole
    assert experiment.module.padded


def lengthened(data: TokenData, length: int) -> TokenData:
    """The same cases with padding up to a length, but for three in every split that fill it."""

    def longer(split: TokenSplit) -> TokenSplit:
        tokens = np.pad(split.tokens, ((0, 0), (0, length - split.tokens.shape[1])))
        tokens[-3:] = 1
        return dataclasses.replace(split, tokens=tokens)

    return dataclasses.replace(data, **{name: longer(split) for name, split in data.splits.items()})


def test_published_padding_of_a_baseline_is_refused_before_anything_is_written(expressions: Path, tmp_path: Path):
    recipe = small(folder=expressions, model__attention=("nystrom",), model__published_padding=True)
    with pytest.raises(RunError, match="published_padding is known for primal and softmax layers only") as caught:
        runner.train(recipe, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_short_training_takes_sets_smaller_than_a_batch(expressions: Path, tmp_path: Path):
    recipe = override(short_recipe("listops"), {**SMALL, "data.folder": expressions, "trainer.batch_size": 32})
    assert recipe.data.kinds > 1
    assert runner.train(recipe, tmp_path / "run")["data"]["train_cases"] < 32


def test_weights_that_see_no_data_have_no_landmarks_to_move():
    recipe = override(short_recipe("text"), {**SMALL, "model.data_dependent": False})
    assert (recipe.model.sampling, recipe.resolved().model.sampling) == ("random", "even")
    experiment = build_from(recipe.resolved(), made_up("text"))
    assert torch.isfinite(experiment.module.training_step(next(iter(experiment.train)), 0))


SPLIT = """
import sys
from pathlib import Path
import test_lra
from primal_attention.train import loop as runner

folder, out = map(Path, sys.argv[1:])
shared = {"trainer__devices": 2, "trainer__context": 2, "trainer__strategy": "ddp"}
runner.train(test_lra.small(folder=folder, model__sampling="random", **shared), out)
"""


def test_landmarks_move_where_two_processes_share_each_sequence(expressions: Path, tmp_path: Path):
    script = tmp_path / "split.py"
    script.write_text(SPLIT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folders = Path(__file__).parents[:2]
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    here = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*launch, str(script), str(expressions), str(tmp_path / "run")]
    done = subprocess.run(words, env=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert runner.read_summary(tmp_path / "run")["scores"]


def test_pairs_build_and_step():
    experiment = build_from(small("retrieval").resolved(), made_up("retrieval", pairs=True))
    batch = next(iter(experiment.train))
    assert [t.dtype for t in batch] == [torch.uint8, torch.uint8, torch.int64]
    experiment.module.training_step(batch, 0).backward()
    assert 0 <= experiment.module.evaluate(experiment.test)["accuracy"] <= 1


def test_black_pixels_are_padding_only_where_asked_for(tmp_path: Path):
    torch.set_num_threads(1)
    pathfinder.write(tmp_path, train=8, valid=2, test=2)
    for zero_is_padding in (False, True):
        recipe = small("pathfinder", tmp_path, data__zero_is_padding=zero_is_padding)
        experiment = runner.build(recipe.resolved())
        assert experiment.module.padded == zero_is_padding
        assert (experiment.module.model.room is not None) == zero_is_padding
        assert experiment.train.lengths is None  # no kinds by length: the cases are mixed
        assert torch.isfinite(experiment.module.training_step(next(iter(experiment.train)), 0))


def test_a_missing_set_says_how_to_get_it(tmp_path: Path):
    with pytest.raises(DataError, match="primal data listops --out"):
        small(folder=tmp_path).build()
    for task in TASKS:
        with pytest.raises(DataError, match=str(tmp_path)) as caught:
            small(task, tmp_path).build()
        assert "\n" not in str(caught.value)
