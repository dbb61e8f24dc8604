"""`primal data`: make the data sets of Long-Range Arena that are generated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from primal_attention.cli.flags import Parser
from primal_attention.data.lra import listops, pathfinder
from primal_attention.utils.errors import RunError
from primal_attention.utils.progress import Progress

USAGE = """usage: primal data listops|pathfinder [OPTIONS]

Make a data set of Long-Range Arena in the layout of its release. The same seed gives the same files.
After an interruption, the same command completes the set.
'primal data listops --help' lists the options.

Example: primal data listops --out data/lra/listops --seed 0"""
ABOUT = {
    "listops": "Make ListOps: basic_train.tsv, basic_val.tsv, basic_test.tsv.",
    "pathfinder": "Draw Pathfinder: imgs/*/sample_*.png, metadata/*.npy and splits.json.",
}
SIZES = {"listops": listops.SIZES, "pathfinder": pathfinder.SIZES}
USES = {"train": "train on", "valid": "choose the step by", "test": "measure on"}


def main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = args
    if name not in ABOUT:
        raise RunError(f"primal data makes {' or '.join(ABOUT)} (got {name!r}); the other tasks are read as released")
    options = parse_options(name, rest)
    if options.seed < 0:
        raise RunError(f"--seed must not be negative (got {options.seed})")
    count = options.train + options.valid + options.test
    with Progress(2 * count, name) as progress:
        sizes = {split: getattr(options, split) for split in USES}
        settings = {"seed": options.seed, "progress": lambda count: progress.advance(count=count)}
        if name == "listops":
            listops.write(options.out, **sizes, **settings)
        else:
            settings |= {key: getattr(options, key) for key in ("contour_length", "distractors", "workers")}
            pathfinder.write(options.out, **sizes, **settings)
    if name == "listops":
        known = listops.by_operator(listops.load(options.out))
        print(
            f"{count:,} expressions in {options.out}; the outermost operator alone predicts {known:.1%} of the labels"
        )
        return 0
    print(f"{count:,} images in {options.out}")
    return 0


def parse_options(name: str, args: Sequence[str]) -> argparse.Namespace:
    prog, small = f"primal data {name}", "--train 9600 --valid 200 --test 200"
    parser = Parser(prog=prog, description=ABOUT[name], epilog=f"Example: {prog} {small}")
    parser.add_argument("--out", type=Path, default=Path("data/lra", name), help="folder (default %(default)s)")
    for split, use in USES.items():
        size = SIZES[name][split]
        parser.add_argument(f"--{split}", type=int, default=size, help=f"samples to {use} (default {size})")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    if name == "pathfinder":
        length, short = pathfinder.CONTOUR_LENGTH, pathfinder.DISTRACTORS
        parser.add_argument("--contour-length", type=int, default=length, help=f"dashes per contour (default {length})")
        parser.add_argument("--distractors", type=int, default=short, help=f"short contours (default {short})")
        parser.add_argument("--workers", type=int, default=1, help="processes; the images do not depend on it")
    return parser.parse_args(list(args))
