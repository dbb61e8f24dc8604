"""ListOps (Nangia & Bowman, 2018) as Long-Range Arena sets it: nested lists of digits under MAX, MIN, MED and SUM_MOD.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

    write("data/listops", seed=0)             # basic_train.tsv, basic_val.tsv, basic_test.tsv, as they are released
    data = load("data/listops")

How expressions are drawn: `listops_trees`. The whole set takes numpy a minute or so.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from primal_attention.data.errors import DataError
from primal_attention.data.listops_trees import CODES, END, OPERATOR, WORDS, Shape, generate
from primal_attention.data.storage import Arrays, cached, generated_set, reading, require_complete, write_file
from primal_attention.data.tokens import Progress, TokenData, TokenSplit, stack

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
