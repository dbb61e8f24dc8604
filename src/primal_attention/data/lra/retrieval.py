"""Retrieval pairs from articles, in the layout of Long-Range Arena's AAN files: do two texts belong together?

    write("data/lra/retrieval", articles="data/wikipedia")      # new_aan_pairs.{train,eval,test}.tsv
    data = tokens.load_retrieval("data/lra/retrieval")

Every article is cut into segments of 8,000 bytes. A sample is a pair of halves of 4,000 bytes: the two halves of one
segment (label 1), or the first half of a segment and the second half of a segment of another article (label 0). Label 0
is given to half of the segments of a split, chosen at random, so that one half alone does not predict the label. No
article is in two splits.

The articles are the *.txt files of a folder. A line ` = Title = ` begins an article; a file without such lines is one
article. This is not AAN: accuracies compare within one set of articles.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import PAIRS, TEXT_LENGTH, Progress
from primal_attention.data.storage import generated_set
from primal_attention.utils.errors import DataError
from primal_attention.utils.files import read_text

SIZES = {"train": 5_000, "valid": 1_000, "test": 1_000}
TITLE = re.compile(r"^ = [^=].* = *$", re.MULTILINE)
Segment = tuple[str, str, str]
"""Id of the segment, its first half, its second half."""


def write(
    folder: str | Path,
    sizes: Mapping[str, int] = SIZES,
    *,
    articles: str | Path,
    seed: int = 0,
    progress: Progress = lambda samples: None,
) -> Path:
    """Write the three files of the released layout; an interruption leaves none of them."""
    segments = [cut(text, number) for number, text in enumerate(read_articles(Path(articles)))]
    segments = [parts for parts in segments if parts]
    rng = np.random.default_rng([seed, 0])
    order = iter(rng.permutation(len(segments)).tolist())
    with generated_set(Path(folder)) as place:
        for name, size in reversed(list(sizes.items())):  # small splits first: too few articles are noticed at once
            chosen: list[list[Segment]] = []
            while sum(map(len, chosen)) < size:
                if (article := next(order, None)) is None:
                    requested = ", ".join(f"{split} {count:,}" for split, count in sizes.items())
                    raise DataError(
                        f"{articles}: {len(segments)} articles of at least {2 * TEXT_LENGTH:,} bytes "
                        f"({sum(map(len, segments)):,} pairs) do not fill the splits ({requested}): "
                        "lower --train, --valid and --test"
                    )
                chosen.append(segments[article][: size - sum(map(len, chosen))])
            with (place / PAIRS[name]).open("w", encoding="utf-8", newline="") as out:
                writer = csv.writer(out, delimiter="\t", lineterminator="\n")
                for row in pair(chosen, rng):
                    writer.writerow(row)
                    progress(1)
    return Path(folder)


def read_articles(folder: Path) -> Iterator[str]:
    """Yield the text of every article of a folder, with single spaces between words."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(f"{folder}: no *.txt files; name a folder of articles with --articles")
    for file in files:
        for text in TITLE.split(read_text(file)):
            if text := " ".join(text.split()):
                yield text


def cut(text: str, number: int) -> list[Segment]:
    """Return the complete segments of an article; characters that a cut divides are dropped."""
    data = text.encode("utf-8")
    segments: list[Segment] = []
    for start in range(0, len(data) - 2 * TEXT_LENGTH + 1, 2 * TEXT_LENGTH):
        halves = (data[i : i + TEXT_LENGTH] for i in (start, start + TEXT_LENGTH))
        first, second = (half.decode("utf-8", errors="ignore") for half in halves)
        segments.append((f"{number}.{len(segments)}", first, second))
    return segments


def pair(articles: Sequence[Sequence[Segment]], rng: np.random.Generator) -> list[tuple[int, str, str, str, str]]:
    """Return rows (label, two ids, two texts) in random order, one for each segment, half of them of two articles."""
    segments = [(article, segment) for article, parts in enumerate(articles) for segment in parts]
    swapped = sorted(rng.permutation(len(segments))[: len(segments) // 2].tolist())  # in the order of their articles
    _, counts = np.unique([segments[i][0] for i in swapped], return_counts=True)
    step = int(counts.max(initial=1))  # beyond the segments of the same article
    if len(swapped) < 2 * step:
        few = f"{len(segments)} pairs of {len(articles)} articles are too few to pair different articles"
        raise DataError(f"{few}: raise --train, --valid and --test")
    partner = {i: swapped[(place + step) % len(swapped)] for place, i in enumerate(swapped)}
    rows = []
    for i, (_, (first_id, first, _)) in enumerate(segments):
        _, (second_id, _, second) = segments[partner.get(i, i)]
        rows.append((int(i not in partner), first_id, second_id, first, second))
    return [rows[i] for i in rng.permutation(len(rows))]
