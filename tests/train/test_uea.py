"""The UEA recipes' flags for their data: principal channels, edges held out; run folders from before they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy
import yaml

from primal_attention.data.edges import edge_holdout
from primal_attention.data.uea import PrincipalChannels
from primal_attention.train import checkpoint as folder
from primal_attention.train import loop as runner
from primal_attention.train.config import from_plain, to_plain
from primal_attention.train.uea import UEARecipe, build_from

WITH = {"data__principal": True, "model__differences": True}
WITHOUT = {"data__principal": False, "model__differences": False}


def test_principal_channels_and_differences_reach_the_network(toy_folder: Path):
    experiment = build_from(toy.recipe(toy_folder, **WITH), toy.data())
    assert experiment.train.tensors[0].shape[-1] == 4
    assert experiment.module.model.stem.convs[0].in_channels == 8
    plain = build_from(toy.recipe(toy_folder, **WITHOUT), toy.data())
    assert plain.module.model.stem.convs[0].in_channels == 2


def test_only_the_cases_that_are_trained_on_decide_the_directions(toy_folder: Path):
    recipe, data = toy.recipe(toy_folder, protocol="validation", data__held="edge", seed=3, **WITH), toy.data()
    kept, _ = edge_holdout(data.train, recipe.data.holdout, 3)
    found = build_from(recipe, data)
    assert np.array_equal(found.standardizer.basis, PrincipalChannels.fit(data.train.take(kept).series).basis)
    assert len(found.train.tensors[0]) == len(kept)


@pytest.mark.parametrize("changes", [WITH, WITHOUT], ids=["with", "without"])
def test_a_run_is_evaluated_as_it_was_trained(toy_folder: Path, tmp_path: Path, changes):
    summary = runner.train(toy.recipe(toy_folder, trainer__epochs=2, **changes), tmp_path / "run")
    assert runner.evaluate(tmp_path / "run")[""]["accuracy"] == summary["scores"]["last"]["accuracy"]


def test_a_run_folder_from_before_the_flags_is_what_it_was(toy_folder: Path, tmp_path: Path):
    summary = runner.train(toy.recipe(toy_folder, trainer__epochs=1, **WITHOUT), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for name in WITH:
        part, field = name.split("__")
        del config["config"][part][field]
    file.write_text(yaml.safe_dump(config))
    _, recipe = folder.read_run(tmp_path / "run")
    assert not recipe.data.principal
    assert runner.evaluate(tmp_path / "run")[""]["accuracy"] == summary["scores"]["last"]["accuracy"]


def test_the_flags_survive_the_way_through_plain_values(toy_folder: Path):
    recipe = toy.recipe(toy_folder, data__held="edge", **WITH)
    assert from_plain(UEARecipe, to_plain(recipe)) == recipe
