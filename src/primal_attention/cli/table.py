"""Primal-Attention without its r-scores: o = W_o [e; 0], the paper's ablation of the second set of projections.

The columns of W_o that read r are zero and stay so. r still takes part in the objective J, which is about both sides of
the singular value decomposition. Parameter names change, so weights of an ablated model fit ablated models only.

The models of the language table: softmax, every causal mode of Primal-Attention, what goes beyond it, and baselines.

All have as many parameters as softmax's model: what their attention saves goes to the feed-forward width. The most
telling ones come first, so that a grid that is cut off has said the most.

Which of a table's sets are on this disk, and what to say about those that are not.

The tables that `primal table` can make from runs: their titles, grids and settings, and what draws them.

`primal table NAME`: run what is missing of a table's grid, then show the table from the files that the runs left.

With nothing but argparse, so that it also runs where little is installed; rich makes it prettier.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from primal_attention.data import d4rl, uea
from primal_attention.data import image as images
from primal_attention.nn.objective import primal_layers
from primal_attention.report import accuracy, efficiency, paper_d4rl, paper_images, paper_lra, results
from primal_attention.report import d4rl as d4rl_tables
from primal_attention.report import images as image_tables
from primal_attention.report import language as language_tables
from primal_attention.report import lra as lra_tables
from primal_attention.report import paper_tables as paper
from primal_attention.report.cells import Cell
from primal_attention.report.headline import headline
from primal_attention.report.table import Table, show, to_markdown
from primal_attention.train import grid, image, lra, registry
from primal_attention.train import lm as language
from primal_attention.train.grid import (
    ABLATIONS,
    LENGTH,
    Plan,
    Shelf,
    Variant,
    ablation_variants,
    find,
    missing,
    model_variants,
)
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import COUNT, Number, read_json, write_csv, write_text


class LeftHalf(nn.Module):
    """A weight (p, 2s) whose right half, the columns of r, is zero."""

    def forward(self, weight: Tensor) -> Tensor:
        rank = weight.shape[-1] // 2
        return torch.cat([weight[..., :rank], torch.zeros_like(weight[..., rank:])], dim=-1)


def without_r_scores(model: nn.Module) -> nn.Module:
    """Cut the r-scores off the outputs of all Primal layers of a model, in place."""
    for layer in primal_layers(model).values():
        parametrize.register_parametrization(layer.score_proj, "weight", LeftHalf())
    return model


LOCAL: dict[str, Any] = {"conv": 4, "gate": True}
DELTA: dict[str, Any] = {"primal_mode": "delta", "primal_heads": 4, "rank": 64, **LOCAL}
BEYOND = {
    "delta": DELTA,
    "hybrid": {"attention": ("primal", "primal", "softmax") * 2, **DELTA},
}
MODES = ("mean", "landmarks", "decay")


def _variants() -> list[Variant]:
    rows = [Variant("models", "softmax", "softmax")]
    rows += [Variant("models", name, "primal", options) for name, options in BEYOND.items()]
    rows += [Variant("models", f"primal+-{mode}", "primal+", {"primal_mode": mode}) for mode in MODES]
    rows += [Variant("models", f"primal-{mode}", "primal", {"primal_mode": mode}) for mode in MODES]
    rows += [Variant("models", f"primal-{mode}-conv", "primal", {"primal_mode": mode, "conv": 4}) for mode in MODES]
    rows += [Variant("models", f"primal+-{mode}-conv", "primal+", {"primal_mode": mode, "conv": 4}) for mode in MODES]
    return [*rows, Variant("models", "linear", "linear"), Variant("models", "flow", "flow")]


LINEUP = {variant.name: variant for variant in _variants()}


def check_sets(family: str, sets: Sequence[str], folder: Path | None) -> None:
    """Stop before the first run if a set is not there."""
    for name in sets:
        if not available(family, name, folder):
            try:
                if family == "lra":
                    lra.load(lra.LRAData(name, folder / name if folder else None))  # type: ignore[arg-type]
                elif family == "image":
                    images.load(folder or image.default_folder())
                elif family == "d4rl":
                    d4rl.load(name, folder)
                elif family == "lm":
                    language.load(language.LanguageData(name, folder))  # type: ignore[arg-type]
                else:
                    uea.load(name, folder)  # says where the archive is to be had
            except DataError as error:
                raise RunError(str(error).replace("--data.folder", "--data")) from None


def available(family: str, name: str, folder: Path | None) -> bool:
    if family == "image":
        return (folder or image.default_folder()).is_dir()
    if family == "d4rl":
        return d4rl.find(name, folder) is not None
    if family == "lm":
        return (folder or language.default_folder(name)).is_dir()
    if family == "lra":
        return (folder / name if folder else lra.default_folder(name)).is_dir()
    return uea.available(name, folder)


def default_sets(kind: Kind, folder: Path | None) -> Sequence[str]:
    """The paper's sets that can be run here; those that cannot are named."""
    here = [name for name in kind.sets if available(kind.family, name, folder)]
    gone = [name for name in kind.sets if name not in here]
    if not here:
        check_sets(kind.family, gone, folder)
    if gone:
        where, source = whereabouts(kind.family, gone[0])
        print(f"not in {folder or where}, left out: {', '.join(gone)} ({source})", file=sys.stderr)
    return here


def whereabouts(family: str, name: str) -> tuple[Path, str]:
    """Where a family's sets are looked for, and what tells how to get them."""
    if family == "lra":
        return lra.default_folder(name).parent, "docs/lra.md says how to get them"
    if family == "d4rl":
        return d4rl.default_folder(), "docs/reinforcement-learning.md says how to get them"
    return uea.default_folder(), f"the archive: {uea.ARCHIVE}"


@dataclass(frozen=True)
class Kind:
    """A table by name: its title, what its runs change in the recipe, its default grid, and what draws it."""

    title: str
    changes: dict[str, Any]
    models: tuple[str, ...]
    seeds: int
    draw: Callable[[str, Sequence[Cell], str], Table]
    timed: bool = False
    suffix: str = ""
    """Of the folder that its runs and results go to, behind the recipe family's name."""
    family: str = "uea"
    sets: tuple[str, ...] = paper.SETS
    parts: tuple[str, ...] = ()
    """Of an ablation."""
    needs: frozenset[str] | None = None
    lineup: Mapping[str, Variant] = field(default_factory=dict)
    """Rows that are more than an attention's name; --models chooses among them."""


TABLES = {
    "uea": Kind("UEA test accuracy (%)", {"protocol": "both"}, tuple(paper.MODELS), 5, accuracy.accuracy),
    "uea-efficiency": Kind(
        "UEA training time and memory",
        # Times and memory are those of every epoch alike, so a few epochs tell them.
        {"protocol": "last", "trainer.epochs": 10, "trainer.evaluate_every": 10},
        tuple(paper.SECONDS),
        3,
        efficiency.efficiency,
        timed=True,
        suffix="-efficiency",
    ),
    "uea-ablation": Kind(
        "UEA ablations, test accuracy (%)", {"protocol": "both"}, (), 3, accuracy.accuracy, parts=ABLATIONS
    ),
    "lra": Kind(
        "Long-Range Arena test accuracy (%)",
        {},
        tuple(paper_lra.MODELS),
        3,
        lra_tables.accuracy,
        family="lra",
        sets=paper_lra.TASKS,
        needs=frozenset({"validation_chosen"}),
    ),
    "lra-ablation": Kind(
        "Long-Range Arena ablations, test accuracy (%)",
        {},
        (),
        3,
        lra_tables.accuracy,
        family="lra",
        sets=paper_lra.TASKS,
        parts=("data-dependence", "r-scores"),
        needs=frozenset({"validation_chosen"}),
    ),
    "image": Kind(
        "Images: test accuracy (%), speed and memory of training",
        {},
        tuple(paper_images.TITLES),
        3,
        image_tables.images,
        family="image",
        sets=("imagenette",),
        needs=frozenset({"last", "best_on_test", "validation_chosen"}),
        timed=True,
    ),
    "d4rl": Kind(
        "D4RL normalised score",
        {},
        tuple(paper_d4rl.MODELS),
        3,
        d4rl_tables.scores,
        family="d4rl",
        sets=paper_d4rl.SETS,
    ),
    "d4rl-efficiency": Kind(
        "D4RL training time and memory",
        {"trainer.epochs": 3, "trainer.steps_per_epoch": 500, "evaluation.episodes": 0},
        tuple(paper_d4rl.MODELS),
        3,
        d4rl_tables.cost,
        timed=True,
        suffix="-efficiency",
        family="d4rl",
        sets=("hopper-medium",),
    ),
    "lm": Kind(
        "Language models",
        {},
        (),
        1,
        language_tables.language,
        family="lm",
        sets=("wikipedia",),
        needs=frozenset({"last"}),
        timed=True,
        lineup=LINEUP,
    ),
}


ABOUT = """Run what is missing of one of the paper's tables and show it with the paper's numbers beside ours. What is
done is not run again, and what was interrupted goes on."""


COST = "lra-efficiency"  # its numbers are no trainings'
NAMES = sorted((*TABLES, COST))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def parser() -> Parser:
    names = " | ".join(NAMES)
    top = Parser(
        prog="primal table", description=ABOUT, epilog="Example: primal table uea --sets JapaneseVowels --seeds 3"
    )
    add: Callable[..., Any] = top.add_argument
    add("name", metavar="NAME", help=names)
    add("--sets", nargs="+", help="sets or tasks; default: those of the paper that are in the data folder")
    add("--models", nargs="+", help="attention names, with a plus for the last layer only; default: the paper's")
    add("--parts", nargs="+", choices=ABLATIONS, metavar="PART", help=f"of an ablation: {', '.join(ABLATIONS)}")
    add("--seeds", type=int, help="how many, from 0 on (default 5 for uea, else 3)")
    add("--recipe", help="family of recipes: the table's own (default), uea-modern or lra-short")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    data = "folder of the data (default $PRIMAL_UEA or data/uea; likewise LRA, D4RL, LM, IMAGES)"
    add("--data", type=Path, help=data)
    add("--any-length", action="store_true", help="also show results of shorter or longer trainings of the same kind")
    add("--no-run", action="store_true", help="only show what is there")
    add("--workers", type=int, default=1, help="runs side by side (default 1)")
    add("--launcher", default="local", choices=list(grid.LAUNCHERS), help="local processes (default) or a Ray cluster")
    add("--runs", type=Path, help="run folders (default runs/RESULTS, so that each results folder has its own)")
    add("--results", type=Path, default=Path("results"), help="one small JSON file per run (default results)")
    add("--commit", help="of the code, where git cannot say it")
    add("--markdown", type=Path, metavar="FILE", help="write the table there too")
    add("--csv", type=Path, metavar="FILE", help="write the unrounded numbers there")
    return top


def main(args: Sequence[str]) -> int:
    found = parser().parse_args(list(args))
    found.runs = found.runs or Path("runs", found.results.name if found.results.is_absolute() else found.results)
    if found.name == COST:
        return show_costs(found, args)
    kind = TABLES.get(found.name)
    if kind is None:
        near = difflib.get_close_matches(found.name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RunError(f"no table is called {found.name!r}: {hint}there are {', '.join(NAMES)}")
    plan = make_plan(kind, found)
    command = table_command(args)
    failed: list[grid.Outcome] = []
    if not found.no_run:
        failed = run_missing(plan, kind, found)
    shelf = Shelf(results.read(found.results), plan.free)
    by_cell = find(plan, shelf)
    if not any(by_cell.values()):
        raise RunError(failure(failed) if failed else nothing_there(plan, shelf, found.results, command))
    cells = [
        Cell(variant.part, name, variant.model, variant.options, by_cell[name, variant.name])
        for variants in by_part(plan)
        for name in plan.sets
        for variant in variants
    ]
    give(kind.draw(title_of(kind, plan), cells, command), found)
    if failed:
        raise RunError(failure(failed))
    return 0


def give(table: Table, found: argparse.Namespace) -> None:
    """Show the table, and write it where that is asked for."""
    show(table)
    if found.markdown:
        write_text(found.markdown, to_markdown(table))
    if found.csv:
        write_csv(found.csv, table.records)


STEP_COST = {
    **dict.fromkeys(("task", "attention", "device", "torch"), str),
    "kind": frozenset({"lra-cost"}),
    "length": COUNT,
    "eager": Number(above=0),
    **dict.fromkeys(("graph", "peak_bytes"), (Number(above=0), None)),
    "commit?": (str, None),
}


def show_costs(found: argparse.Namespace, args: Sequence[str]) -> int:
    """`primal table lra-efficiency`: measure what has no file yet, then the table of the files."""
    import torch

    from primal_attention.bench import lra

    tasks, models = found.sets or paper_lra.TASKS, found.models or lra.ATTENTIONS
    for given, known, flag in ((tasks, paper_lra.TASKS, "--sets"), (models, lra.ATTENTIONS, "--models")):
        for name in given:
            if name not in known:
                raise RunError(f"{flag} {name} is unknown to {COST}: choose of {', '.join(known)}")
    if not found.no_run:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        lra.run(tasks, models, found.results, device=device, commit=found.commit, command=table_command(args))
    files = [lra.result_file(found.results, task, model) for task in tasks for model in models]
    costs = [read_json(file, STEP_COST) for file in files if file.exists()]
    if not costs:
        raise RunError(f"{found.results} has no result of this table: run '{table_command(args)}' first")
    give(lra_tables.cost("Long-Range Arena: time and memory of a training step", costs, table_command(args)), found)
    return 0


def make_plan(kind: Kind, found: argparse.Namespace) -> Plan:
    """The grid that was asked for, checked before anything runs."""
    seeds = kind.seeds if found.seeds is None else found.seeds
    if seeds < 1:
        raise RunError(f"--seeds must be at least 1 (got {seeds})")
    if found.workers < 1:
        raise RunError(f"--workers must be at least 1 (got {found.workers})")
    if found.data is not None and not found.no_run and not found.data.is_dir():
        raise RunError(f"--data {found.data} is not a folder")
    found.recipe = found.recipe or kind.family
    if found.recipe not in registry.FAMILIES:
        near = difflib.get_close_matches(found.recipe, registry.FAMILIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        families = ", ".join(registry.FAMILIES)
        raise RunError(f"no family of recipes is called {found.recipe!r}: {hint}there are {families}")
    if kind.lineup:
        for name in found.models or ():
            if name not in kind.lineup:
                raise RunError(f"--models {name} is not in this table: choose of {', '.join(kind.lineup)}")
        variants = [kind.lineup[name] for name in dict.fromkeys(found.models or kind.lineup)]
    elif kind.models:
        if found.parts:
            raise RunError("--parts belongs to an ablation: this table has --models")
        variants = model_variants(dict.fromkeys(found.models or kind.models))
    else:
        if found.models:
            raise RunError(f"the models of {found.name} are fixed: choose --parts of {', '.join(kind.parts)}")
        for part in found.parts or ():
            if part not in kind.parts:
                raise RunError(f"--parts {part} is not published for {found.name}: choose of {', '.join(kind.parts)}")
        variants = ablation_variants(dict.fromkeys(found.parts or kind.parts))
    changes = {**kind.changes, **dict(read_change(item) for item in found.set)}
    folders: dict[str, Path] = {}
    sets = tuple(found.sets or kind.sets)
    if found.data is not None and kind.family == "lra":
        folders = {name: found.data / name for name in sets}
    elif found.data is not None:
        changes["data.folder"] = found.data
    place = f"{found.recipe}{kind.suffix}"
    free = LENGTH if found.any_length else frozenset()
    plan = Plan(found.recipe, sets, variants, range(seeds), changes, place, folders, kind.needs, free)
    for variant in variants:
        check_models(variant.model)
        plan.key(plan.sets[0], variant)
    if found.no_run:
        return plan
    if found.any_length:
        raise RunError("--any-length only shows what is there: add --no-run")
    if found.sets:
        check_sets(kind.family, found.sets, found.data)
        return plan
    return replace(plan, sets=default_sets(kind, found.data))


def read_change(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise RunError(f"--set takes FIELD=VALUE, for example trainer.epochs=20 (got {item!r})")
    if name in ("seed", "model.attention"):
        raise RunError(f"--set cannot change {name}: the table's grid does")
    return name, grid.parse_value(value)


def check_models(model: str) -> None:
    from primal_attention.nn.baselines import attention_traits

    try:
        attention_traits(model.removesuffix("+"))
    except ValueError as error:
        raise RunError(str(error)) from None


def table_command(args: Sequence[str]) -> str:
    """The words that make the same table, without where it was written or whether it ran."""
    words, skip = [], False
    for word in args:
        if skip or word == "--no-run" or word.startswith(("--markdown=", "--csv=", "--data=")):
            skip = False
        elif word in ("--markdown", "--csv", "--data"):
            skip = True
        else:
            words.append(word)
    return shlex.join(["primal", "table", *words])


def run_missing(plan: Plan, kind: Kind, found: argparse.Namespace) -> list[grid.Outcome]:
    """Run what is not done; the runs that failed."""
    if kind.timed:
        check_alone(found)
    jobs = missing(plan, Shelf(results.read(found.results)), found.runs, found.results, found.commit)
    if not jobs:
        return []
    with progress(len(jobs)) as tell:
        outcomes = grid.run(jobs, workers=found.workers, launcher=found.launcher, report=tell)
    return [o for o in outcomes if o.summary is None]


def check_alone(found: argparse.Namespace) -> None:
    """Runs that are timed must not share a device."""
    import torch

    room = max(1, torch.cuda.device_count())
    if found.launcher != "local":
        raise RunError("times are measured with the local launcher: what else runs on a cluster's machines is unknown")
    if found.workers > room:
        raise RunError(f"runs that are timed must not share a device: --workers at most {room} here")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[grid.Outcome], None]]:
    """A line per finished run and, on a terminal, a bar with the time that is left."""
    ended = 0

    def line(outcome: grid.Outcome) -> str:
        nonlocal ended
        ended += 1
        name = f"[{ended}/{total}] {outcome.job.recipe} {outcome.job.run.name}"
        if outcome.summary is None:
            return f"{name}: failed: {outcome.error}"
        scores = outcome.summary["scores"].items()
        said = "  ".join(f"{key.replace('_', ' ')} {headline(score)}" for key, score in scores)
        return f"{name}: {said}  {outcome.summary['seconds_per_epoch']:.2f} s/epoch"

    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        yield lambda outcome: print(line(outcome), file=sys.stderr, flush=True)
        return
    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, Remaining(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def tell(outcome: grid.Outcome) -> None:
            console.print(line(outcome), markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        yield tell


def by_part(plan: Plan) -> list[list[Any]]:
    parts = dict.fromkeys(variant.part for variant in plan.variants)
    return [[v for v in plan.variants if v.part == part] for part in parts]


def title_of(kind: Kind, plan: Plan) -> str:
    changed = {k: v for k, v in plan.changes.items() if k not in kind.changes and k != "data.folder"}
    changed |= {k: v for k, v in plan.changes.items() if k in kind.changes and kind.changes[k] != v}
    settings = "the paper's settings" if plan.family in ("uea", "lra", "d4rl") else f"recipe {plan.family}"
    but = f", but {', '.join(f'{k} {v}' for k, v in changed.items())}" if changed else ""
    but += ", trainings of any length" if plan.free else ""
    return f"{kind.title}: {settings}{but}"


def nothing_there(plan: Plan, shelf: Shelf, folder: Path, command: str) -> str:
    names = {f"{plan.family}/{name}" for name in plan.sets}
    others = sum(1 for r in shelf.results if r.recipe in names)
    said = f"{folder} has no result of this table" + (f" ({others} with other settings)" if others else "")
    return f"{said}: run '{command}' first, or name another folder with --results"


def failure(failed: Sequence[grid.Outcome]) -> str:
    first = failed[0]
    many = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
    return f"{many} failed, the first was {first.job.recipe} {first.job.run.name}: {first.error}"
