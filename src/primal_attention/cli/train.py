"""What the commands train, evaluate and recipes do, given their words."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from primal_attention.cli.flags import parse
from primal_attention.report.headline import headline, in_full
from primal_attention.train import checkpoint, registry
from primal_attention.train.config import RENAMED, Recipe
from primal_attention.utils.errors import RunError, WriteError

TRAIN = """Train a recipe; every field of it is a flag.

Example: primal train uea/JapaneseVowels --model.attention primal+ --seed 3 --trainer.epochs 20"""
EVALUATE = """Measure a finished run's weights on the test set again.

Example: primal evaluate runs/uea/JapaneseVowels/primal-seed0"""
RECIPES = """List all recipes.

Example: primal recipes"""
OUT = "Run folder; None is runs/RECIPE/VARIANT-seedN, numbered if taken."
RESUME = "Continue the run in the folder from its last checkpoint."
COLUMNS = {
    "last": "LAST epoch",
    "best_on_test": "BEST ON TEST (the paper's way: the test set chose the epoch)",
    "validation_chosen": "VALIDATION-CHOSEN (held-out training cases chose the epoch)",
}


def train(args: Sequence[str]) -> int:
    if not args:
        raise RunError("which recipe? primal train RECIPE, for example primal train uea/JapaneseVowels")
    if args[0] in ("-h", "--help"):
        print(f"usage: primal train RECIPE [OPTIONS]\n\n{TRAIN}\n\n'primal recipes' lists the recipes; ", end="")
        print("'primal train RECIPE --help' lists its flags.")
        return 0
    name, *rest = args
    if name.startswith("-"):
        raise RunError(f"the recipe comes first: primal train RECIPE {name} … ('primal recipes' lists them)")
    recipe, out, resume = parse_run(name, registry.get(name), rest)
    from primal_attention.train import distributed, loop

    named = out is not None
    if out is None:
        place = checkpoint.default_folder(name, recipe)
        out = checkpoint.newest_folder(place) if resume else checkpoint.unused_folder(place)
    out = distributed.agree_on_folder(out, named=named)
    if distributed.is_main():
        print(f"run folder: {out}")
    command = shlex.join(["primal", "train", *args])
    with distributed.leave_at_once():
        try:
            given = any(word.partition("=")[0] == "--optim.schedule" for word in rest)
            summary = loop.train(recipe, out, name=name, resume=resume, command=command, new_schedule=given)
        except WriteError as error:
            raise RunError(f"{error}; free some space and continue with --resume") from error
    if distributed.is_main():
        show(summary)
    return 0


def parse_run(name: str, recipe: Recipe, args: Sequence[str]) -> tuple[Recipe, Path | None, bool]:
    """The recipe as the flags change it, the run folder asked for, and whether to go on with the run in it."""
    try:
        import tyro
    except ImportError:
        raise RunError("the command line needs tyro: pip install 'primal-attention[train]'") from None

    for old, new in RENAMED.items():
        group, _, field = old.rpartition(".")
        if {f"--{old}", f"--{group}.no-{field}"} & {word.partition("=")[0].replace("_", "-") for word in args}:
            raise RunError(f"--{old} was replaced: use {new}")
    kind = type(recipe)
    fields: list[Any] = [
        ("recipe", Annotated[kind, tyro.conf.arg(name="")]),
        ("out", Annotated[Path | None, tyro.conf.arg(help=OUT)], dataclasses.field(default=None)),
        ("resume", Annotated[bool, tyro.conf.arg(help=RESUME)], dataclasses.field(default=False)),
    ]
    arguments: Any = dataclasses.make_dataclass("Run", fields)
    found = parse(arguments, args, prog=f"primal train {name}", about=TRAIN, default=arguments(recipe=recipe))
    return found.recipe, found.out, found.resume


def show(summary: dict[str, Any]) -> None:
    """The result in a few lines: one per protocol, never blended."""

    def line(score: dict[str, Any], epoch: int, title: str) -> None:
        print(f"{in_full(score)}  epoch {epoch:>4}  {title}")

    for key, title in COLUMNS.items():
        score = summary["scores"].get(key)
        if score:
            line(score, score["epoch"], title)
            if "retrained_accuracy" in score:
                again = {"accuracy": score["retrained_accuracy"]}
                line(again, score["epoch"], "the same epoch of the training on all cases")
    seconds, device = summary["seconds_per_epoch"], summary["device"]
    print(f"{summary['parameters']:,} parameters, {seconds:.2f} s per epoch on {device}")


@dataclass(frozen=True)
class RunArguments:
    run: Path
    """Folder of the run."""


@dataclass(frozen=True)
class NoArguments:
    pass


def evaluate(args: Sequence[str]) -> int:
    if args and (Path(args[0]) / "config.yaml").exists() and checkpoint.read_run(Path(args[0]))[1].benchmark == "d4rl":
        from primal_attention.cli import replay  # measured by playing, which has flags of its own

        return replay.main(Path(args[0]), args[1:])
    place = parse(RunArguments, args, prog="primal evaluate", about=EVALUATE).run
    from primal_attention.train import loop

    summary = loop.read_summary(place)
    measured = loop.evaluate(place)
    for part, scores in measured.items():
        # A single training that held cases out has kept the weights that they chose.
        chosen = part or (len(measured) == 1 and "validation_chosen" in summary["scores"])
        key = "validation_chosen" if chosen else "last"
        before = headline(summary["scores"].get(key, {}))
        verdict = "as in the run" if headline(scores) == before else f"the run had {before}"
        print(f"{in_full(scores)}  loss {scores['loss']:.6f}  {COLUMNS[key]}: {verdict}")
    return 0


def recipes(args: Sequence[str]) -> int:
    parse(NoArguments, args, prog="primal recipes", about=RECIPES)
    for family, entry in registry.FAMILIES.items():
        print(f"{family}: {entry.about}")
        for member in entry.members:
            print(f"  {family}/{member}")
        if entry.open:
            print(f"  {family}/…  any other set of the archive, by its name")
    return 0
