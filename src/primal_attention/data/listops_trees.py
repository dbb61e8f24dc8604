"""Random ListOps expressions: trees drawn level by level for thousands of expressions at once, and their values.

A node is an operator with probability ¼, with 2 to `max_args` arguments, else a digit; the lowest level has digits
only; expressions of another length than asked for are thrown away. MED is the median rounded down, SM the sum mod 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from primal_attention.data.errors import DataError
from primal_attention.data.storage import Arrays
from primal_attention.data.tokens import Progress

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
