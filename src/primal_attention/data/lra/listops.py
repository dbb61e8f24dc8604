"""ListOps (Nangia & Bowman, 2018) as Long-Range Arena defines it: nested lists of digits under MAX, MIN, MED, SUM_MOD.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

    write("data/listops", seed=0)             # basic_train.tsv, basic_val.tsv, basic_test.tsv, as they are released
    data = load("data/listops")

A node is an operator with probability ¼, with 2 to `max_args` arguments, else a digit; the lowest level has digits
only. MED is the median rounded down, SM the sum mod 10. Trees are drawn level by level, thousands at once; expressions
of another length than asked for are discarded. The full set takes about two minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from primal_attention.data.lra.tokens import Progress, TokenData, no_progress, select_rows, split_sizes, stack
from primal_attention.data.storage import Arrays, cached, generated_set, reading, require_complete
from primal_attention.utils.errors import DataError
from primal_attention.utils.files import write_atomically

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


def generate(samples: int, seed: int, shape: Shape | None = None, progress: Progress = no_progress) -> Arrays:
    """Random expressions and their values: tokens (samples, max_length) uint8, labels (samples,) uint8."""
    shape = shape or Shape()
    tokens = np.zeros((samples, shape.max_length), dtype=np.uint8)
    labels = np.zeros(samples, dtype=np.uint8)
    expressions = _draw_expressions(np.random.default_rng([seed, 0]), shape)
    for i, (codes, value) in enumerate(islice(expressions, samples)):
        tokens[i, : len(codes)] = codes
        labels[i] = value
        progress(1)
    return {"tokens": tokens, "labels": labels}


def _draw_expressions(rng: np.random.Generator, shape: Shape) -> Iterator[tuple[np.ndarray, int]]:
    """Codes and values of accepted expressions, without end."""
    while True:
        levels, lengths = _draw_trees(rng, shape)
        fits = (lengths > shape.min_length) & (lengths < shape.max_length)
        # Nodes are in the order of their trees and parents, so a depth-first walk reads every level from left to right.
        nodes = [zip(*(column[fits[trees]].tolist() for column in columns), strict=True) for trees, *columns in levels]
        for _ in range(fits.sum()):
            codes: list[int] = []
            value = _read_tree(nodes, 0, codes)
            yield np.array(codes, dtype=np.uint8), value


def _draw_trees(rng: np.random.Generator, shape: Shape) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray]:
    """Levels of many random trees, each (tree, operator, arguments, digit) by node, and the trees' lengths in tokens.

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


def _read_tree(nodes: Sequence[Iterator[tuple[int, int, int]]], depth: int, codes: list[int]) -> int:
    """Append the codes of the next subtree at `depth` and return its value."""
    operator, arguments, digit = next(nodes[depth])
    if arguments == 0:
        codes.append(DIGIT + digit)
        return digit
    codes.append(operator)
    values = sorted(_read_tree(nodes, depth + 1, codes) for _ in range(arguments))
    codes.append(END)
    if operator == CODES["[SM"]:
        return sum(values) % 10
    if operator == CODES["[MED"]:
        return (values[(arguments - 1) // 2] + values[arguments // 2]) // 2
    return values[0] if operator == CODES["[MIN"] else values[-1]


def write(
    folder: str | Path,
    *,
    train: int = SIZES["train"],
    valid: int = SIZES["valid"],
    test: int = SIZES["test"],
    seed: int = 0,
    shape: Shape | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the three files of the released layout.

    After an interruption, a call with the same arguments completes the set. `progress` is called for every sample
    twice: when it is drawn and when it is written.
    """
    folder = Path(folder)
    sizes = split_sizes(train, valid, test)
    settings = {**sizes, "seed": seed, "shape": None if shape is None else dataclasses.asdict(shape)}
    with generated_set(folder, "listops", settings, FILES["train"]):
        arrays = generate(sum(sizes.values()), seed, shape, progress)
        rows = zip(arrays["tokens"], arrays["labels"].tolist(), strict=True)
        for name, size in sizes.items():
            write_atomically(folder / FILES[name], partial(_write_tsv, islice(rows, size), progress))
    return folder


def _write_tsv(rows: Iterable[tuple[np.ndarray, int]], progress: Progress, out: IO[bytes]) -> None:
    out.write(b"Source\tTarget\n")
    for codes, label in rows:
        out.write(f"{to_text(codes)}\t{label}\n".encode("ascii"))
        progress(1)


def to_text(codes: np.ndarray) -> str:
    """An expression in the released notation, which pairs everything: ( ( ( [MAX 2 ) 9 ) ] )."""
    words: list[str] = []
    open_nodes: list[int] = []  # index of each open operator in `words`
    pairs: list[int] = []  # arguments of each open operator so far
    for code in codes.tolist():
        if code == 0:
            break
        if OPERATOR <= code < END:
            open_nodes.append(len(words))
            pairs.append(0)
            words.append(WORDS[code])
            continue
        if code == END:
            place, count = open_nodes.pop(), pairs.pop()
            words[place] = "( " * (count + 1) + words[place]
            words.append("] )")
        else:
            words.append(WORDS[code])
        if pairs:
            pairs[-1] += 1
            words[-1] += " )"
    return " ".join(words)


def load(folder: str | Path) -> TokenData:
    """Read the released files, or those that `write` made."""
    folder = Path(folder)
    require_complete(folder)
    splits = {}
    for name, file_name in FILES.items():
        file = folder / file_name
        if not file.is_file():
            raise DataError(
                f"{file} is missing: the {name} split; 'primal data listops --out {folder}' makes all three"
            )
        arrays = cached(folder, name, [file], LENGTH, partial(read_tsv, file))
        splits[name] = select_rows(arrays)
    return TokenData("listops", **splits, vocabulary=len(WORDS), classes=10, padded=True)


def by_operator(data: TokenData) -> float:
    """Test accuracy of the most frequent label of each outermost operator, a lower bound for models."""
    outermost, labels = data.train.tokens[:, 0], data.train.labels
    answers = {code: np.bincount(labels[outermost == code]).argmax() for code in np.unique(outermost)}
    right = [answers.get(row[0]) == label for row, label in zip(data.test.tokens, data.test.labels, strict=True)]
    return float(np.mean(right))


def read_tsv(file: Path) -> Arrays:
    """Codes and labels of a file with the columns Source and Target."""
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
    return {"tokens": stack(rows, LENGTH), "labels": np.array(labels, dtype=np.uint8)}


def encode(expression: str, where: str = "expression") -> np.ndarray:
    """Codes of an expression in either notation; the pairing parentheses are dropped."""
    words = expression.replace("(", " ").replace(")", " ").split()
    try:
        codes = np.array([CODES[word] for word in words], dtype=np.uint8)
    except KeyError as unknown:
        raise DataError(f"{where}: {unknown.args[0][:40]!r} is no digit, operator or bracket of ListOps") from None
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
