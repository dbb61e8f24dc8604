"""Recipes by name: "family/member", for example uea/JapaneseVowels. A family may take members it does not list."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from primal_attention.train import d4rl, image, lra, uea
from primal_attention.train import lm as language
from primal_attention.train.config import Recipe
from primal_attention.utils.errors import RunError


@dataclass(frozen=True)
class Family:
    """A group of recipes made by one function from the member's name."""

    make: Callable[[str], Recipe]
    members: tuple[str, ...]
    about: str
    open: bool = False
    """Any other member name works too."""


FAMILIES: dict[str, Family] = {
    "uea": Family(uea.paper_recipe, tuple(uea.PAPER), "the paper's time-series classifiers", open=True),
    "uea-modern": Family(uea.modern_recipe, tuple(uea.PAPER), "one modern recipe for every set", open=True),
    "lra": Family(lra.paper_recipe, tuple(lra.TASKS), "the paper's classifiers of Long-Range Arena"),
    "lra-short": Family(lra.short_recipe, tuple(lra.TASKS), "the same classifiers in fewer steps"),
    "image": Family(image.paper_recipe, tuple(image.MEMBERS), "DeiT with Primal-Attention, images in class folders"),
    "d4rl": Family(d4rl.paper_recipe, tuple(d4rl.PAPER), "the paper's Decision Transformers", open=True),
    "lm": Family(language.recipe_of, language.SETS, "language models, the paper's setting and a modern one"),
}
RECIPES: dict[str, type[Recipe]] = {
    "uea": uea.UEARecipe,
    "lra": lra.LRARecipe,
    "image": image.ImageRecipe,
    "d4rl": d4rl.D4RLRecipe,
    "lm": language.LanguageRecipe,
}


def names() -> list[str]:
    return [f"{family}/{member}" for family, entry in FAMILIES.items() for member in entry.members]


def get(name: str) -> Recipe:
    """The recipe of a name; a mistyped one suggests the nearest."""
    family, _, member = name.partition("/")
    entry = FAMILIES.get(family)
    if entry is not None and (member in entry.members or (entry.open and member)):
        return entry.make(member)
    if name in ("uea", "uea-modern"):  # data of one's own, named by --data.file
        return FAMILIES[name].make("")
    near = difflib.get_close_matches(name, names(), n=1, cutoff=0.7)
    if not near:  # the family alone, with the member as it was written where it may be any, or the family's first
        families = difflib.get_close_matches(family, FAMILIES, n=1)
        near = [f"{f}/{member if member and FAMILIES[f].open else FAMILIES[f].members[0]}" for f in families]
    hint = f"did you mean {near[0]}? " if near else ""
    raise RunError(f"no recipe is called {name!r}: {hint}'primal recipes' lists them all")
