"""A run folder: its name, its lock, and config.yaml, which is written at the start and compared on resuming."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import primal_attention
from primal_attention.train.config import Recipe, from_plain, to_plain
from primal_attention.train.readers import FORMAT, check_format, read_config, read_json, shorten
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_json, write_text
from primal_attention.utils.provenance import collect

__all__ = ["FORMAT", "check_format"]  # for the readers of other files with a format
LOCK = ".lock"
# What may differ between the two halves of an interrupted run: it changes no number, or, where a cluster gives another
# number of devices, only rounding and what dropout draws.
FREE = {
    "data.folder",
    "evaluation.video",
    "trainer.checkpoint_every",
    "trainer.checkpoint_steps",
    "trainer.context",
    "trainer.devices",
    "trainer.progress",
    "trainer.tensorboard",
}


def default(name: str, recipe: Recipe, root: Path = Path("runs")) -> Path:
    """runs/<recipe>/<variant>-seed<n>."""
    return root / name / f"{recipe.label()}-seed{recipe.seed}"


def fresh(folder: Path) -> Path:
    """The folder itself if no run is or starts in it, else the first free name with a number."""
    number, place = 1, folder
    while (place / "config.yaml").exists() or (place / LOCK).exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def newest(folder: Path) -> Path:
    """The last of the numbered folders that `fresh` has given out."""
    number, place = 1, folder
    while (following := folder.with_name(f"{folder.name}-{number + 1}")).joinpath("config.yaml").exists():
        number, place = number + 1, following
    return place


def write(folder: Path, recipe: Recipe, *, name: str, command: str, commit: str | None = None) -> None:
    """Put config.yaml into a new run folder; the one of a resumed run stays as it is."""
    file = folder / "config.yaml"
    if not file.exists():
        text = {
            "format": FORMAT,
            "version": primal_attention.__version__,
            "benchmark": recipe.benchmark,
            "recipe": name,
            **collect(command=command, commit=commit, data_files=recipe.data_files()),
            "config": to_plain(recipe),
        }
        write_text(file, yaml.safe_dump(text, sort_keys=False, allow_unicode=True))


def origin(folder: Path) -> dict[str, Any]:
    """Return provenance and settings of a run for its summary, which can then be read without the folder."""
    text, recipe = read(folder)
    config = to_plain(recipe)
    config.get("data", {}).pop("folder", None)  # says something about a machine, nothing about a result
    names = ("date", "command", "commit", "dirty", "commit_source", "versions", "data_sha256")
    return {**{name: text.get(name) for name in names if name in text}, "config": config}


def check(folder: Path, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or the same run without being asked to continue it."""
    if not (folder / "config.yaml").exists():
        return
    if not resume:
        raise RunError(f"{folder} already holds a run: add --resume to continue it, or choose another --out")
    _, before = read(folder)
    for field, old, new in differences(to_plain(before), to_plain(recipe)):
        if field not in FREE:
            flag = field.replace("_", "-")
            raise RunError(f"{folder} was started with --{flag} {old}, not {new}: resume with the same settings")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted names and values of the fields that differ."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield prefix + key, a, b


def read(folder: Path) -> tuple[dict[str, Any], Recipe]:
    """What config.yaml says, and the recipe in it."""
    from primal_attention.train.registry import recipe_type

    file = folder / "config.yaml"
    text = read_config(file)
    kind = recipe_type(str(text.get("benchmark")))
    if kind is None:
        found, version = shorten(text.get("benchmark")), primal_attention.__version__
        raise RunError(
            f"{file}: benchmark {found} is unknown to this version ({version}); a recipe of your own needs --recipes FILE.py"
        )
    return text, from_plain(kind, text["config"], f"{file}: ")


@contextlib.contextmanager
def lock(folder: Path, *, restarted: bool = False) -> Iterator[None]:
    """Hold the folder's lock file, so that no second process writes there.

    A lock whose process has ended on this machine is taken over. A folder that is still empty at the end is removed.

    Args:
        folder: The run folder; it is created if needed.
        restarted: A launcher started this process again, so the lock of another machine belongs to a dead process.
    """
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file, own = folder / LOCK, {"pid": os.getpid(), "host": socket.gethostname(), "start": _start_time(os.getpid())}
    try:
        with _one_at_a_time(folder):
            if file.exists():
                _check_stale(file, folder, restarted)
            write_json(file, own)
            _remove_partial_files(folder)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # not empty
            for place in created:
                place.rmdir()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep two processes from taking over the same lock; the kernel releases this one when a process ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without flock
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_stale(file: Path, folder: Path, restarted: bool) -> None:
    """Raise unless the process of a lock has ended."""
    owner = read_json(file)
    pid, host = (owner.get("pid"), owner.get("host")) if isinstance(owner, dict) else (None, None)
    if not isinstance(pid, int) or not isinstance(host, str):
        raise RunError(f"{file} is not a lock of this library: delete it if no process uses {folder}")
    if host != socket.gethostname():
        if restarted:
            return
        raise RunError(f"{folder} is in use by process {pid} on {host}: if it has ended, delete {file}")
    start = _start_time(pid)
    if start is not None and (owner.get("start") in (None, start)):
        raise RunError(f"{folder} is in use by process {pid}: wait until it ends, or choose another folder")


def _start_time(pid: int) -> int | None:
    """When a process of this machine started, in the kernel's ticks (0 where that is unknown); None if it has ended."""
    if pid <= 0:
        return None
    try:
        # Behind the command's name in parentheses: the state, then 18 more fields, then the start.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        if Path("/proc/self/stat").exists():
            return None
    if os.name != "posix":  # os.kill would end the process
        return 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # another user's
        return 0
    return 0


def _remove_partial_files(folder: Path) -> None:
    """Remove what killed processes were writing; only the holder of the lock writes here."""
    for part in ("", "checkpoints", "validation", "validation/checkpoints"):
        for left in (folder / part).glob(".*.[0-9]*.partial"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
