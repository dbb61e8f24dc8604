"""ListOps (Nangia & Bowman, 2018) as Long-Range Arena defines it: nested lists of digits under MAX, MIN, MED, SUM_MOD.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

    write("data/listops", seed=0)             # basic_train.tsv, basic_val.tsv, basic_test.tsv, as they are released
    data = load("data/listops")

A node is an operator with probability ¼, with 2 to `max_args` arguments, else a digit; the lowest level has digits
only. MED is the median rounded down, SM the sum mod 10. Trees are drawn level by level, thousands at once; expressions
of another length than asked for are discarded. The full set takes about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import Progress, TokenData, load_tables, stack
from primal_attention.data.storage import Arrays, generated_set, reading
from primal_attention.utils.errors import DataError

WORDS = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
CODES = {word: code for code, word in enumerate(WORDS)}
DIGIT, OPERATOR, END = CODES["0"], CODES["[MIN"], CODES["]"]
OPERATOR_SHARE = 0.25
DRAWN_AT_ONCE = 8192
FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
SIZES = {"train": 96_000, "valid": 2_000, "test": 2_000}
LENGTH = 2000


@dataclass(frozen=True)
class Shape:
    """Bounds of an expression. Lengths count digits, operators and closing brackets, and lie strictly between."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000


def generate(seed: int, shape: Shape | None = None) -> Iterator[tuple[str, int]]:
    """Yield random expressions in the released notation and their values, without end."""
    shape = shape or Shape()
    rng = np.random.default_rng([seed, 0])
    while True:
        levels, lengths = _draw_trees(rng, shape)
        fits = (lengths > shape.min_length) & (lengths < shape.max_length)
        # Nodes are in the order of their trees and parents, so a depth-first walk reads every level from left to right.
        nodes = [zip(*(column[fits[trees]].tolist() for column in columns), strict=True) for trees, *columns in levels]
        for _ in range(fits.sum()):
            yield _read_tree(nodes, 0)


def _draw_trees(rng: np.random.Generator, shape: Shape) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray]:
    """Draw many random trees; return levels of (tree, operator, arguments, digit) by node, and lengths in tokens.

    A tree beyond the length bound gets no more operators: it will be discarded.
    """
    levels: list[tuple[np.ndarray, ...]] = []
    trees = np.arange(DRAWN_AT_ONCE)
    nodes_of, lengths = np.zeros((2, DRAWN_AT_ONCE), dtype=np.int64)
    for depth in range(1, shape.max_depth + 1):
        inner = (rng.random(len(trees)) < OPERATOR_SHARE) & (depth < shape.max_depth)
        nodes_of += np.bincount(trees, minlength=DRAWN_AT_ONCE)
        inner &= nodes_of[trees] <= shape.max_length
        operators = rng.integers(OPERATOR, END, len(trees), dtype=np.int16)
        arguments = np.where(inner, rng.integers(2, shape.max_args, len(trees), endpoint=True), 0)
        levels.append((trees, operators, arguments, rng.integers(0, 10, len(trees), dtype=np.int16)))
        lengths += np.bincount(trees, 1 + inner, minlength=DRAWN_AT_ONCE).astype(np.int64)  # operators have a bracket
        trees = np.repeat(trees, arguments)
        if len(trees) == 0:
            break
    return levels, lengths


def _read_tree(nodes: Sequence[Iterator[tuple[int, int, int]]], depth: int) -> tuple[str, int]:
    """Return text and value of the next subtree at `depth`. The released notation pairs: ( ( ( [MAX 2 ) 9 ) ] )."""
    operator, arguments, digit = next(nodes[depth])
    if arguments == 0:
        return str(digit), digit
    texts, unsorted = zip(*(_read_tree(nodes, depth + 1) for _ in range(arguments)), strict=True)
    text = "( " * (arguments + 1) + " ) ".join([WORDS[operator] + " " + texts[0], *texts[1:], "] )"])
    values = sorted(unsorted)
    if operator == CODES["[SM"]:
        return text, sum(values) % 10
    if operator == CODES["[MED"]:
        return text, (values[(arguments - 1) // 2] + values[arguments // 2]) // 2
    return text, values[0] if operator == CODES["[MIN"] else values[-1]


def write(
    folder: str | Path,
    sizes: Mapping[str, int] = SIZES,
    *,
    seed: int = 0,
    shape: Shape | None = None,
    progress: Progress = lambda samples: None,
) -> Path:
    """Write the three files of the released layout; an interruption leaves none of them."""
    expressions = generate(seed, shape)
    with generated_set(Path(folder)) as place:
        for name, size in sizes.items():
            with (place / FILES[name]).open("wb") as out:
                out.write(b"Source\tTarget\n")
                for text, value in islice(expressions, size):
                    out.write(f"{text}\t{value}\n".encode("ascii"))
                    progress(1)
    return Path(folder)


def load(folder: str | Path) -> TokenData:
    """Read the released files, or those that `write` made."""
    source = f"'primal data listops --out {folder}' makes all three"
    splits = load_tables(Path(folder), FILES, source, read_tsv, LENGTH)
    return TokenData("listops", **splits, vocabulary=len(WORDS), classes=10, padded=True)


def by_operator(data: TokenData) -> float:
    """Return the test accuracy of the most frequent label of each outermost operator, a lower bound for models."""
    outermost, labels = data.train.tokens[:, 0], data.train.labels
    answers = {code: np.bincount(labels[outermost == code]).argmax() for code in np.unique(outermost)}
    right = [answers.get(row[0]) == label for row, label in zip(data.test.tokens, data.test.labels, strict=True)]
    return float(np.mean(right))


def read_tsv(file: Path, length: int = LENGTH) -> Arrays:
    """Read codes and labels of a file with the columns Source and Target."""
    rows, labels = [], []
    with reading(file, "a table of expressions"), file.open(encoding="utf-8") as lines:
        header = next(lines, "").rstrip("\n")
        if header != "Source\tTarget":
            raise DataError(f"{file}: the first line must name the columns Source and Target (got {header[:40]!r})")
        for number, line in enumerate(lines, start=2):
            source, tab, target = line.rstrip("\n").partition("\t")
            if not tab or len(target) != 1 or not target.isdecimal():
                raise DataError(f"{file}, line {number}: expected an expression, a tab and a digit")
            rows.append(encode(source, f"{file}, line {number}"))
            labels.append(int(target))
    if not rows:
        raise DataError(f"{file}: no samples below the header")
    return {"tokens": stack(rows, length), "labels": np.array(labels, dtype=np.uint8)}


def encode(expression: str, where: str = "expression") -> np.ndarray:
    """Return the codes of an expression in either notation; the pairing parentheses are dropped."""
    symbols = expression.replace("(", " ").replace(")", " ").split()
    try:
        codes = np.array([CODES[word] for word in symbols], dtype=np.uint8)
    except KeyError as unknown:
        raise DataError(f"{where}: {unknown.args[0][:40]!r} is not a digit, operator or bracket of ListOps") from None
    if len(codes) == 0 or (codes == 0).any():
        raise DataError(f"{where}: an empty expression")
    if len(codes) > LENGTH:
        raise DataError(f"{where}: {len(codes)} tokens where at most {LENGTH} fit")
    opens = (codes >= OPERATOR) & (codes < END)
    depth = np.cumsum(opens.astype(np.int32) - (codes == END))
    if depth[-1] != 0 or (depth[:-1] < 1).any():
        what = "a bracket is not closed" if depth[-1] > 0 else "a bracket is closed too early"
        raise DataError(f"{where}: malformed expression, {what}")
    if (opens[:-1] & (codes[1:] == END)).any():
        raise DataError(f"{where}: malformed expression, an operator has no arguments")
    return codes
