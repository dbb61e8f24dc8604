"""Data files on disk: guarded reading, writing that leaves no partial files, caches, and sets that can be resumed.

with reading(file, "an HDF5 file"): …                 # any failure of the parser becomes one DataError line
write_file(path, lambda out: out.write(data))          # temporary name, fsync, rename
arrays = cached(folder, "train", [file], settings, make)
with generated_set(folder, "listops", settings, product) as state: …  # incomplete.json exists until the end
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
from numpy.lib.format import open_memmap

from primal_attention.utils.errors import DataError, WriteError

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


def read_npz(file: Path, expected: str, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of a `.npz`, all or those that are wanted; object arrays are refused, so nothing is unpickled."""
    with reading(file, expected):
        if not zipfile.is_zipfile(file):
            raise OSError("it is cut off, or no .npz")
        with np.load(file, allow_pickle=False) as content:
            return {key: content[key] for key in content.files if wanted is None or key in wanted}


def map_array(file: Path) -> np.ndarray:
    """Memory-map a `.npy`. Changes stay in memory, so torch accepts the array without a warning."""
    return open_memmap(file, mode="c")  # never unpickles, unlike np.load


# Writing


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it to `path`."""
    with replacing(path) as temporary, temporary.open("wb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or folder; rename it to `path` at the end, remove it if anything fails."""
    # The process id keeps two writers apart.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_dir() and path.exists():
            shutil.rmtree(path)  # a rename replaces files only
        temporary.replace(path)
    except OSError as error:
        raise WriteError(f"cannot write {path} ({one_line(error)}); no partial file is left there") from error
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# Caches


def cached(
    home: Path, name: str, sources: Sequence[Path | str], settings: object, make: Callable[[], Arrays]
) -> Arrays:
    """Memory-mapped arrays from `<home>/.cache`, made again if a source's content or the settings changed.

    Damaged caches are made again too. The arrays stay in memory where the folder is not writable.
    """
    key = {"sources": fingerprint(home, sources), "settings": settings}
    arrays = load_cache(home, name, key)
    if arrays is not None:
        return arrays
    arrays = make()
    try:
        save_cache(home, name, key, arrays)
    except WriteError:
        return arrays
    return load_cache(home, name, key) or arrays


def fingerprint(home: Path, files: Iterable[Path | str]) -> str:
    """Hash of the names (relative to `home`) and contents of some files, in their order."""
    digest, start = hashlib.sha256(), f"{home}{os.sep}"
    for file in files:
        name = str(file).removeprefix(start)
        digest.update(f"{name}\0{_hash_file(file)}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _hash_file(file: Path | str) -> str:
    """SHA-256 of a file, or an empty string if it cannot be read: reading the data names the reason."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb", buffering=0) as content:
            while block := content.read(2**20):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def save_cache(home: Path, name: str, key: object, arrays: Arrays) -> None:
    """Write the arrays, then the file that lists them with their hashes."""
    folder = home / ".cache"
    parts = {}
    for part, array in sorted(arrays.items()):
        file = folder / f"{name}-{part}.npy"

        def write(out: IO[bytes], array: np.ndarray = array) -> None:
            # numpy reports a full disk only through a plain write method.
            np.save(SimpleNamespace(write=out.write), array, allow_pickle=False)  # type: ignore[call-overload]

        write_file(file, write)
        parts[part] = _hash_file(file)
    mark = json.dumps({"key": _hash_json(key), "parts": parts})
    write_file(folder / f"{name}.json", lambda out: out.write(mark.encode()))


def load_cache(home: Path, name: str, key: object) -> Arrays | None:
    """The arrays of a cache, or None if it is missing, damaged, or belongs to another key."""
    folder = home / ".cache"
    try:
        mark = json.loads((folder / f"{name}.json").read_bytes())
        if mark["key"] != _hash_json(key):
            return None
        files = {part: folder / f"{name}-{part}.npy" for part in mark["parts"]}
        if any(_hash_file(file) != mark["parts"][part] for part, file in files.items()):
            return None
        return {part: map_array(file) for part, file in files.items()}
    except Exception:  # whatever is wrong with a cache, it is made again
        return None


def _hash_json(key: object) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


# Generated sets


class GenerationState:
    """State of an unfinished set. `position` is what `save` stored last, None at the start."""

    def __init__(self, mark: Path, content: dict[str, Any]) -> None:
        self._mark, self._content = mark, content

    @property
    def position(self) -> Any:
        return self._content.get("position")

    def save(self, position: Any = None) -> None:
        """Store where to continue after an interruption."""
        self._content["position"] = position
        text = json.dumps(self._content, indent=2) + "\n"
        write_file(self._mark, lambda out: out.write(text.encode()))


@contextlib.contextmanager
def generated_set(folder: Path, name: str, settings: Mapping[str, Any], product: str) -> Iterator[GenerationState]:
    """Mark `folder` as incomplete until the block has finished; continue an interrupted set of the same settings.

    Args:
        folder: Where the set is written.
        name: Of the set, as `primal data NAME` spells it.
        settings: Everything that the content depends on; the marker stores it.
        product: A file or folder that every finished set has. A complete set is not overwritten.
    """
    mark = folder / INCOMPLETE
    _make_folder(folder)
    with _locked(folder):
        content: dict[str, Any] = {"set": name, "settings": dict(settings)}
        if mark.exists():
            before = _read_mark(mark)
            for key in content:
                if before.get(key) != content[key]:
                    raise DataError(
                        f"{folder} holds an interrupted set with other settings ({before.get(key)}): "
                        f"repeat its command ({_command(folder, before)}), or remove the folder"
                    )
            content = before
            for leftover in [*folder.rglob(".*.partial")]:
                remove(leftover)
        elif (folder / product).exists():
            raise DataError(f"{folder} already holds a set ({product}): choose another --out, or remove it first")
        state = GenerationState(mark, content)
        if not mark.exists():
            state.save()
        yield state
        if hasattr(os, "sync"):
            os.sync()  # all files must be on disk before the marker goes
        mark.unlink()


def require_complete(folder: Path) -> None:
    """Refuse a set whose generation was interrupted."""
    mark = folder / INCOMPLETE
    if mark.exists():
        raise DataError(f"{folder} is incomplete, its generation was interrupted: {_command(folder, _read_mark(mark))}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(place for place in (folder, *folder.parents) if place.exists())
        raise WriteError(f"{file} is a file where a folder is needed") from None
    except OSError as error:
        raise WriteError(f"cannot create {folder} ({one_line(error)})") from error


def _read_mark(mark: Path) -> dict[str, Any]:
    with reading(mark, "the marker of an interrupted set: remove the folder and make the set again"):
        content = json.loads(mark.read_bytes().decode(errors="replace"))
        if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
            raise ValueError("it must hold an object with settings")
        return content


def _command(folder: Path, content: Mapping[str, Any]) -> str:
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in content["settings"].items() if value is not None]
    return f"'primal data {content.get('set')} --out {folder} {' '.join(flags)}' completes it"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which the system releases when the process ends; one line if it is taken."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(f"{folder}: another process is writing a set there") from None
    except OSError:
        pass  # file systems without locks
    try:
        yield
    finally:
        os.close(descriptor)
