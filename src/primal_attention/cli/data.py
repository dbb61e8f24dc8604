"""`primal data`: make the data sets of Long-Range Arena that are generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primal_attention.cli.flags import Parser
from primal_attention.data.lra import listops, pathfinder
from primal_attention.utils.errors import RunError
from primal_attention.utils.progress import Progress

ABOUT = """Make a data set of Long-Range Arena in the layout of its release. The same seed gives the same files. An
interrupted set is removed, and the same command makes it again. The other tasks are read as released."""
TASKS = {
    "listops": (listops, "make ListOps: basic_train.tsv, basic_val.tsv, basic_test.tsv"),
    "pathfinder": (pathfinder, "draw Pathfinder: imgs/*/sample_*.png, metadata/*.npy and splits.json"),
}
USES = {"train": "train on", "valid": "choose the step by", "test": "measure on"}


def main(args: Sequence[str]) -> int:
    settings = vars(make_parser().parse_args(list(args) or ["--help"]))
    name, out = settings.pop("task"), settings.pop("out")
    if settings["seed"] < 0:
        raise RunError(f"--seed must not be negative (got {settings['seed']})")
    count = sum(settings[split] for split in USES)
    with Progress(count, name) as progress:
        TASKS[name][0].write(out, **settings, progress=lambda done: progress.advance(count=done))
    print(f"{count:,} samples in {out}")
    if name == "listops":
        share = listops.by_operator(listops.load(out))
        print(f"the outermost operator alone predicts {share:.1%} of the labels")
    return 0


def make_parser() -> Parser:
    top = Parser(prog="primal data", description=ABOUT, epilog="Example: primal data listops --out data/lra/listops")
    tasks = top.add_subparsers(dest="task", metavar=" | ".join(TASKS), required=True)
    for name, (module, about) in TASKS.items():
        example = f"Example: primal data {name} --train 9600 --valid 200 --test 200"
        parser = tasks.add_parser(name, help=about, description=about, epilog=example)
        parser.add_argument("--out", type=Path, default=Path("data/lra", name), help="folder (default %(default)s)")
        for split, use in USES.items():
            size = module.SIZES[split]
            parser.add_argument(f"--{split}", type=int, default=size, help=f"samples to {use} (default {size})")
        parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    length, short = pathfinder.CONTOUR_LENGTH, pathfinder.DISTRACTORS
    parser.add_argument("--contour-length", type=int, default=length, help=f"dashes per contour (default {length})")
    parser.add_argument("--distractors", type=int, default=short, help=f"short contours (default {short})")
    parser.add_argument("--workers", type=int, default=1, help="processes; the images do not depend on it")
    return top
