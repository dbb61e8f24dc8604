"""What the command data does: make the sets of Long-Range Arena that can be made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from primal_attention.cli.flags import parse
from primal_attention.data.lra import listops, pathfinder
from primal_attention.data.lra.tokens import Progress
from primal_attention.utils.errors import RunError

USAGE = """usage: primal data listops|pathfinder [OPTIONS]

Make a set of Long-Range Arena in the layout of its release. The same seed gives the same files.
After an interruption, the same command completes the set.
'primal data listops --help' lists the options.

Example: primal data listops --out data/lra/listops --seed 0"""
LISTOPS = """Make ListOps: basic_train.tsv, basic_val.tsv, basic_test.tsv.

Example: primal data listops --train 9600 --valid 200 --test 200"""
PATHFINDER = """Draw Pathfinder: imgs/*/sample_*.png, metadata/*.npy and splits.json.

Example: primal data pathfinder --train 16000 --valid 2000 --test 2000"""


@dataclass(frozen=True)
class ListOpsArguments:
    out: Path = Path("data/lra/listops")
    """Folder to write to."""
    train: int = listops.SIZES["train"]
    """Expressions to train on."""
    valid: int = listops.SIZES["valid"]
    """Expressions to choose the step by."""
    test: int = listops.SIZES["test"]
    """Expressions to measure on."""
    seed: int = 0
    """Of everything that is drawn."""


@dataclass(frozen=True)
class PathfinderArguments:
    out: Path = Path("data/lra/pathfinder")
    """Folder to write to."""
    train: int = pathfinder.SIZES["train"]
    """Images to train on."""
    valid: int = pathfinder.SIZES["valid"]
    """Images to choose the step by."""
    test: int = pathfinder.SIZES["test"]
    """Images to measure on."""
    seed: int = 0
    """Of everything that is drawn."""
    contour_length: int = pathfinder.CONTOUR_LENGTH
    """Dashes of each of the two long contours."""
    distractors: int = pathfinder.DISTRACTORS
    """Short contours, as far as they find a place."""
    workers: int = 1
    """Processes that draw; their number changes nothing about the images."""


def main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = args
    try:
        if name == "listops":
            return make_listops(parse(ListOpsArguments, rest, prog="primal data listops", about=LISTOPS))
        if name == "pathfinder":
            return make_pathfinder(parse(PathfinderArguments, rest, prog="primal data pathfinder", about=PATHFINDER))
    except KeyboardInterrupt:
        print("interrupted; the same command completes the set", file=sys.stderr)
        return 130
    raise RunError(
        f"primal data makes listops or pathfinder (got {name!r}); the other tasks are read from their releases"
    )


def make_listops(wanted: ListOpsArguments) -> int:
    cases = _check(wanted)
    with _bar("listops", 2 * cases) as progress:
        listops.write(
            wanted.out,
            train=wanted.train,
            valid=wanted.valid,
            test=wanted.test,
            seed=wanted.seed,
            progress=progress,
        )
    known = listops.by_operator(listops.load(wanted.out))
    print(f"{cases:,} expressions in {wanted.out}; the outermost operator alone tells {known:.1%} of the test labels")
    return 0


def make_pathfinder(wanted: PathfinderArguments) -> int:
    cases = _check(wanted)
    with _bar("pathfinder", 2 * cases) as progress:
        pathfinder.write(
            wanted.out,
            train=wanted.train,
            valid=wanted.valid,
            test=wanted.test,
            seed=wanted.seed,
            contour_length=wanted.contour_length,
            distractors=wanted.distractors,
            progress=progress,
            workers=wanted.workers,
        )
    print(f"{cases:,} images in {wanted.out}")
    return 0


def _check(wanted: ListOpsArguments | PathfinderArguments) -> int:
    """The number of samples."""
    if wanted.seed < 0:
        raise RunError(f"seed must not be negative (got {wanted.seed})")
    return wanted.train + wanted.valid + wanted.test


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Progress | None]:
    """A progress bar on stderr, where that is a terminal and rich is installed."""
    if not sys.stderr.isatty():  # rich would print an empty line
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield None
        return
    with RichProgress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
