"""Random ListOps expressions: trees drawn level by level for thousands of expressions at once, and their values.

A node is an operator with probability ¼, with 2 to `max_args` arguments, else a digit; the lowest level has digits
only; expressions of another length than asked for are thrown away. MED is the median rounded down, SM the sum mod 10.

ListOps (Nangia & Bowman, 2018) as Long-Range Arena sets it: nested lists of digits under MAX, MIN, MED and SUM_MOD.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

    write("data/listops", seed=0)             # basic_train.tsv, basic_val.tsv, basic_test.tsv, as they are released
    data = load("data/listops")

How expressions are drawn: `listops_trees`. The whole set takes numpy a minute or so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from primal_attention.data.lra.tokens import Progress, TokenData, TokenSplit, stack
from primal_attention.data.storage import Arrays, cached, generated_set, reading, require_complete, write_file
from primal_attention.utils.errors import DataError

WORDS = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
CODES = {word: code for code, word in enumerate(WORDS)}
DIGIT, OPERATOR, END = CODES["0"], CODES["[MIN"], CODES["]"]
OPERATOR_SHARE = 0.25
DRAWN_AT_ONCE = 8192


@dataclass(frozen=True)
class Shape:
    """Bounds of an expression. Lengths count digits, operators and closing brackets, and lie strictly between."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        if self.max_depth < 2:
            raise DataError(f"max_depth must be at least 2: operator and digits (got {self.max_depth})")
        if self.max_args < 2:
            raise DataError(f"max_args must be at least 2 (got {self.max_args})")
        longest = sum(2 * self.max_args**level for level in range(self.max_depth - 1))
        longest += self.max_args ** (self.max_depth - 1)
        if not 0 <= self.min_length < self.max_length - 1 or longest <= self.min_length:
            raise DataError(
                f"no expression has a length between {self.min_length} and {self.max_length} "
                f"(max_depth={self.max_depth}, max_args={self.max_args})"
            )


@dataclass
class _Level:
    """The nodes of one depth of many trees, in order: operator code or 0, number of arguments, digit, owner tree."""

    operators: np.ndarray
    arguments: np.ndarray
    values: np.ndarray
    trees: np.ndarray


def generate(cases: int, seed: int, shape: Shape | None = None, progress: Progress | None = None) -> Arrays:
    """`cases` different expressions and their values: tokens (cases, max_length) uint8, labels (cases,) uint8."""
    shape = shape or Shape()
    tokens = np.zeros((cases, shape.max_length), dtype=np.uint8)
    labels = np.zeros(cases, dtype=np.uint8)
    seen: set[bytes] = set()
    done = 0
    for codes, value in _expressions(np.random.default_rng([seed, 0]), shape):
        if done == cases:
            break
        expression = codes.tobytes()
        if expression in seen:
            continue
        # Only short expressions ever repeat; remembering the long ones would cost their weight in memory.
        if len(codes) < 64:
            seen.add(expression)
        tokens[done, : len(codes)] = codes
        labels[done] = value
        done += 1
        if progress is not None:
            progress(1)
    return {"tokens": tokens, "labels": labels}


def _expressions(rng: np.random.Generator, shape: Shape) -> Iterator[tuple[np.ndarray, int]]:
    """Codes and values of accepted expressions, without end."""
    empty = 0
    while True:
        levels = _draw(rng, shape)
        sizes = _sizes(levels)
        fits = (sizes[0] > shape.min_length) & (sizes[0] < shape.max_length)
        empty = 0 if fits.any() else empty + 1
        if empty == 200:
            raise DataError(
                f"expressions between {shape.min_length} and {shape.max_length} are too rare to draw "
                f"(max_depth={shape.max_depth}, max_args={shape.max_args})"
            )
        levels, sizes = _keep(levels, sizes, fits)
        values = _evaluate(levels)
        flat = _lay_out(levels, sizes)
        yield from zip(np.split(flat, np.cumsum(sizes[0])[:-1]), values.tolist(), strict=True)


def _draw(rng: np.random.Generator, shape: Shape) -> list[_Level]:
    """Levels of many random trees. A tree that has outgrown the bound stops growing: it will be thrown away."""
    levels = []
    trees = np.arange(DRAWN_AT_ONCE)
    grown = np.zeros(DRAWN_AT_ONCE, dtype=np.int64)
    for depth in range(1, shape.max_depth + 1):
        nodes = len(trees)
        inner = (rng.random(nodes) < OPERATOR_SHARE) & (depth < shape.max_depth)
        grown += np.bincount(trees, minlength=DRAWN_AT_ONCE)
        inner &= grown[trees] <= shape.max_length
        operators = np.where(inner, rng.integers(OPERATOR, END, nodes, dtype=np.int16), 0)
        arguments = np.where(inner, rng.integers(2, shape.max_args, nodes, endpoint=True), 0)
        levels.append(_Level(operators, arguments, rng.integers(0, 10, nodes, dtype=np.int16), trees))
        trees = np.repeat(trees, arguments)
        if len(trees) == 0:
            break
    return levels


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
    """Tokens of the subtree of every node, level by level."""
    sizes = [np.ones(0, dtype=np.int64)] * len(levels)
    below = np.zeros(0, dtype=np.int64)
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        inner = level.arguments > 0
        size = np.where(inner, 2, 1)
        if inner.any():
            size[inner] += np.add.reduceat(below, _starts(level.arguments[inner]))
        sizes[depth] = below = size
    return sizes


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _keep(levels: list[_Level], sizes: list[np.ndarray], fits: np.ndarray) -> tuple[list[_Level], list[np.ndarray]]:
    """The trees that fit; owners stay numbered as they were."""
    kept_levels, kept_sizes = [], []
    for level, size in zip(levels, sizes, strict=True):
        kept = fits[level.trees]
        if kept.any():
            kept_levels.append(
                _Level(level.operators[kept], level.arguments[kept], level.values[kept], level.trees[kept])
            )
            kept_sizes.append(size[kept])
    return kept_levels, kept_sizes if kept_sizes else [np.zeros(0, dtype=np.int64)]


def _evaluate(levels: list[_Level]) -> np.ndarray:
    """Values of the roots."""
    below = np.zeros(0, dtype=np.int64)
    for level in reversed(levels):
        values = level.values.astype(np.int64)
        inner = level.arguments > 0
        if inner.any():
            values[inner] = _apply(level.operators[inner], level.arguments[inner], below)
        below = values
    return below


def _apply(operators: np.ndarray, counts: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    starts = _starts(counts)
    # Sorted within each node; 10 fills the rows and sorts behind every digit.
    table = np.full((len(counts), counts.max()), 10)
    node = np.repeat(np.arange(len(counts)), counts)
    table[node, np.arange(len(arguments)) - starts[node]] = arguments
    table.sort(axis=1)
    row = np.arange(len(counts))
    lower, upper = table[row, (counts - 1) // 2], table[row, counts // 2]
    results = {
        "[MIN": table[:, 0],
        "[MAX": table[row, counts - 1],
        "[MED": (lower + upper) // 2,
        "[SM": np.add.reduceat(arguments, starts) % 10,
    }
    return np.select([operators == CODES[name] for name in results], list(results.values()))


def _lay_out(levels: list[_Level], sizes: list[np.ndarray]) -> np.ndarray:
    """All expressions one behind the other, as codes."""
    flat = np.zeros(int(sizes[0].sum()), dtype=np.uint8)
    starts = _starts(sizes[0])
    for depth, level in enumerate(levels):
        inner = level.arguments > 0
        flat[starts] = np.where(inner, level.operators, DIGIT + level.values)
        flat[starts[inner] + sizes[depth][inner] - 1] = END
        if depth + 1 < len(levels):
            below, counts = sizes[depth + 1], level.arguments[inner]
            before = _starts(below)  # tokens of the level before each node
            first = np.repeat(before[_starts(counts)], counts)
            starts = np.repeat(starts[inner] + 1, counts) + before - first
    return flat


FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
SIZES = {"train": 96_000, "valid": 2_000, "test": 2_000}
LENGTH = 2000


def write(
    folder: str | Path,
    *,
    train: int = SIZES["train"],
    valid: int = SIZES["valid"],
    test: int = SIZES["test"],
    seed: int = 0,
    shape: Shape | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the three files of the released layout, and the arrays that `load` would make of them.

    After an interruption, a call with the same arguments completes the set. `progress` is called for every sample
    twice: when it is drawn and when it is written.
    """
    if shape is not None and shape.max_length > LENGTH:
        raise DataError(f"shape.max_length must be at most {LENGTH}, the task's length (got {shape.max_length})")
    folder = Path(folder)
    sizes = {"train": train, "valid": valid, "test": test}
    if min(sizes.values()) < 1:
        raise DataError(f"every split needs at least one case (got {', '.join(f'{k} {v}' for k, v in sizes.items())})")
    settings = {**sizes, "seed": seed, "shape": None if shape is None else dataclasses.asdict(shape)}
    with generated_set(folder, "listops", settings, FILES["train"]):
        whole = generate(sum(sizes.values()), seed, shape, progress)
        start = 0
        for name, size in sizes.items():
            part = {key: array[start : start + size] for key, array in whole.items()}
            start += size
            file = folder / FILES[name]
            write_file(file, partial(_write_tsv, part, progress))
            cached(folder, name, [file], LENGTH, partial(_fit, part))
    return folder


def _write_tsv(part: Arrays, progress: Progress | None, out: IO[bytes]) -> None:
    out.write(b"Source\tTarget\n")
    for row, label in zip(part["tokens"], part["labels"], strict=True):
        out.write(f"{to_text(row)}\t{label}\n".encode("ascii"))
        if progress is not None:
            progress(1)


def _fit(arrays: Arrays) -> Arrays:
    tokens = arrays["tokens"]
    if tokens.shape[1] < LENGTH:
        tokens = np.pad(tokens, ((0, 0), (0, LENGTH - tokens.shape[1])))
    return {"tokens": tokens, "labels": arrays["labels"]}


def to_text(codes: np.ndarray) -> str:
    """An expression in the released notation, which pairs everything: ( ( ( [MAX 2 ) 9 ) ] )."""
    words: list[str] = []
    open_nodes: list[int] = []  # where the words of each open operator stand
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
        splits[name] = TokenSplit(arrays["tokens"], arrays["labels"].astype(np.int64))
    return TokenData("listops", **splits, vocabulary=len(WORDS), classes=10, padded=True)


def by_operator(data: TokenData) -> float:
    """Test accuracy of the most frequent answer to each outermost operator: what a model has to be better than."""
    outermost, labels = data.train.tokens[:, 0], data.train.labels
    answers = {code: np.bincount(labels[outermost == code]).argmax() for code in np.unique(outermost)}
    right = [answers.get(row[0]) == label for row, label in zip(data.test.tokens, data.test.labels, strict=True)]
    return float(np.mean(right))


def read_tsv(file: Path, length: int = LENGTH) -> Arrays:
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
            rows.append(encode(source, f"{file}, line {number}", length))
            labels.append(int(target))
    if not rows:
        raise DataError(f"{file}: no cases behind the header")
    return {"tokens": stack(rows, length), "labels": np.array(labels, dtype=np.uint8)}


def encode(expression: str, where: str = "expression", length: int = LENGTH) -> np.ndarray:
    """Codes of an expression in either notation; the pairing parentheses carry nothing and are dropped."""
    words = expression.replace("(", " ").replace(")", " ").split()
    try:
        codes = np.array([CODES[word] for word in words], dtype=np.uint8)
    except KeyError as unknown:
        raise DataError(f"{where}: {unknown.args[0][:40]!r} is no digit, operator or bracket of ListOps") from None
    if len(codes) == 0 or (codes == 0).any():
        raise DataError(f"{where}: an empty expression")
    if len(codes) > length:
        raise DataError(f"{where}: {len(codes)} tokens where at most {length} fit")
    opens = (codes >= OPERATOR) & (codes < END)
    depth = np.cumsum(opens.astype(np.int32) - (codes == END))
    if depth[-1] != 0 or (depth[:-1] < 1).any():
        what = "a bracket is not closed" if depth[-1] > 0 else "a bracket is closed too early"
        raise DataError(f"{where}: malformed expression, {what}")
    if (opens[:-1] & (codes[1:] == END)).any():
        raise DataError(f"{where}: malformed expression, an operator has no arguments")
    return codes
