"""`primal table NAME`: run the missing runs of a table, then show it from the stored results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import Parser, positive
from primal_attention.utils.errors import RunError, check_name
from primal_attention.utils.files import write_text
from primal_attention.utils.progress import Progress

if TYPE_CHECKING:
    from primal_attention.report.tables import TableKind
    from primal_attention.train.grid import Plan, Variant

ABOUT = """Finished runs are not run again; interrupted ones continue. uea-modern compares PrimalClassifier with other
classifiers."""
NAMES = (
    "uea", "uea-ablation", "uea-efficiency", "uea-modern", "lra", "lra-ablation", "lra-efficiency", "d4rl",
    "d4rl-ablation", "d4rl-efficiency", "lm", "image",
)  # fmt: skip
# Flags that some tables do not have.
WITHOUT_FITS = ("holdout", "threads")
WITHOUT_TRAININGS = ("recipe", "any_length")
WITHOUT_JOBS = (*WITHOUT_FITS, *WITHOUT_TRAININGS, "set", "data", "seeds", "workers", "launcher", "commit")


def read_options(args: Sequence[str]) -> argparse.Namespace:
    parser = Parser("table", "uea --sets JapaneseVowels --seeds 3", ABOUT)
    add: Any = parser.flag
    add("name", " | ".join(NAMES), metavar="NAME")
    add("--sets", "sets or tasks; default: those of the table that are in the data folder", nargs="+")
    add("--models", "attention names, with a plus for the last layer only, or rows or parts of the table", nargs="+")
    add("--seeds", "number of seeds, from 0 on (default 5 for uea and uea-modern, 1 for lm, else 3)", type=positive)
    add("--recipe", "recipe family: the table's (default), or uea-modern, lra-short, lra-modern", default=None)
    fields = "fields of the recipe to change; uea-modern: parameters of PrimalClassifier"
    add("--set", fields, nargs="+", default=[], metavar="FIELD=VALUE")
    add("--holdout", "uea-modern: score this part of the training samples, and not test", type=float)
    add("--threads", "uea-modern: threads of each fit (default 2)", type=positive)
    add("--data", "data folder (default $PRIMAL_UEA or data/uea; likewise LRA, D4RL, LM, IMAGE)", type=Path)
    add("--any-length", "with --no-run: also show results of shorter or longer trainings")
    add("--no-run", "only show stored results")
    add("--workers", "runs side by side (default 1)", type=positive)
    add("--launcher", "local processes (default) or a Ray cluster", choices=("local", "ray"))
    add("--results", "one small JSON file per run (default results)", type=Path, default=Path("results"))
    add("--commit", "commit of the code, if git is not available", default=None)
    add("--markdown", "also write the table as Markdown", type=Path, metavar="FILE")
    add("--csv", "also write the unrounded numbers", type=Path, metavar="FILE")
    options = parser.parse_args(args)
    check_name(options.name, NAMES, "table")
    foreign = {"uea-modern": WITHOUT_TRAININGS, "lra-efficiency": WITHOUT_JOBS}.get(options.name, WITHOUT_FITS)
    for flag in (name for name in foreign if getattr(options, name) not in (None, False, [])):
        raise RunError(f"--{flag.replace('_', '-')} has no meaning for {options.name} (see primal table --help)")
    if options.holdout is not None and not 0 <= options.holdout < 1:
        raise RunError(f"--holdout must be at least 0 and below 1 (got {options.holdout:g})")
    if options.any_length and not options.no_run:
        raise RunError("--any-length only shows stored results: add --no-run")
    if options.data is not None and not options.no_run and not options.data.is_dir():
        raise RunError(f"--data {options.data} is not a folder")
    if options.results.is_file():
        raise RunError(f"--results {options.results} is not a folder")
    return options


def main(args: Sequence[str]) -> int:
    options = read_options(args)
    from primal_attention.report import tables
    from primal_attention.report.results import ResultIndex, read_summaries

    kind, command = tables.table_kinds()[options.name], table_command(args)
    plan, errors, trains = make_plan(kind, options), list[str](), kind.source == "runs"
    index = ResultIndex(plan, read_summaries(options.results), trains=trains)
    if not options.no_run and kind.source != "steps":
        runs = Path("runs", options.results.name if options.results.is_absolute() else options.results)
        fit = {"folder": options.data, "threads": options.threads or 2, "command": command}
        jobs = index.missing_jobs(runs, options.results, options.commit, **fit)
        absent = sets_without_data(plan, {set_of(job) for job in jobs}, kind, options)
        plan = replace(plan, sets=[name for name in plan.sets if name not in absent])
        errors = run_jobs([job for job in jobs if set_of(job) not in absent], kind, options)
        index = ResultIndex(plan, read_summaries(options.results), trains=trains)
    cells = [tables.Cell(kind.benchmark, name, row, {name: index.find(name, row)}) for name, row in plan.cells()]
    shown = {*(options.models or ()), *(cell.variant.name for cell in cells if cell.all_runs)}
    cells = [cell for cell in cells if {cell.variant.name, cell.variant.part} & shown]  # not all models have run yet
    if any(cell.all_runs for cell in cells):
        table = tables.make_table(kind, table_title(kind, plan), cells, command)
        tables.to_terminal(table)
        if options.markdown:
            write_text(options.markdown, tables.to_markdown(table))
        if options.csv:
            tables.to_csv(table, options.csv)
    elif not errors:
        others = f" ({len(index.runs)} with other settings: one {index.nearest_difference()})" if index.runs else ""
        first = "primal bench lra" if kind.source == "steps" else command
        reason = f"{options.results} has no result of this table{others}"
        choice = "choose other settings with --set, " if index.runs and trains else ""
        raise RunError(f"{reason}: run '{first}' first, {choice}or name another folder with --results")
    if errors:
        count = "1 run" if len(errors) == 1 else f"{len(errors)} runs"
        raise RunError(f"{count} failed, the first was {errors[0]}")
    return 0


def make_plan(kind: TableKind, options: argparse.Namespace) -> Plan:
    """The grid that the options ask for, checked before anything runs."""
    from primal_attention.report.results import LENGTH_FIELDS, ResultIndex
    from primal_attention.train import classifiers, registry
    from primal_attention.train.grid import Plan

    family = options.recipe or kind.family or kind.benchmark
    families = [name for name, about in registry.FAMILIES.items() if about.source.startswith(f"{kind.benchmark}:")]
    check_name(family, families, f"recipe family of {kind.benchmark}")
    fields = dict(read_change(item) for item in options.set)
    changes = {**kind.changes, **fields}
    sets, folders = tuple(dict.fromkeys(options.sets or kind.sets)), {}
    if kind.source == "fits":
        classifiers.check_parameters(fields)
        changes["holdout"] = options.holdout or 0.0
    elif options.data is not None and kind.benchmark == "lra":
        folders = {name: options.data / name for name in sets}
    elif options.data is not None:
        changes["data.folder"] = options.data
    ignored = LENGTH_FIELDS if options.any_length else frozenset()
    variants, place = choose_variants(kind, options.models), f"{family}{kind.suffix}"
    seeds = range(options.seeds or kind.seeds)
    plan = Plan(family, sets, variants, seeds, changes, place, folders, kind.needed_scores, ignored)
    for name in sets if kind.source == "steps" else ():
        check_name(name, kind.sets, "task")
    for variant in variants if kind.source == "runs" else ():  # fields and values that the recipe does not take
        ResultIndex(plan, []).cell_settings(sets[0], variant)
    return plan


def choose_variants(kind: TableKind, models: Sequence[str] | None) -> list[Variant]:
    """The rows of a table: all, or those that --models names by model or by part."""
    from primal_attention.report.tables import extra_variants

    by_name: dict[str, list[Variant]] = {}
    for variant in kind.variants:
        by_name.setdefault(variant.name, []).append(variant)
        by_name.setdefault(variant.part, []).append(variant)
    if kind.takes_any_model:
        by_name |= {variant.name: [variant] for variant in extra_variants()}
    for model in models or ():
        check_name(model, by_name, "model of this table")
    return [variant for model in dict.fromkeys(models) for variant in by_name[model]] if models else list(kind.variants)


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


def set_of(job: Any) -> str:
    return str(job.recipe.partition("/")[2])


def sets_without_data(plan: Plan, names: set[str], kind: TableKind, options: argparse.Namespace) -> list[str]:
    """Name the sets among `names` that lack their data; a set that was asked for must have it."""
    from primal_attention.data import d4rl, uea
    from primal_attention.data.storage import default_folder
    from primal_attention.train import grid

    has_data: dict[str, Callable[[str, Path | None], object]] = {
        "uea": uea.find,
        "d4rl": d4rl.find,
        "image": lambda name, folder: (folder or default_folder("image")).is_dir(),
        "lm": lambda name, folder: (folder or default_folder("lm", name)).is_dir(),
        "lra": lambda name, folder: (folder / name if folder else default_folder("lra", name)).is_dir(),
    }
    missing = [name for name in plan.sets if name in names and not has_data[kind.benchmark](name, options.data)]
    if missing and (options.sets or len(missing) == len(plan.sets)):
        folder = plan.folders.get(missing[0], options.data)
        job = grid.Job(f"{plan.family}/{missing[0]}", {"data.folder": folder}, Path("runs"), Path("results/none"))
        error = str(grid.run_job(job).error)  # says where to get the data
        error = error.replace("--data.folder", "--data").removesuffix(", or a Minari set with --data.minari")
        raise RunError(error)
    if missing:
        print(f"no data, left out: {', '.join(missing)} (docs/ says how to get it)", file=sys.stderr)
    return missing


def run_jobs(jobs: list[Any], kind: TableKind, options: argparse.Namespace) -> list[str]:
    """Run trainings or fits; return a line for each that failed."""
    import torch

    from primal_attention.report.results import in_full
    from primal_attention.train import classifiers, grid

    workers = options.workers or 1
    if kind.is_timed and options.launcher == "ray":
        raise RunError("times are measured with the local launcher: a cluster's machines may have other work")
    if kind.is_timed and workers > max(1, torch.cuda.device_count()):
        raise RunError("runs that are timed must not share a device: --workers at most the number of GPUs")
    if kind.source == "fits":
        return classifiers.run_fits(jobs)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # in worker processes: the settings are the table's
    errors = []
    with Progress(len(jobs), "runs") as bar:
        for outcome in grid.run(jobs, workers, options.launcher or "local") if jobs else ():
            scores = outcome.summary["scores"] if outcome.summary else {}
            texts = [f"{name.replace('_', ' ')} {in_full(score)}" for name, score in scores.items()]
            line = f"{outcome.job.recipe} {outcome.job.run.name}: {outcome.error or '  '.join(texts)}"
            errors += [line] if outcome.summary is None else []
            bar.advance(line)
    return errors


def table_command(args: Sequence[str]) -> str:
    """The command that makes the same table, without its output files and data folder."""
    line = shlex.join(["primal", "table", *args])
    return re.sub(r" (--no-run|--(markdown|csv|data)[ =]('[^']*'|\S+))", "", line)


def table_title(kind: TableKind, plan: Plan) -> str:
    if kind.source == "steps":
        return kind.title
    changed = [f"{k} {v}" for k, v in plan.changes.items() if k != "data.folder" and kind.changes.get(k, ...) != v]
    if plan.ignored_fields:
        changed.append("trainings of any length")
    settings = "the paper's settings" if plan.family in ("uea", "lra", "d4rl") else f"recipe {plan.family}"
    settings = "default settings" if kind.source == "fits" else settings
    return f"{kind.title}: {settings}" + (f", but {', '.join(changed)}" if changed else "")
