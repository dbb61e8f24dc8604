"""Recipes by name: "family/member", for example uea/JapaneseVowels, or "my_recipes.py:name" for one of your own.

The names are data, so that listing them imports neither torch nor the modules of the recipes.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from primal_attention.train.config import Recipe
from primal_attention.utils.errors import RunError

UEA_SETS = (
    "EthanolConcentration",
    "FaceDetection",
    "Handwriting",
    "Heartbeat",
    "JapaneseVowels",
    "PEMS-SF",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
)
LRA_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
IMAGE_SETS = ("deit-small", "imagenette")
TEXTS = ("wikipedia", "wikitext-103")
D4RL_SETS = tuple(
    f"{environment}-{level}"
    for level in ("medium-expert", "medium", "medium-replay")
    for environment in ("halfcheetah", "hopper", "walker2d")
)


@dataclass(frozen=True)
class Family:
    """A group of recipes, by the names of its members."""

    source: str
    """Module and name of a function of the member's name, or of a mapping."""
    about: str
    members: tuple[str, ...]
    is_open: bool = False
    """Other members work too: any set of the archive."""
    takes_files: bool = False
    """The name without a member trains on data of your own, named by --data.file."""


FAMILIES = {
    "uea": Family("uea:paper_recipe", "the paper's time-series classifiers", UEA_SETS, True, True),
    "uea-modern": Family("uea:modern_recipe", "one modern recipe for every data set", UEA_SETS, True, True),
    "lra": Family("lra:paper_recipe", "the paper's classifiers of Long-Range Arena", LRA_TASKS),
    "lra-short": Family("lra:short_recipe", "the same classifiers in fewer steps", LRA_TASKS),
    "lra-modern": Family("lra:modern_recipe", "convolutions beside decay in both directions", LRA_TASKS),
    "image": Family("image:RECIPES", "DeiT with Primal-Attention, images in class folders", IMAGE_SETS),
    "d4rl": Family("d4rl:paper_recipe", "the paper's Decision Transformers", D4RL_SETS, is_open=True),
    "lm": Family("lm:RECIPES", "language models, the paper's setting and a modern one", TEXTS),
}
BENCHMARKS = ("uea", "lra", "image", "d4rl", "lm")  # each a module with its recipe class
_OWN_TYPES: dict[str, type[Recipe]] = {}


def names() -> list[str]:
    return [f"{name}/{member}" for name, family in FAMILIES.items() for member in family.members]


def recipe_type(benchmark: str) -> type[Recipe] | None:
    """Return the recipe class of a benchmark; one of your own only after `load_file`."""
    if benchmark not in BENCHMARKS:
        return _OWN_TYPES.get(benchmark)
    return _recipe_types(importlib.import_module(f"primal_attention.train.{benchmark}"))[0]


def get(name: str) -> Recipe:
    """Return the recipe of a name; the error for an unknown one suggests the nearest."""
    file, _, attribute = name.partition(".py:")
    if attribute or name.endswith(".py"):
        return _get_own(Path(name if name.endswith(".py") else f"{file}.py"), attribute)
    family_name, _, member = name.partition("/")
    family = FAMILIES.get(family_name)
    if family is not None and (member in family.members or (family.is_open if member else family.takes_files)):
        module, _, source = family.source.partition(":")
        recipes = getattr(importlib.import_module(f"primal_attention.train.{module}"), source)
        return recipes[member] if isinstance(recipes, dict) else recipes(member)
    open_names = [f"{family}/{member}" for family in FAMILIES if member and FAMILIES[family].is_open]
    near = difflib.get_close_matches(name, [*names(), *open_names], n=1, cutoff=0.5)
    if not near and family is not None:
        near = [f"{family_name}/{family.members[0]}"]
    hint = f"did you mean {near[0]}? " if near else ""
    raise RunError(f"no recipe is called {name!r}: {hint}'primal recipes' lists them all")


def run_name(name: str) -> str:
    """Return the name under which runs of a recipe are stored: folder/my_recipes.py:fast gives my_recipes/fast."""
    file, _, attribute = name.partition(".py:")
    return f"{Path(file).name}/{attribute}" if attribute else name


def load_file(path: Path) -> ModuleType:
    """Run a Python file that the user named, and register the recipe classes that it defines."""
    if not path.is_file():
        raise RunError(f"{path} is not a file: a recipe of your own is named FILE.py:NAME")
    module_name = f"_recipes_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where dataclasses look their annotations up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RunError(f"{path} cannot be run ({type(error).__name__}: {error})") from error
    for kind in _recipe_types(module):
        if not kind.benchmark or kind.benchmark in BENCHMARKS:
            raise RunError(f"{path}: {kind.__name__}.benchmark must be a new name (got {kind.benchmark!r})")
        _OWN_TYPES[kind.benchmark] = kind
    return module


def _recipe_types(module: ModuleType) -> list[type[Recipe]]:
    """Return the recipe classes that a module defines."""
    types = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Recipe)]
    return [kind for kind in types if kind.__module__ == module.__name__]


def _get_own(path: Path, name: str) -> Recipe:
    """Return a recipe of a Python file: a `Recipe`, or the result of a function without arguments."""
    values = vars(load_file(path))
    value = values.get(name)
    recipe = value if isinstance(value, Recipe) else value() if callable(value) else None
    if isinstance(recipe, Recipe):
        return recipe
    known = ", ".join(key for key, value in values.items() if isinstance(value, Recipe)) or "none"
    raise RunError(f"{path} has no recipe {name!r} (recipes that are not functions: {known}): use {path}:NAME")
