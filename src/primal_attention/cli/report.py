"""`primal report RUNS… -o report.html`: one page of runs, with plotly's script beside it or inside it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from primal_attention.cli.flags import Parser
from primal_attention.utils.errors import RunError

ABOUT = """It shows scores beside the paper's, sortable tables, learning curves, time and memory, singular
values, and the command and configuration of every run. The page works offline."""


def main(args: Sequence[str]) -> int:
    parser = Parser("report", "runs/uea results/bench -o report.html", ABOUT)
    runs = "run folders, folders of them, JSON of primal bench attention or generate"
    parser.flag("runs", runs, nargs="+", type=Path, metavar="RUNS")
    page = "the page (default %(default)s); plotly.min.js is written beside it"
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help=page)
    parser.flag("--inline", "put plotly's script (5 MB) into the page, which is then a single file")
    parser.flag("--skip-broken", "leave out what cannot be read, and list it")
    options = parser.parse_args(args)
    out: Path = options.out
    if out.is_dir():
        raise RunError(f"{out} is a folder: --out must be a file, for example {out / 'report.html'}")
    from primal_attention.report.page import write_page
    from primal_attention.report.results import collect

    content = collect(options.runs, skip_broken=options.skip_broken)
    if not (content.runs or content.benches):
        raise RunError(f"nothing to report: no run could be read under {', '.join(map(str, options.runs))}")
    write_page(out, content, command=shlex.join(["primal", "report", *args]), inline=options.inline)
    for line in content.broken:
        print(f"primal: left out: {line}", file=sys.stderr)
    counts = f"runs: {len(content.runs)}, benchmarks: {len(content.benches)}, left out: {len(content.broken)}"
    print(f"written: {out}  {counts}")
    return 0
