"""`primal report RUNS… -o report.html`: one page that needs nothing but itself.

Style sheet, script and charts stand in the file, and its content security policy forbids it to load anything.
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro

import primal_attention
from primal_attention.cli.flags import parse
from primal_attention.report import page_cost, page_sections
from primal_attention.report.page_blocks import section
from primal_attention.report.page_groups import Group, Palette, group
from primal_attention.report.page_numbers import number_at
from primal_attention.report.page_runs import Found, collect
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_text

ABOUT = """Make one self-contained HTML page of runs: tables that sort, learning curves, accuracies beside the paper's,
time and memory against length, singular values, and the command and configuration of every run.

Example: primal report runs/uea results/bench -o report.html"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class ReportArguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS…")] = ()
    """Run folders, folders of them, results files, JSON files of primal bench."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page to write."""
    title: str = "Primal-Attention runs"
    skip_broken: bool = False
    """Leave out what cannot be read, and say how many, instead of stopping at it."""


def main(args: Sequence[str]) -> int:
    found = parse(ReportArguments, args, prog="primal report", about=ABOUT)
    if not found.runs:
        raise RunError("which runs? primal report RUNS… -o report.html, for example primal report runs/uea")
    if found.out.is_dir():
        raise RunError(
            f"{found.out} is a folder: --out must be the page's file, for example {found.out / 'report.html'}"
        )
    inputs = collect(found.runs, skip_broken=found.skip_broken)
    if not (inputs.runs or inputs.benches or inputs.demos):
        raise RunError(f"nothing to report: no run could be read under {', '.join(map(str, found.runs))}")
    write_text(found.out, page(inputs, title=found.title, command=shlex.join(["primal", "report", *args])))
    for line in inputs.broken:
        print(f"primal: left out: {line}", file=sys.stderr)
    left_out = f", {len(inputs.broken)} left out" if inputs.broken else ""
    others = len(inputs.benches) + len(inputs.demos)
    also = f" and {others} file{'' if others == 1 else 's'} of benchmarks" if others else ""
    runs = f"{len(inputs.runs)} run{'' if len(inputs.runs) == 1 else 's'}"
    print(f"{found.out}: {runs}{also}{left_out}, {found.out.stat().st_size / 1e3:,.0f} kB")
    return 0


def page(inputs: Found, *, title: str = "Primal-Attention runs", command: str = "") -> str:
    """The whole page as text."""
    groups, palette = group(inputs.runs), Palette()
    for one in sorted(groups, key=lambda g: g.name):  # colours do not depend on which section asks first
        palette[one.name]
    parts = []
    if groups:
        parts += [page_sections.accuracy(groups, palette), page_sections.results(groups)]
        parts.append(page_sections.learning(groups, palette))
    parts.append(page_cost.cost(inputs.benches, inputs.demos, palette))
    parts.append(page_cost.spectra(groups, inputs.demos, palette))
    if groups:
        parts.append(page_sections.every_run(groups))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>\n{asset('page.css')}</style></head><body>",
            header(title, inputs, groups),
            f"<main>{''.join(parts)}{left_out(inputs)}</main>",
            footer(command),
            '<div id="tip" role="status" hidden></div>',
            f"<script>\n{asset('page.js')}</script></body></html>\n",
        ]
    )


def asset(name: str) -> str:
    return resources.files("primal_attention.report").joinpath(name).read_text(encoding="utf-8")


def header(title: str, inputs: Found, groups: Sequence[Group]) -> str:
    links = [("cost", "Time and memory"), ("spectra", "Singular values")]
    if groups:
        before = [("accuracy", "Accuracy"), ("results", "Results"), ("learning", "Learning curves")]
        links = [*before, *links, ("runs", "Every run")]
    if not any(one.once() for one in groups):
        links = [link for link in links if link[0] != "results"]
    nav = "".join(f'<a href="#{name}">{text}</a>' for name, text in links)
    tiles = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in facts(inputs, groups)
    )
    return (
        f'<header><div class="top"><h1>{escape(title)}</h1><button type="button" id="theme">light / dark</button></div>'
        f'<ul class="tiles">{tiles}</ul></header><nav aria-label="sections">{nav}</nav>'
    )


def facts(inputs: Found, groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Names and values of the tiles below the title."""
    runs = inputs.runs
    waiting = sum(not run.finished for run in runs)
    time = sum(training_seconds(run.summary) for run in runs)
    counts = [
        ("run", "runs", len(runs)),
        ("not finished", "not finished", waiting),
        ("data set", "data sets", len({run.task for run in runs})),
        ("model", "models", len({one.name for one in groups})),
        ("seed", "seeds", len({run.seed for run in runs})),
        ("benchmark", "benchmarks", len(inputs.benches) + len(inputs.demos)),
    ]
    told = [(one if number == 1 else many, str(number)) for one, many, number in counts if number]
    return [*told, ("of training", duration(time))] if time else told


def training_seconds(summary: Mapping[str, Any]) -> float:
    """Of a run's first training: epochs times the median epoch."""
    return (number_at(summary, ["seconds_per_epoch"]) or 0.0) * (number_at(summary, ["epochs"]) or 0.0)


def duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"


def left_out(inputs: Found) -> str:
    if not inputs.broken:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in inputs.broken)
    return section("broken", "Left out", "", f'<ul class="sources">{lines}</ul>')


def footer(command: str) -> str:
    today = datetime.date.today().isoformat()
    made = f"Made {today} by primal-attention {escape(primal_attention.__version__)}"
    return f"<footer>{made}{f' with <code>{escape(command)}</code>' if command else ''}</footer>"
