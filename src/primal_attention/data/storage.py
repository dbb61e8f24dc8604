"""Data files on disk: guarded reading, caches, and generated sets.

with reading(file, "an HDF5 file"): …                 # any failure of the parser becomes one DataError line
arrays = cached(folder, "train", [file], settings, make)
with generated_set(folder) as partial: …              # the folder exists only when the block has finished
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import numpy as np
from numpy.lib.format import open_memmap

from primal_attention.utils.errors import DataError, WriteError
from primal_attention.utils.files import write_atomically, write_error
from primal_attention.utils.provenance import hash_file

Arrays = Mapping[str, np.ndarray]


def default_folder(name: str, *parts: str) -> Path:
    """Return $PRIMAL_<NAME>, or data/<name> under the working directory."""
    return Path(os.environ.get(f"PRIMAL_{name.upper()}", f"data/{name}"), *parts)


# Reading


@contextlib.contextmanager
def reading(file: Path, expected: str) -> Iterator[None]:
    """Turn every failure inside the block into a DataError: `file` is missing, or is not `expected`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{file} is missing") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})") from None
    except Exception as error:  # parsers raise almost any type for damaged input
        raise DataError(f"{file}: not {expected} ({one_line(error)})") from error


def one_line(value: object, limit: int = 200) -> str:
    """Return a value in one line; of an error its message, or its type if it has none."""
    text = " ".join((getattr(value, "strerror", None) or str(value) or type(value).__name__).split())
    return text if len(text) <= limit else text[:limit] + "…"


def read_npz(file: Path, expected: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Read arrays of a `.npz` by name; object arrays are refused, so nothing is unpickled."""
    with reading(file, expected):
        if not zipfile.is_zipfile(file):
            raise OSError("it is truncated, or not a .npz file")
        with np.load(file, allow_pickle=False) as content:
            missing = [key for key in required if key not in content.files]
            if missing:
                raise OSError(f"it lacks {', '.join(missing)}")
            return {key: content[key] for key in (*required, *optional) if key in content.files}


# Caches


def cached(
    home: Path, name: str, sources: Sequence[Path | str], settings: object, make: Callable[[], Arrays]
) -> Arrays:
    """Memory-map the arrays of `<home>/.cache`; make them if they are missing, damaged, or made of other sources.

    Sources are compared by content. The arrays stay in memory where the folder is not writable.
    """
    folder, start = home / ".cache", f"{home}{os.sep}"
    try:
        hashes = [(str(file).removeprefix(start), hash_file(file)) for file in sources]
    except OSError:
        return make()  # raises with the reason
    key = hashlib.sha256(json.dumps([hashes, settings], sort_keys=True).encode()).hexdigest()
    arrays = _load_cache(folder, name, key)
    if arrays is None:
        arrays = make()
        with contextlib.suppress(WriteError, OSError):
            _save_cache(folder, name, key, arrays)
            arrays = _load_cache(folder, name, key) or arrays
    return arrays


def _save_cache(folder: Path, name: str, key: str, arrays: Arrays) -> None:
    """Write the arrays, then the file that lists them with their hashes."""
    hashes = {}
    for part, array in sorted(arrays.items()):
        file = folder / f"{name}-{part}.npy"

        def write(out: IO[bytes], array: np.ndarray = array) -> None:
            # numpy reports a full disk only through a plain write method.
            np.save(SimpleNamespace(write=out.write), array, allow_pickle=False)  # type: ignore[call-overload]

        write_atomically(file, write)
        hashes[part] = hash_file(file)
    index = json.dumps({"key": key, "parts": hashes})
    write_atomically(folder / f"{name}.json", lambda out: out.write(index.encode()))


def _load_cache(folder: Path, name: str, key: str) -> Arrays | None:
    """Return the arrays of a cache, or None if it is missing, damaged, or has another key."""
    try:
        index = json.loads((folder / f"{name}.json").read_bytes())
        files = {part: folder / f"{name}-{part}.npy" for part in index["parts"]}
        if index["key"] != key or any(hash_file(file) != index["parts"][part] for part, file in files.items()):
            return None
        # Changes of a mode "c" map stay in memory, so torch accepts the array without a warning. It never unpickles.
        return {part: open_memmap(file, mode="c") for part, file in files.items()}
    except Exception:  # a damaged cache is made again
        return None


# Generated sets


@contextlib.contextmanager
def generated_set(folder: Path) -> Iterator[Path]:
    """Yield a folder for the files of a set; it is renamed to `folder` when the block has finished.

    A set is complete or absent: the next call removes the files of an interrupted one.
    """
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if folder.exists():
            folder.rmdir()
    except OSError:
        raise DataError(f"{folder} already holds a set or other files: choose another --out, or remove it") from None
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if hasattr(os, "sync"):
            os.sync()  # all files must be on disk before the folder has its name
        partial.rename(folder)
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
