"""`primal train`, `primal evaluate` and `primal recipes`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from primal_attention.cli.flags import Parser, positive
from primal_attention.train import registry
from primal_attention.utils.errors import RunError, WriteError

if TYPE_CHECKING:
    from primal_attention.train.config import Recipe
    from primal_attention.train.d4rl import D4RLRecipe

TRAIN = """Train a recipe; every field of it is a flag.

Example: primal train {} --seed 3 --trainer.epochs 20"""
TRAIN_USAGE = f"""usage: primal train RECIPE [OPTIONS]

{TRAIN.format("uea/JapaneseVowels")}

'primal recipes' lists the recipes; 'primal train RECIPE --help' lists the flags of one.
FILE.py:NAME is a recipe of your own: a Recipe, or a function that returns one, in a Python file, which is run."""
OUT = "Run folder; None is runs/RECIPE/VARIANT-seedN, numbered if taken."
RESUME = "Continue the run in the folder from its last checkpoint, with its settings."
COLUMNS = {
    "last": "LAST epoch",
    "best_on_test": "BEST ON TEST (the paper's protocol: the test set chose the epoch)",
    "validation_chosen": "VALIDATION-CHOSEN (validation samples chose the epoch)",
}


def train(args: Sequence[str]) -> int:
    if not args:
        raise RunError("which recipe? primal train RECIPE, for example primal train uea/JapaneseVowels")
    name, *rest = args
    if name in ("-h", "--help"):
        print(TRAIN_USAGE)
        return 0
    if name.startswith("-"):
        raise RunError(f"the recipe comes first: primal train RECIPE {name} … ('primal recipes' lists them)")
    recipe, out, resume = parse_run(name, registry.get(name), rest)
    from primal_attention.train import checkpoint, distributed, loop

    run_name = registry.run_name(name)
    out, flags = out or checkpoint.default_folder(run_name, recipe, resume=resume), flag_names(rest)
    if resume and (out / "config.yaml").exists():
        recipe = checkpoint.keep_settings(out, recipe, run_name, flags)
    if distributed.is_main():
        print(f"run folder: {out}")
    command = shlex.join(["primal", "train", *args])
    with distributed.leave_at_once():
        try:
            new_schedule = "--optim.schedule" in flags
            summary = loop.train(recipe, out, name=run_name, resume=resume, command=command, new_schedule=new_schedule)
        except WriteError as error:
            raise RunError(f"{error}; free some space and continue with --resume") from error
    if distributed.is_main():
        show(summary)
    return 0


def flag_names(args: Sequence[str]) -> set[str]:
    """Return the flags among the words of a command as --group.field."""
    words = (word.partition("=")[0].replace("_", "-") for word in args)
    return {re.sub(r"^--no-|\.no-", lambda match: match[0][:-3], word) for word in words}


def parse_run(name: str, recipe: Recipe, args: Sequence[str]) -> tuple[Recipe, Path | None, bool]:
    """Return the recipe as the flags change it, the run folder, and whether to resume the run in it."""
    import tyro

    from primal_attention.train.config import RENAMED, flatten, override

    flags = flag_names(args)
    for old, new in RENAMED.items():
        if f"--{old}" in flags:
            raise RunError(f"--{old} was replaced: use {new}")
    fields: list[Any] = [
        ("recipe", Annotated[type(recipe), tyro.conf.arg(name="")]),
        ("out", Annotated[Path | None, tyro.conf.arg(help=OUT)], dataclasses.field(default=None)),
        ("resume", Annotated[bool, tyro.conf.arg(help=RESUME)], dataclasses.field(default=False)),
    ]
    arguments: Any = dataclasses.make_dataclass("Run", fields)
    prog, about, output = f"primal train {name}", TRAIN.format(name), io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            run = tyro.cli(arguments, args=list(args), prog=prog, description=about, default=arguments(recipe=recipe))
        values = dict(flatten(dataclasses.asdict(run.recipe)))
        paths = {field: value.absolute() for field, value in values.items() if isinstance(value, Path)}
        return override(run.recipe, paths), run.out, run.resume  # `primal evaluate` may run in another folder
    except SystemExit as leaving:
        if leaving.code in (0, None):  # --help
            raise
    # The message is inside a box, below its title and above the help of the argument.
    lines = [re.sub(r"^-+$", "", line.strip(" │|╭╰─╮╯")) for line in output.getvalue().splitlines()]
    _, *texts = filter(None, lines)
    message = re.split("Argument helptext|For full helptext", " ".join(texts))[0]
    message = re.sub(r" Perhaps you meant: ([^\s,]+).*", r"; did you mean \1?", message)
    raise RunError(f"{message.strip()} (see {prog} --help)")


def show(summary: dict[str, Any]) -> None:
    """Print the result, one line per protocol."""
    from primal_attention.report.results import in_full

    for key, title in COLUMNS.items():
        if score := summary["scores"].get(key):
            print(f"{in_full(score)}  epoch {score['epoch']:>4}  {title}")
    if objective := summary["objective"]:
        print(f"KSVD objective J of an epoch: from {objective['first']:+.3f} to {objective['last']:+.3f}")
    seconds, device = summary["seconds_per_epoch"], summary["device"]
    print(f"{summary['parameters']:,} parameters, {seconds:.2f} s per epoch on {device}")


def evaluate(args: Sequence[str]) -> int:
    parser = Parser("evaluate", "runs/uea/JapaneseVowels/primal-seed0")
    parser.flag("run", "folder of the run", type=Path, metavar="RUN")
    parser.flag("--recipes", "file of a recipe class of your own; it is run", type=Path, metavar="FILE.py")
    parser.flag("--episodes", "d4rl: episodes to play (default: the run's, or 100)", type=positive)
    options = parser.parse_args(args)
    from primal_attention.report.results import in_full, read_folder
    from primal_attention.train import checkpoint, loop

    if options.recipes is not None:
        registry.load_file(options.recipes)
    _, recipe = checkpoint.read_run(options.run)
    if recipe.benchmark == "d4rl":
        return play(options.run, recipe, options.episodes)  # type: ignore[arg-type]
    if options.episodes:
        raise RunError(f"--episodes is for runs of d4rl: {options.run} is one of {recipe.benchmark}")
    parts, stored = loop.evaluate(options.run), read_folder(options.run).scores
    for part, scores in parts.items():
        # A single training with validation samples keeps the weights that they chose.
        is_chosen = part or (len(parts) == 1 and "validation_chosen" in stored)
        key = "validation_chosen" if is_chosen else "last"
        before = in_full(stored[key]) if key in stored else "no such score"
        verdict = "as in the run" if in_full(scores) == before else f"the run had {before}"
        print(f"{in_full(scores)}  loss {scores['loss']:.6f}  {COLUMNS[key]}: {verdict}")
    return 0


def play(folder: Path, recipe: D4RLRecipe, episodes: int | None) -> int:
    """Play episodes with the weights of a d4rl run; a summary without a score gets this one."""
    from primal_attention.report.results import in_full
    from primal_attention.train import d4rl, distributed, loop
    from primal_attention.train.config import override, to_plain
    from primal_attention.utils.files import COUNT, check, write_json

    summary = loop.read_summary(folder)
    dims = {"state_dim": COUNT, "action_dim": COUNT}
    check(summary, {"scores": {"last": dict}, "data": dims, "config": {"evaluation": dict}}, folder / "summary.json")
    # A run that was trained without an environment has played none.
    count = episodes or recipe.evaluation.episodes or d4rl.EvaluationConfig().episodes
    recipe = override(recipe, {"evaluation.episodes": count})
    data, last = summary["data"], summary["scores"]["last"]
    model = d4rl.make_model(recipe.resolved().model, data["state_dim"], data["action_dim"])
    loop.load_weights(model, folder / "model.safetensors")
    score = d4rl.measure(model.to(distributed.pick_device(recipe.trainer)), recipe)
    print(in_full(score) + (f": the run had {last['score']:.1f}" if "score" in last else ""))
    if "score" not in last:
        last.update(score)
        summary["test"] = score
        summary["config"]["evaluation"] = to_plain(recipe.evaluation)
        write_json(folder / "summary.json", summary)
    return 0


def recipes(args: Sequence[str]) -> int:
    parser = Parser("recipes", "uea")
    parser.flag("filter", "show recipes whose name contains this", nargs="?", default="", metavar="FILTER")
    word = parser.parse_args(args).filter.lower()
    for name, family in registry.FAMILIES.items():
        members = [f"{name}/{member}" for member in family.members if word in f"{name}/{member}".lower()]
        if members:
            print(f"{name}: {family.about}", *members, sep="\n  ")
            if family.is_open and not word:
                print(f"  {name}/…  any other data set of the archive, by its name")
    if not any(word in name.lower() for name in registry.names()):
        raise RunError(f"no recipe has {word!r} in its name: 'primal recipes' lists them all")
    return 0
