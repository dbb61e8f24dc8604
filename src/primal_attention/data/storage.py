"""Data files on disk: guarded reading, caches, and generated sets.

with reading(file, "an HDF5 file"): …                 # any failure of the parser becomes one DataError line
arrays = cached(folder, "train", [file], settings, make)
with generated_set(folder, "listops", settings, product): …  # incomplete.json exists until the end
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
from numpy.lib.format import open_memmap

from primal_attention.utils.errors import DataError, WriteError
from primal_attention.utils.files import write_atomically

Arrays = Mapping[str, np.ndarray]
INCOMPLETE = "incomplete.json"
"""Name of the file that marks a generated set as unfinished."""


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


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of an error in one line, or its type where it has none."""
    text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
    return text if len(text) <= limit else text[:limit] + "…"


def read_text(file: Path) -> str:
    """The content of a UTF-8 file."""
    with reading(file, "a readable file"):
        return file.read_bytes().decode("utf-8")


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


def map_array(file: Path) -> np.ndarray:
    """Memory-map a `.npy`. Changes stay in memory, so torch accepts the array without a warning."""
    return open_memmap(file, mode="c")  # never unpickles, unlike np.load


# Caches


def cached(
    home: Path, name: str, sources: Sequence[Path | str], settings: object, make: Callable[[], Arrays]
) -> Arrays:
    """Memory-map the arrays of `<home>/.cache`; make them if they are missing, damaged, or made of other sources.

    Sources are compared by content. The arrays stay in memory where the folder is not writable.
    """
    folder = home / ".cache"
    text = json.dumps({"sources": _hash_sources(home, sources), "settings": settings}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    arrays = _load_cache(folder, name, key)
    if arrays is not None:
        return arrays
    arrays = make()
    try:
        _save_cache(folder, name, key, arrays)
    except (WriteError, OSError):
        return arrays
    return _load_cache(folder, name, key) or arrays


def _hash_sources(home: Path, files: Iterable[Path | str]) -> str:
    """Hash of the names (relative to `home`) and contents of some files, in their order."""
    digest, start = hashlib.sha256(), f"{home}{os.sep}"
    for file in files:
        name = str(file).removeprefix(start)
        digest.update(f"{name}\0{_hash_file(file)}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _hash_file(file: Path | str) -> str:
    """SHA-256 of a file, or an empty string if it cannot be read: reading the data reports the reason."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb", buffering=0) as content:
            while block := content.read(2**20):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def _save_cache(folder: Path, name: str, key: str, arrays: Arrays) -> None:
    """Write the arrays, then the file that lists them with their hashes."""
    hashes = {}
    for part, array in sorted(arrays.items()):
        file = folder / f"{name}-{part}.npy"

        def write(out: IO[bytes], array: np.ndarray = array) -> None:
            # numpy reports a full disk only through a plain write method.
            np.save(SimpleNamespace(write=out.write), array, allow_pickle=False)  # type: ignore[call-overload]

        write_atomically(file, write)
        hashes[part] = _hash_file(file)
    index = json.dumps({"key": key, "parts": hashes})
    write_atomically(folder / f"{name}.json", lambda out: out.write(index.encode()))


def _load_cache(folder: Path, name: str, key: str) -> Arrays | None:
    """The arrays of a cache, or None if it is missing, damaged, or has another key."""
    try:
        index = json.loads((folder / f"{name}.json").read_bytes())
        files = {part: folder / f"{name}-{part}.npy" for part in index["parts"]}
        if index["key"] != key or any(_hash_file(file) != index["parts"][part] for part, file in files.items()):
            return None
        return {part: map_array(file) for part, file in files.items()}
    except Exception:  # a cache is made again whatever is wrong with it
        return None


# Generated sets


@contextlib.contextmanager
def generated_set(folder: Path, name: str, settings: Mapping[str, Any], product: str) -> Iterator[None]:
    """Mark `folder` as incomplete until the block has finished. An interrupted set is made again.

    Args:
        folder: Where the set is written.
        name: Of the set, as `primal data NAME` spells it.
        settings: Everything that the content depends on; the marker stores it.
        product: A file or folder that every finished set has. A complete set is not overwritten.
    """
    marker = folder / INCOMPLETE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder.exists():
            raise WriteError(f"{folder} is a file where a folder is needed") from error
        raise WriteError(f"cannot create the folder {folder} ({one_line(error)})") from error
    if marker.exists():
        before = _read_marker(marker)
        if (before.get("set"), before["settings"]) != (name, dict(settings)):
            raise DataError(
                f"{folder} holds an interrupted set with other settings: "
                f"repeat its command ({_command(folder, before)}), or remove the folder"
            )
        for leftover in [*folder.rglob(".*.partial")]:
            leftover.unlink(missing_ok=True)
    elif (folder / product).exists():
        raise DataError(f"{folder} already holds a set ({product}): choose another --out, or remove it first")
    text = json.dumps({"set": name, "settings": dict(settings)}, indent=2) + "\n"
    write_atomically(marker, lambda out: out.write(text.encode()))
    yield
    if hasattr(os, "sync"):
        os.sync()  # all files must be on disk before the marker goes
    marker.unlink(missing_ok=True)


def require_complete(folder: Path) -> None:
    """Refuse a set whose generation was interrupted."""
    marker = folder / INCOMPLETE
    if marker.exists():
        command = _command(folder, _read_marker(marker))
        raise DataError(f"{folder} is incomplete, its generation was interrupted: {command}")


def _read_marker(marker: Path) -> dict[str, Any]:
    with reading(marker, "the marker of an interrupted set: remove the folder and make the set again"):
        content = json.loads(marker.read_bytes().decode(errors="replace"))
        if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
            raise ValueError("it must hold an object with settings")
        return content


def _command(folder: Path, content: Mapping[str, Any]) -> str:
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in content["settings"].items() if value is not None]
    return f"'primal data {content.get('set')} --out {folder} {' '.join(flags)}' completes it"
