"""`primal table NAME`: run what is missing of a table's grid, then show the table from the files that the runs left.

With nothing but argparse, so that it also runs where little is installed; rich makes it prettier.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from primal_attention.engine import registry
from primal_attention.engine.errors import RunError
from primal_attention.engine.files import write_csv, write_text
from primal_attention.engine.headline import headline
from primal_attention.engine.tables import grid
from primal_attention.engine.tables.plan import (
    ABLATIONS,
    LENGTH,
    Plan,
    Shelf,
    ablation_variants,
    find,
    missing,
    model_variants,
)
from primal_attention.engine.tables.table_kinds import TABLES, Kind
from primal_attention.engine.tables.table_sets import check_sets, default_sets
from primal_attention.report import lra as lra_tables
from primal_attention.report import paper_lra, results
from primal_attention.report.cells import Cell
from primal_attention.report.table import Table, show, to_markdown

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


def show_costs(found: argparse.Namespace, args: Sequence[str]) -> int:
    """`primal table lra-efficiency`: measure what has no file yet, then the table of the files."""
    import torch

    from primal_attention.engine.arena import lra_cost

    tasks, models = found.sets or paper_lra.TASKS, found.models or lra_cost.ATTENTIONS
    for given, known, flag in ((tasks, paper_lra.TASKS, "--sets"), (models, lra_cost.ATTENTIONS, "--models")):
        for name in given:
            if name not in known:
                raise RunError(f"{flag} {name} is unknown to {COST}: choose of {', '.join(known)}")
    if not found.no_run:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        lra_cost.run(tasks, models, found.results, device=device, commit=found.commit, tell=lra_cost.say)
    costs = lra_cost.read(found.results, tasks, models)
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
