"""`primal table NAME`: run what is missing of a table's grid, then show the table from the stored results."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import Parser, positive
from primal_attention.utils.errors import RunError, check_name
from primal_attention.utils.files import write_text
from primal_attention.utils.progress import Progress

if TYPE_CHECKING:
    from primal_attention.report.tables import TableKind
    from primal_attention.train.grid import Outcome, Plan

ABOUT = """Run what is missing of one of the paper's tables and show it with the paper's numbers beside ours. Finished
runs are not run again; interrupted ones continue."""
NAMES = (
    "uea", "uea-ablation", "uea-efficiency", "lra", "lra-ablation", "lra-efficiency", "d4rl", "d4rl-efficiency", "lm",
    "image",
)  # fmt: skip
PARTS = ("eta-s", "data-dependence", "r-scores")


def parser() -> Parser:
    top = Parser(
        prog="primal table", description=ABOUT, epilog="Example: primal table uea --sets JapaneseVowels --seeds 3"
    )
    add: Callable[..., Any] = top.add_argument
    add("name", metavar="NAME", help=" | ".join(NAMES))
    add("--sets", nargs="+", help="sets or tasks; default: those of the paper that are in the data folder")
    add("--models", nargs="+", help="attention names, with a plus for the last layer only; default: the paper's")
    add("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of an ablation: {', '.join(PARTS)}")
    add("--seeds", type=positive, help="number of seeds, from 0 on (default 5 for uea, 1 for lm, else 3)")
    add("--recipe", help="family of recipes: the table's own (default), uea-modern or lra-short")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    add("--data", type=Path, help="data folder (default $PRIMAL_UEA or data/uea; likewise LRA, D4RL, LM, IMAGES)")
    add("--any-length", action="store_true", help="also show results of shorter or longer trainings")
    add("--no-run", action="store_true", help="only show stored results")
    add("--workers", type=positive, default=1, help="runs side by side (default 1)")
    add("--launcher", default="local", choices=("local", "ray"), help="local processes (default) or a Ray cluster")
    add("--runs", type=Path, help="run folders (default runs/RESULTS)")
    add("--results", type=Path, default=Path("results"), help="one small JSON file per run (default results)")
    add("--commit", help="of the code, where git cannot say it")
    add("--markdown", type=Path, metavar="FILE", help="also write the table as Markdown")
    add("--csv", type=Path, metavar="FILE", help="also write the unrounded numbers")
    return top


def main(args: Sequence[str]) -> int:
    options = parser().parse_args(list(args))
    check_name(options.name, NAMES, "table")
    from primal_attention.report import results, tables

    if options.runs is None:
        options.runs = Path("runs", options.results.name if options.results.is_absolute() else options.results)
    kind, command = tables.table_kinds()[options.name], table_command(args)
    plan = make_plan(kind, options)
    failed: list[Outcome] = []
    if options.name == "lra-efficiency":
        cells, others = step_costs(plan, options), 0
    else:
        if not options.no_run:
            failed = run_missing(plan, kind, options)
        index = results.ResultIndex(plan, results.read_summaries(options.results))
        cells, others = tables.make_cells(kind.benchmark, plan, index), len(index.runs)
    if any(cell.all_runs for cell in cells):
        title = kind.title if options.name == "lra-efficiency" else table_title(kind, plan)
        table = tables.make_table(kind, title, cells, command)
        tables.to_terminal(table)
        if options.markdown:
            write_text(options.markdown, tables.to_markdown(table))
        if options.csv:
            tables.to_csv(table, options.csv)
    elif not failed:
        absent = "no result of this table" + (f" ({others} with other settings)" if others else "")
        raise RunError(f"{options.results} has {absent}: run '{command}' first, or name another folder with --results")
    if failed:
        count = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        job = failed[0].job
        raise RunError(f"{count} failed, the first was {job.recipe} {job.run.name}: {failed[0].error}")
    return 0


def make_plan(kind: TableKind, options: argparse.Namespace) -> Plan:
    """The grid that the options ask for, checked before anything runs."""
    from primal_attention.report.results import LENGTH_FIELDS, ResultIndex
    from primal_attention.train import registry
    from primal_attention.train.grid import Plan

    seeds = kind.seeds if options.seeds is None else options.seeds
    if options.data is not None and not options.no_run and not options.data.is_dir():
        raise RunError(f"--data {options.data} is not a folder")
    if options.any_length and not options.no_run:
        raise RunError("--any-length only shows stored results: add --no-run")
    family = options.recipe or kind.benchmark
    check_name(family, registry.FAMILIES, "family of recipes")
    changes = {**kind.changes, **dict(read_change(item) for item in options.set)}
    sets, folders = tuple(options.sets or kind.sets), {}
    if options.data is not None and kind.benchmark == "lra":
        folders = {name: options.data / name for name in sets}
    elif options.data is not None:
        changes["data.folder"] = options.data
    ignored = LENGTH_FIELDS if options.any_length else frozenset()
    variants, place = chosen_variants(kind, options), f"{family}{kind.suffix}"
    plan = Plan(family, sets, variants, range(seeds), changes, place, folders, kind.needed_scores, ignored)
    if options.name == "lra-efficiency":
        for name in sets:
            check_name(name, kind.sets, "task")
        return plan
    for variant in variants:  # fields and values that the recipe does not take are errors here
        ResultIndex(plan, []).cell_key(sets[0], variant)
    return plan if options.no_run else with_available_sets(plan, kind, options)


def chosen_variants(kind: TableKind, options: argparse.Namespace) -> list[Any]:
    from primal_attention.nn.baselines import attention_names
    from primal_attention.report.tables import ablation_variants, language_variants, model_variants

    if kind.parts:
        if options.models:
            raise RunError(f"the models of {options.name} are fixed: choose --parts of {', '.join(kind.parts)}")
        for part in options.parts or ():
            check_name(part, kind.parts, f"part of {options.name}")
        return ablation_variants(dict.fromkeys(options.parts or kind.parts))
    if options.parts:
        raise RunError("--parts belongs to an ablation: this table has --models")
    known: Iterable[str] = [name + plus for name in attention_names() for plus in ("", "+")]
    if options.name in ("lm", "lra-efficiency"):
        known = kind.models
    models = list(dict.fromkeys(options.models or kind.models))
    for model in models:
        check_name(model, known, "model of this table")
    return [language_variants()[model] for model in models] if kind.benchmark == "lm" else model_variants(models)


def read_change(item: str) -> tuple[str, Any]:
    """A field and its value: a number, true, false, none, or text."""
    name, equals, text = item.partition("=")
    if not equals or not name:
        raise RunError(f"--set takes FIELD=VALUE, for example trainer.epochs=20 (got {item!r})")
    if name in ("seed", "model.attention"):
        raise RunError(f"--set cannot change {name}: the table's grid does")
    with contextlib.suppress(ValueError):
        return name, json.loads("null" if text.lower() == "none" else text.lower())
    return name, text


def with_available_sets(plan: Plan, kind: TableKind, options: argparse.Namespace) -> Plan:
    """Leave out sets that lack both data and results, and name them; a set that was asked for must be there."""
    from primal_attention.data import d4rl, uea
    from primal_attention.report import results
    from primal_attention.train import grid, image, lm, lra

    is_here: dict[str, Callable[[str, Path | None], object]] = {
        "uea": uea.find,
        "d4rl": d4rl.find,
        "image": lambda name, folder: (folder or image.default_folder()).is_dir(),
        "lm": lambda name, folder: (folder or lm.default_folder(name)).is_dir(),
        "lra": lambda name, folder: (folder / name if folder else lra.default_folder(name)).is_dir(),
    }
    index = results.ResultIndex(plan, results.read_summaries(options.results))
    jobs = {job.recipe.partition("/")[2]: job for job in index.missing_jobs(options.runs, options.results)}
    missing = [name for name in plan.sets if name in jobs and not is_here[kind.benchmark](name, options.data)]
    if missing and (options.sets or len(missing) == len(plan.sets)):
        error = str(grid.run_job(jobs[missing[0]]).error)  # says where to get the data
        raise RunError(error.replace("--data.folder", "--data"))
    if missing:
        print(f"no data, left out: {', '.join(missing)} (docs/ says how to get it)", file=sys.stderr)
    return replace(plan, sets=[name for name in plan.sets if name not in missing])


def run_missing(plan: Plan, kind: TableKind, options: argparse.Namespace) -> list[Outcome]:
    """Run what is not finished; returns the runs that failed."""
    import torch

    from primal_attention.report import results
    from primal_attention.train import grid

    if kind.is_timed and options.launcher != "local":
        raise RunError("times are measured with the local launcher: a cluster's machines may have other work")
    if kind.is_timed and options.workers > max(1, torch.cuda.device_count()):
        raise RunError("runs that are timed must not share a device: --workers at most the number of GPUs")
    index = results.ResultIndex(plan, results.read_summaries(options.results))
    jobs = index.missing_jobs(options.runs, options.results, options.commit)
    if not jobs:
        return []
    with Progress(len(jobs), "runs") as bar:

        def report(outcome: Outcome) -> None:
            text = f"failed: {outcome.error}"
            if outcome.summary is not None:
                scores = outcome.summary["scores"].items()
                text = "  ".join(f"{name.replace('_', ' ')} {results.in_full(score)}" for name, score in scores)
            bar.advance(f"{outcome.job.recipe} {outcome.job.run.name}: {text}")

        outcomes = grid.run(jobs, workers=options.workers, launcher=options.launcher, report=report)
    return [outcome for outcome in outcomes if outcome.summary is None]


def step_costs(plan: Plan, options: argparse.Namespace) -> list[Any]:
    """`lra-efficiency`: measure the steps that have no file yet, then read the files."""
    from primal_attention.cli import bench
    from primal_attention.report.results import read_step_cost
    from primal_attention.report.tables import Cell, with_softmax

    if not options.no_run:
        commit = [] if options.commit is None else ["--commit", options.commit]
        models = [variant.name for variant in plan.variants]
        bench.main(["lra", "--tasks", *plan.sets, "--models", *models, "--results", str(options.results), *commit])
    found = [(name, v, read_step_cost(options.results, name, v.name)) for name, v in plan.cells()]
    return with_softmax([Cell("lra", name, v, {name: runs}) for name, v, runs in found if runs])


def table_command(args: Sequence[str]) -> str:
    """The command that makes the same table, without its output files and data folder."""
    line = shlex.join(["primal", "table", *args])
    return re.sub(r" (--no-run|--(markdown|csv|data)[ =]('[^']*'|\S+))", "", line)


def table_title(kind: TableKind, plan: Plan) -> str:
    changed = [f"{k} {v}" for k, v in plan.changes.items() if k != "data.folder" and kind.changes.get(k, ...) != v]
    if plan.ignored_fields:
        changed.append("trainings of any length")
    settings = "the paper's settings" if plan.family in ("uea", "lra", "d4rl") else f"recipe {plan.family}"
    return f"{kind.title}: {settings}" + (f", but {', '.join(changed)}" if changed else "")
