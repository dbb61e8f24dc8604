"""Recipes: typed, checked, by name, and the same after a trip through YAML."""

from operator import attrgetter
from typing import Any

import pytest
import torch
import yaml

from primal_attention.train import image, lm, lra, registry
from primal_attention.train.config import OptimConfig, TrainerConfig, from_plain, override, to_plain
from primal_attention.train.task import compiles
from primal_attention.train.uea import PAPER, UEARecipe, paper_recipe
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
    assert tuple(image.RECIPES) == registry.IMAGE_SETS
    assert tuple(lm.RECIPES) == registry.TEXTS
    assert tuple(registry.recipe_type(name).benchmark for name in registry.BENCHMARKS) == registry.BENCHMARKS
    assert registry.recipe_type("unknown") is None
    assert registry.get("uea/NATOPS").data.name == "NATOPS", "any set of the archive"


# Settings of the paper, and of DeiT.
PUBLISHED: dict[str, dict[str, Any]] = {
    "uea/JapaneseVowels": {
        "model.rank": 40, "eta": 0.5, "model.landmarks": 200, "model.embed_dim": 512, "model.num_heads": 8,
        "model.layers": 2, "optim.name": "radam", "optim.lr": 1e-3, "optim.clip": 4.0,
    },
    "uea/UWaveGestureLibrary": {"eta": 0.0},
    "uea/SpokenArabicDigits": {"optim.name": "adam"},
    "uea/PEMS-SF": {"trainer.epochs": 400},
    "d4rl/walker2d-medium-replay": {
        "model.layers": 3, "model.embed_dim": 256, "model.num_heads": 4, "model.context": 20, "model.rank": 96,
        "model.attention": ("primal+",), "eta": 0.05, "environment": "Walker2d-v4", "target": 5000.0,
        "trainer.epochs": 10, "trainer.steps_per_epoch": 10_000, "trainer.batch_size": 64, "optim.lr": 1e-3,
        "optim.warmup": 0.1, "optim.schedule": "warmup", "optim.weight_decay": 1e-4, "optim.clip": 0.25,
        "evaluation.episodes": 100,
    },
    "d4rl/halfcheetah-medium-replay": {"model.rank": 32},
    "image/deit-small": {
        "model.attention": ("primal+",), "model.rank": 96, "eta": 0.05, "model.drop_path": 0.1, "data.size": 224,
        "trainer.epochs": 300, "trainer.batch_size": 1024, "optim.name": "adamw", "optim.lr": 1e-3,
        "optim.weight_decay": 0.05, "optim.warmup": 5 / 300, "augment": "deit",
    },
    "image/imagenette": {"model.patch_size": 8},
    "lm/wikitext-103": {
        "model.layers": 6, "model.embed_dim": 512, "model.ffn_dim": 2048, "model.num_heads": 8, "model.rank": 30,
        "model.attention": ("primal+",), "data.context": 512, "data.vocabulary": None, "optim.warmup": 6 / 156,
        "model.initializer_range": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_settings(name):
    recipe = registry.get(name).resolved()
    assert {field: attrgetter(field)(recipe) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_settings_depend_on_the_attention_and_the_set_unless_they_are_given():
    plus = change("uea/JapaneseVowels", "model.attention", ("primal+",)).resolved()
    assert (plus.model.rank, plus.eta, plus.model.landmarks) == (30, 0.2, 150)
    assert change("uea/JapaneseVowels", "eta", 0.0).resolved().eta == 0.0
    own = override(registry.get("uea"), {"data.file": "x.npz", "model.attention": ("primal+",)}).resolved()
    assert (own.model.rank, own.eta, own.model.landmarks) == (30, 0.2, 300)


def change(name: str, field: str, value: Any) -> Any:
    return override(registry.get(name), {field: value})


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: TrainerConfig(epochs=0), "trainer.epochs must be at least 1"),
        (lambda: TrainerConfig(ema=1.0), "trainer.ema must lie in"),
        (lambda: OptimConfig(lr=0.0), "optim.lr must be positive"),
        (lambda: UEARecipe(eta=-0.1), "eta must not be negative"),
        (lambda: change("uea/X", "data.holdout", 1.0), "data.holdout must lie between"),
        (lambda: change("uea/X", "model.rank", 0), "model.rank must be at least 1"),
        (lambda: change("uea/X", "optim.name", "sgd"), "must be one of radam, adam, adamw"),
        (lambda: change("uea/X", "seed", "three"), "seed must be int"),
        (lambda: change("uea/X", "optim.speed", 1), "optim.speed is not a field"),
        (lambda: change("d4rl/hopper-medium", "evaluation.episodes", -1), "evaluation.episodes must not be negative"),
        (lambda: change("image/imagenette", "data.holdout", 1.5), "data.holdout must lie between 0 and 1"),
        (lambda: change("lm/wikipedia", "data.vocabulary", 256), "data.vocabulary must be at least 257"),
        (lambda: change("lm/wikipedia", "model.conv", -1), "model.conv must not be negative"),
        (lambda: change("lm/wikipedia", "model.primal_mode", "dual"), "must be one of mean, landmarks, decay, delta"),
        (lambda: from_plain(UEARecipe, {"colour": 1}), "colour is not a field of this version"),
        (lambda: TrainerConfig(steps_per_epoch=-1), "trainer.steps-per-epoch must not be negative"),
        (lambda: TrainerConfig(devices=3, context=2), r"trainer.context must divide trainer.devices \(got 2 and 3\)"),
        (lambda: change("uea/X", "trainer.logger", ("paper",)), "must be one of csv, tensorboard"),
        (lambda: change("uea/X", "trainer.tensorboard", True), "use --trainer.logger csv tensorboard"),
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


def test_auto_compiles_on_one_gpu(monkeypatch: pytest.MonkeyPatch):
    config = TrainerConfig(compile="auto")
    assert not compiles(override(config, {"accelerator": "cpu"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiles(config)
    for other in ({"accelerator": "cpu"}, {"devices": 2, "strategy": "ddp"}):
        assert not compiles(override(config, other))
        assert compiles(override(config, {**other, "compile": "on"}))
