"""Labelled sequences of small integers, the form that every Long-Range Arena task takes here, and their cache on disk.

A split's tokens are one array (cases, length) with 0 at padding; arrays are memory-mapped, so a set larger than memory
can be trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from primal_attention.data.errors import DataError

Arrays = Mapping[str, np.ndarray]
Progress = Callable[[int], object]
"""Told how many more cases are done."""


@dataclass(frozen=True)
class TokenSplit:
    """Cases of one split. `second` is the other sequence of each case where the task is about pairs."""

    tokens: np.ndarray  # (cases, length) uint8 or uint16
    labels: np.ndarray  # (cases,) int64
    second: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TokenData:
    """A classification problem over token sequences. padded: 0 stands for padding; else it is a token like others."""

    name: str
    train: TokenSplit
    valid: TokenSplit
    test: TokenSplit
    vocabulary: int
    classes: int
    padded: bool

    @property
    def length(self) -> int:
        return self.train.tokens.shape[1]

    @property
    def splits(self) -> dict[str, TokenSplit]:
        return {"train": self.train, "valid": self.valid, "test": self.test}


def stack(sequences: Sequence[np.ndarray], length: int, dtype: type = np.uint8) -> np.ndarray:
    """(cases, length) with zeros on the right; longer sequences are cut."""
    out: np.ndarray = np.zeros((len(sequences), length), dtype=dtype)
    for row, sequence in zip(out, sequences, strict=True):
        kept = sequence[:length]
        row[: len(kept)] = kept
    return out


def cached(home: Path, name: str, sources: Sequence[Path], settings: object, make: Callable[[], Arrays]) -> Arrays:
    """Arrays from `<home>/.cache/<name>-*.npy`, memory-mapped; made first if the sources or the settings are others.

    Where the folder cannot be written to, the arrays stay in memory.
    """
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sources]
    key = {"sources": stamp, "settings": settings}
    found = load_cache(home, name, key)
    if found is not None:
        return found
    arrays = make()
    try:
        save_cache(home, name, key, arrays)
    except OSError:
        return arrays
    return load_cache(home, name, key) or arrays


def stamp(folders: Iterable[Path]) -> list[int] | None:
    """Number, bytes and times of the files in some folders, which a file that is new, gone or changed changes.

    For settings of `cached` where the sources are too many to be listed; None where there are no files.
    """
    count = size = time = 0
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                found = entry.stat()
                count, size, time = count + 1, size + found.st_size, time + found.st_mtime_ns
    return [count, size, time] if count else None


def save_cache(home: Path, name: str, key: object, arrays: Arrays) -> None:
    """Write the arrays, then the file that declares them whole."""
    folder = home / ".cache"
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"{name}.json"
    mark.unlink(missing_ok=True)
    for part, array in arrays.items():
        # Another process may be making the same arrays: each writes its own file and the rename decides.
        temporary = folder / f".{name}-{part}.{os.getpid()}.npy"
        np.save(temporary, array)
        temporary.replace(folder / f"{name}-{part}.npy")
    temporary = folder / f".{name}.{os.getpid()}.json"
    temporary.write_text(json.dumps({"key": _digest(key), "parts": sorted(arrays)}))
    temporary.replace(mark)


def load_cache(home: Path, name: str, key: object) -> Arrays | None:
    folder = home / ".cache"
    try:
        mark = json.loads((folder / f"{name}.json").read_text())
        if mark["key"] != _digest(key):
            return None
        # Copy on write: torch takes such arrays without complaint, and the file never changes.
        return {part: np.load(folder / f"{name}-{part}.npy", mmap_mode="c") for part in mark["parts"]}
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _digest(key: object) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def utf8_lines(file: Path) -> list[str]:
    """The lines of a text file; a missing file or one that is not UTF-8 is one clear line."""
    return utf8(file).splitlines()


def utf8(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} is missing") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})") from None
