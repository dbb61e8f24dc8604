"""Recipes: typed, checked, by name, and the same after a trip through YAML."""

from __future__ import annotations

import pytest
import torch
import yaml

from primal_attention.cli import main as cli
from primal_attention.train import d4rl, image, lm, lra, registry
from primal_attention.train.config import OptimConfig, TrainerConfig, from_plain, override, to_plain
from primal_attention.train.task import compiles
from primal_attention.train.uea import PAPER, UEARecipe, modern_recipe, paper_recipe
from primal_attention.utils.errors import RunError


@pytest.mark.parametrize("name", registry.names())
def test_every_recipe_survives_yaml(name):
    recipe = registry.get(name)
    again = from_plain(type(recipe), yaml.safe_load(yaml.safe_dump(to_plain(recipe))))
    assert again == recipe
    assert from_plain(type(recipe), to_plain(recipe.resolved())) == recipe.resolved()


def test_the_listed_names_are_those_of_the_modules():
    """Names are data, so that listing them imports no module."""
    assert tuple(PAPER) == registry.UEA_SETS
    assert tuple(lra.TASKS) == registry.LRA_TASKS
    assert tuple(d4rl.PAPER) == registry.D4RL_SETS
    assert tuple(image.RECIPES) == registry.IMAGE_SETS
    assert tuple(lm.RECIPES) == registry.TEXTS
    assert tuple(registry.recipe_type(name).benchmark for name in registry.BENCHMARKS) == registry.BENCHMARKS
    assert registry.recipe_type("unknown") is None
    assert registry.get("uea/NATOPS").data.name == "NATOPS", "any set of the archive"


def test_the_papers_settings():
    vowels = paper_recipe("JapaneseVowels").resolved()
    assert (vowels.model.rank, vowels.eta, vowels.model.landmarks) == (40, 0.5, 200)
    plus = override(paper_recipe("JapaneseVowels"), {"model.attention": ("primal+",)}).resolved()
    assert (plus.model.rank, plus.eta, plus.model.landmarks) == (30, 0.2, 150)
    assert override(paper_recipe("UWaveGestureLibrary"), {}).resolved().eta == 0.0
    assert override(paper_recipe("JapaneseVowels"), {"eta": 0.0}).resolved().eta == 0.0
    assert paper_recipe("SpokenArabicDigits").optim.name == "adam"
    assert paper_recipe("PEMS-SF").trainer.epochs == 400
    assert (vowels.optim.name, vowels.optim.lr, vowels.optim.clip) == ("radam", 1e-3, 4.0)
    assert (vowels.model.embed_dim, vowels.model.num_heads, vowels.model.layers) == (512, 8, 2)


def test_the_modern_recipe_is_one_for_all_sets():
    a, b = modern_recipe("Handwriting"), modern_recipe("NATOPS")
    assert override(b, {"data.name": "Handwriting"}) == a


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("uae/JapaneseVowels", "uea/JapaneseVowels"),
        ("lra", "lra/"),
        ("uea-moden/Handwriting", "uea-modern/Handwriting"),
    ],
)
def test_a_mistyped_recipe_suggests_the_nearest(name, hint):
    with pytest.raises(RunError, match=f"did you mean {hint}"):
        registry.get(name)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: TrainerConfig(epochs=0), "trainer.epochs must be at least 1"),
        (lambda: TrainerConfig(ema=1.0), "trainer.ema must lie in"),
        (lambda: OptimConfig(lr=0.0), "optim.lr must be positive"),
        (lambda: UEARecipe(eta=-0.1), "eta must not be negative"),
        (lambda: override(paper_recipe("X"), {"data.holdout": 1.0}), "data.holdout must lie between"),
        (lambda: override(paper_recipe("X"), {"model.rank": 0}), "model.rank must be at least 1"),
        (lambda: override(paper_recipe("X"), {"optim.name": "sgd"}), "must be one of radam, adam, adamw"),
        (lambda: override(paper_recipe("X"), {"seed": "three"}), "seed must be int"),
        (lambda: override(paper_recipe("X"), {"optim.speed": 1}), "optim.speed is not a field"),
        (lambda: from_plain(UEARecipe, {"colour": 1}), "colour is not a field of this version"),
        (lambda: TrainerConfig(steps_per_epoch=-1), "trainer.steps-per-epoch must not be negative"),
        (lambda: TrainerConfig(devices=3, context=2), r"trainer.context must divide trainer.devices \(got 2 and 3\)"),
        (lambda: override(paper_recipe("X"), {"trainer.logger": ("paper",)}), "must be one of csv, tensorboard"),
        (lambda: override(paper_recipe("X"), {"trainer.tensorboard": True}), "use --trainer.logger csv tensorboard"),
    ],
)
def test_a_value_out_of_range_is_one_clear_line(make, complaint):
    with pytest.raises(RunError, match=complaint) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [(True, ("csv", "tensorboard")), (False, ("csv",))])
def test_a_configuration_of_an_earlier_version_is_mapped(old, new):
    plain = to_plain(paper_recipe("X"))
    del plain["trainer"]["logger"]
    plain["trainer"]["tensorboard"] = old
    assert from_plain(UEARecipe, plain).trainer.logger == new
    assert from_plain(lra.LRARecipe, {"data": {"kinds": 4}}).data.length_buckets == 4
    assert from_plain(image.ImageRecipe, {"data": {"cache": "device", "size": 112}}).data.size == 112
    plain["trainer"] |= {"compile": True, "graph": False, "deterministic": True, "early_stop": 0, "accumulate": 1}
    trainer = from_plain(UEARecipe, plain).trainer
    assert (trainer.compile, trainer.graph) == ("on", "off")
    with pytest.warns(UserWarning, match=r"config.yaml: trainer.deterministic is ignored"):
        from_plain(UEARecipe, plain, "config.yaml: ")
    plain["trainer"]["accumulate"] = 2
    with pytest.raises(RunError, match=r"trainer.accumulate 2 was removed"):
        from_plain(UEARecipe, plain)


@pytest.mark.parametrize(
    ("recipe", "flag", "hint"),
    [
        ("uea/Toy", "--trainer.no-tensorboard", "--trainer.tensorboard was replaced: use --trainer.logger csv tensor"),
        ("lra/listops", "--data.kinds=4", "--data.kinds was replaced: use --data.length-buckets"),
    ],
)
def test_a_flag_of_an_earlier_version_names_the_new_one(recipe, flag, hint, capsys):
    assert cli.main(["train", recipe, flag]) == 2
    assert hint in capsys.readouterr().err


def test_auto_compiles_on_one_gpu(monkeypatch: pytest.MonkeyPatch):
    config = TrainerConfig(compile="auto")
    assert not compiles(override(config, {"accelerator": "cpu"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiles(config)
    for other in ({"accelerator": "cpu"}, {"devices": 2, "strategy": "ddp"}):
        assert not compiles(override(config, other))
        assert compiles(override(config, {**other, "compile": "on"}))
