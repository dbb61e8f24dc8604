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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from primal_attention.data import uea
from primal_attention.data.errors import DataError
from primal_attention.engine import grid, registry
from primal_attention.engine.errors import RunError
from primal_attention.engine.files import write_csv, write_text
from primal_attention.engine.plan import ABLATIONS, Plan, Shelf, ablation_variants, find, missing, model_variants
from primal_attention.report import accuracy, efficiency, results
from primal_attention.report import paper_tables as paper
from primal_attention.report.cells import Cell
from primal_attention.report.table import Table, show, to_markdown

ABOUT = """Run what is missing of one of the paper's tables and show it with the paper's numbers beside ours. What is
done is not run again, and what was interrupted goes on."""


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
    "uea-ablation": Kind("UEA ablations, test accuracy (%)", {"protocol": "both"}, (), 3, accuracy.accuracy),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def parser() -> Parser:
    names = " | ".join(TABLES)
    top = Parser(
        prog="primal table", description=ABOUT, epilog="Example: primal table uea --sets JapaneseVowels --seeds 3"
    )
    add: Callable[..., Any] = top.add_argument
    add("name", metavar="NAME", help=names)
    add("--sets", nargs="+", help="default: those of the paper's ten that are in the data folder")
    add("--models", nargs="+", help="attention names, with a plus for the last layer only; default: the paper's")
    add("--parts", nargs="+", choices=ABLATIONS, metavar="PART", help=f"of uea-ablation: {', '.join(ABLATIONS)}")
    add("--seeds", type=int, help="how many, from 0 on (default 5; 3 for efficiency and ablation)")
    add("--recipe", default="uea", help="family of recipes: uea (the paper's settings, default) or uea-modern")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    add("--data", type=Path, help="folder of the archive (default $PRIMAL_UEA or data/uea)")
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
    kind = TABLES.get(found.name)
    if kind is None:
        near = difflib.get_close_matches(found.name, TABLES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RunError(f"no table is called {found.name!r}: {hint}there are {', '.join(TABLES)}")
    plan = make_plan(kind, found)
    command = table_command(args)
    failed: list[grid.Outcome] = []
    if not found.no_run:
        failed = run_missing(plan, kind, found)
    shelf = Shelf(results.read(found.results))
    by_cell = find(plan, shelf)
    if not any(by_cell.values()):
        raise RunError(failure(failed) if failed else nothing_there(plan, shelf, found.results, command))
    cells = [
        Cell(variant.part, name, variant.model, variant.options, by_cell[name, variant.name])
        for variants in by_part(plan)
        for name in plan.sets
        for variant in variants
    ]
    table = kind.draw(title_of(kind, plan), cells, command)
    show(table)
    if found.markdown:
        write_text(found.markdown, to_markdown(table))
    if found.csv:
        write_csv(found.csv, table.records)
    if failed:
        raise RunError(failure(failed))
    return 0


def make_plan(kind: Kind, found: argparse.Namespace) -> Plan:
    """The grid that was asked for, checked before anything runs."""
    seeds = kind.seeds if found.seeds is None else found.seeds
    if seeds < 1:
        raise RunError(f"--seeds must be at least 1 (got {seeds})")
    if found.recipe not in registry.FAMILIES:
        near = difflib.get_close_matches(found.recipe, registry.FAMILIES, n=1, cutoff=0.3)
        raise RunError(f"no family of recipes is called {found.recipe!r}: did you mean {(near or ['uea'])[0]!r}?")
    if kind.models:
        if found.parts:
            raise RunError("--parts belongs to uea-ablation: this table has --models")
        variants = model_variants(dict.fromkeys(found.models or kind.models))
    else:
        if found.models:
            raise RunError(f"the models of uea-ablation are fixed: choose --parts of {', '.join(ABLATIONS)}")
        variants = ablation_variants(dict.fromkeys(found.parts or ABLATIONS))
    changes = {**kind.changes, **dict(read_change(item) for item in found.set)}
    if found.data is not None:
        changes["data.folder"] = found.data
    place = f"{found.recipe}{kind.suffix}"
    plan = Plan(found.recipe, found.sets or paper.SETS, variants, range(seeds), changes, place)
    for variant in variants:
        check_models(variant.model)
        plan.key(plan.sets[0], variant)
    if found.no_run:
        return plan
    if found.sets:
        check_sets(found.sets, found.data)
        return plan
    return replace(plan, sets=default_sets(found.data))


def check_sets(sets: Sequence[str], folder: Path | None) -> None:
    """Stop before the first run if a set is not there."""
    for name in sets:
        if not uea.available(name, folder):
            try:
                uea.load(name, folder)  # says where the archive is to be had
            except DataError as error:
                raise RunError(str(error).replace("--data.folder", "--data")) from None


def default_sets(folder: Path | None) -> Sequence[str]:
    """The paper's sets that can be run here; those that cannot are named."""
    here = [name for name in paper.SETS if uea.available(name, folder)]
    gone = [name for name in paper.SETS if name not in here]
    if not here:
        check_sets(gone, folder)
    if gone:
        where = folder or uea.default_folder()
        print(f"not in {where}, left out: {', '.join(gone)} (the archive: {uea.ARCHIVE})", file=sys.stderr)
    return here


def read_change(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise RunError(f"--set takes FIELD=VALUE, for example trainer.epochs=20 (got {item!r})")
    if name in ("seed", "model.attention"):
        raise RunError(f"--set cannot change {name}: the table's grid does")
    return name, grid.parse_value(value)


def check_models(model: str) -> None:
    from primal_attention.nn.rivals import attention_traits

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
        said = "  ".join(f"{key.replace('_', ' ')} {100 * score['accuracy']:.1f}" for key, score in scores)
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
    settings = "the paper's settings" if plan.family == "uea" else f"recipe {plan.family}"
    but = f", but {', '.join(f'{k} {v}' for k, v in changed.items())}" if changed else ""
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
