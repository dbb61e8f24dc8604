"""`primal report RUNS… -o report.html`: one page of runs, with plotly's script beside it or inside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from primal_attention.cli.flags import parse
from primal_attention.utils.errors import RunError

ABOUT = """Make one HTML page of runs: scores beside the paper's, sortable tables, learning curves, time and memory
against length, singular values, and the command and configuration of every run. The page works offline.

Example: primal report runs/uea results/bench -o report.html"""


@dataclass(frozen=True)
class ReportArguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS…")] = ()
    """Run folders, folders of them, results files, JSON files of primal bench."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page to write. The script plotly.min.js is written beside it."""
    title: str = "Primal-Attention runs"
    inline: bool = False
    """Put plotly's script (5 MB) into the page, so that it is a single file."""
    skip_broken: bool = False
    """Leave out what cannot be read, and list it, instead of stopping there."""


def main(args: Sequence[str]) -> int:
    options = parse(ReportArguments, args, prog="primal report", about=ABOUT)
    if not options.runs:
        raise RunError("which runs? primal report RUNS… -o report.html, for example primal report runs/uea")
    if options.out.is_dir():
        raise RunError(f"{options.out} is a folder: --out must be a file, for example {options.out / 'report.html'}")
    from primal_attention.report.page import make_page, write_page
    from primal_attention.report.results import collect

    found = collect(options.runs, skip_broken=options.skip_broken)
    if not (found.runs or found.benches or found.demos):
        raise RunError(f"nothing to report: no run could be read under {', '.join(map(str, options.runs))}")
    command = shlex.join(["primal", "report", *args])
    page = make_page(found, title=options.title, command=command, inline=options.inline)
    write_page(options.out, page, inline=options.inline)
    for line in found.broken:
        print(f"primal: left out: {line}", file=sys.stderr)
    left_out = f", {len(found.broken)} left out" if found.broken else ""
    others = len(found.benches) + len(found.demos)
    also = f" and {others} file{'' if others == 1 else 's'} of benchmarks" if others else ""
    runs = f"{len(found.runs)} run{'' if len(found.runs) == 1 else 's'}"
    print(f"{options.out}: {runs}{also}{left_out}, {options.out.stat().st_size / 1e3:,.0f} kB")
    return 0
