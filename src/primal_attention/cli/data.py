"""`primal data`: make the data sets of Long-Range Arena that are generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primal_attention.cli.flags import Parser, positive, read_integer, split_command
from primal_attention.data.lra import listops, pathfinder, retrieval
from primal_attention.utils.progress import Progress

TASKS = {
    "listops": "Make ListOps (basic_train.tsv, basic_val.tsv, basic_test.tsv).",
    "pathfinder": "Draw Pathfinder (imgs/*/sample_*.png, metadata/*.npy, splits.json).",
    "retrieval": "Cut articles into pairs of halves (new_aan_pairs.train.tsv, .eval.tsv, .test.tsv).",
}
ABOUT = """ The layout is that of the release. The same seed gives the same files. An interrupted set is removed, and
the same command makes it again."""
USES = {"train": "train on", "valid": "choose the step by", "test": "measure on"}


def main(args: Sequence[str]) -> int:
    name, words = split_command("primal data", TASKS, args, "listops --out data/lra/listops")
    task = {"listops": listops, "pathfinder": pathfinder, "retrieval": retrieval}[name]
    example = "--articles data/wikipedia" if task is retrieval else "--train 9600 --valid 200 --test 200"
    parser = Parser(f"data {name}", example, TASKS[name] + ABOUT)
    parser.flag("--out", "folder (default %(default)s)", type=Path, default=Path("data/lra", name))
    for split, use in USES.items():
        parser.flag(f"--{split}", f"samples to {use} (default %(default)s)", type=positive, default=task.SIZES[split])
    parser.flag("--seed", "seed of all random numbers (default 0)", type=read_integer, default=0)
    if task is retrieval:
        parser.flag("--articles", "folder of *.txt files with the articles", type=Path, required=True)
    settings = vars(parser.parse_args(words))
    out, sizes = settings.pop("out"), {split: settings.pop(split) for split in USES}
    with Progress(sum(sizes.values()), name) as progress:
        task.write(out, sizes, **settings, progress=lambda done: progress.advance(count=done))
    print(f"{sum(sizes.values()):,} samples in {out}")
    if task is listops:
        share = listops.by_operator(listops.load(out))
        print(f"the outermost operator alone predicts {share:.1%} of the labels")
    return 0
