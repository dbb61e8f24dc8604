"""Recipes are listed by names that agree with the modules that make them."""

from __future__ import annotations

from primal_attention.train import d4rl, image, lm, lra, registry, uea


def test_the_listed_names_are_those_of_the_modules() -> None:
    assert tuple(uea.PAPER) == registry.UEA_SETS
    assert tuple(lra.TASKS) == registry.LRA_TASKS
    assert tuple(d4rl.PAPER) == registry.D4RL_SETS
    assert tuple(image.MEMBERS) == registry.FAMILIES["image"].members
    assert tuple(lm.SETS) == registry.FAMILIES["lm"].members


def test_every_benchmark_has_its_recipe_class() -> None:
    for benchmark in registry.TYPES:
        kind = registry.recipe_type(benchmark)
        assert kind is not None
        assert kind.benchmark == benchmark
    assert registry.recipe_type("unknown") is None
