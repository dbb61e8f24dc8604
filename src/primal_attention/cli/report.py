"""`primal report RUNS… -o report.html`: one page of runs, with plotly's script beside it or inside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.cli.flags import Parser
from primal_attention.utils.errors import RunError

ABOUT = """Make one HTML page of runs: scores beside the paper's, sortable tables, learning curves, time and memory
against length, singular values, and the command and configuration of every run. The page works offline."""


def main(args: Sequence[str]) -> int:
    example = "Example: primal report runs/uea results/bench -o report.html"
    parser = Parser(prog="primal report", description=ABOUT, epilog=example)
    add: Any = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, folders of them, JSON of primal bench")
    add("-o", "--out", type=Path, default=Path("report.html"), help="the page; plotly.min.js is written beside it")
    add("--title", default="Primal-Attention runs", help="of the page")
    add("--inline", action="store_true", help="put plotly's script (5 MB) into the page, which is then a single file")
    add("--skip-broken", action="store_true", help="leave out what cannot be read, and list it")
    options = parser.parse_args(list(args))
    if options.out.is_dir():
        raise RunError(f"{options.out} is a folder: --out must be a file, for example {options.out / 'report.html'}")
    from primal_attention.report.page import make_page, write_page
    from primal_attention.report.results import collect

    found = collect(options.runs, skip_broken=options.skip_broken)
    if not (found.runs or found.benches):
        raise RunError(f"nothing to report: no run could be read under {', '.join(map(str, options.runs))}")
    command = shlex.join(["primal", "report", *args])
    page = make_page(found, title=options.title, command=command, inline=options.inline)
    write_page(options.out, page, inline=options.inline)
    for line in found.broken:
        print(f"primal: left out: {line}", file=sys.stderr)
    counts = f"{len(found.runs)} runs and {len(found.benches)} files of benchmarks"
    print(f"{options.out}: {counts}, {len(found.broken)} left out, {options.out.stat().st_size / 1e3:,.0f} kB")
    return 0
