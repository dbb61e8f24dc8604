"""Checkpoints of a run: two are kept, each with a checksum, and reading one executes no code.

    checkpoints/last.ckpt        the newest; what `torch.save` writes, then a line with its sha256
    checkpoints/previous.ckpt    the one before, used where last.ckpt is damaged

Runs with several processes write folders instead (`scale.sharded`); the functions here accept both.
"""

from __future__ import annotations

import hashlib
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from primal_attention.train.readers import TRAILER, read_checkpoint
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import sync_folder, write_atomically

LAST, PREVIOUS, DAMAGED = "last.ckpt", "previous.ckpt", ".damaged"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's interface to `save_checkpoint` and `read_checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_checkpoint(Path(path), checkpoint, keep=Path(path).with_name(PREVIOUS))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path), map_location)


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_checkpoint(path: Path, content: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Write a checkpoint with its checksum; the file that it replaces is kept under the name `keep`."""

    def write(file: IO[bytes]) -> None:
        hashed = _Hashed(file)
        torch.save(content, typing.cast(IO[bytes], hashed))
        file.write(TRAILER + hashed.hash.hexdigest().encode() + b"\n")

    write_atomically(path, write, keep=keep)
    sync_folder(path.parent)


def candidates(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    last, previous = folder / LAST, folder / PREVIOUS
    if previous.is_file():
        return [last, previous]
    return [last] if last.is_file() else sorted(folder.glob("*.sharded"), reverse=True)


def load_newest(
    folder: Path, check: Callable[[dict[str, Any], Path], None], *, main: bool = True
) -> tuple[Path, dict[str, Any]] | None:
    """The newest intact checkpoint and its content; None where there is no checkpoint at all.

    Damaged ones are reported and renamed, so that the next save does not replace an intact one by them.

    Args:
        folder: The checkpoints of one training.
        check: Called with the content and the path; raises `RunError` for a checkpoint that does not fit.
        main: Whether this process reports and renames.
    """
    damaged: list[tuple[Path, RunError]] = []
    for place in candidates(folder):
        try:
            content = read_any(place)
            check(content, place)
        except RunError as error:
            damaged.append((place, error))
            continue
        if main:
            _set_aside(damaged, place)
        return place, content
    if damaged:
        reasons = "; ".join(str(error) for _, error in damaged)
        raise RunError(f"no intact checkpoint to continue from: {reasons}; train again in another folder")
    return None


def _set_aside(damaged: Iterable[tuple[Path, RunError]], intact: Path) -> None:
    for place, error in damaged:
        if place.exists():
            place.replace(unused_name(place.with_name(place.name + DAMAGED)))
        warnings.warn(f"{error}: continuing from {intact.name}", stacklevel=3)


def unused_name(path: Path) -> Path:
    """The path itself, or the first one with a number that does not exist."""
    number, place = 1, path
    while place.exists():
        number += 1
        place = path.with_name(f"{path.name}{number}")
    return place


def check_fits(content: Mapping[str, Any], module: torch.nn.Module, path: Path) -> None:
    """Raise if the tensors of a checkpoint are not those of the module."""
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stored = {name: tuple(getattr(tensor, "shape", ("no tensor",))) for name, tensor in content["state_dict"].items()}
    for name in {**own, **stored}:
        if own.get(name) != stored.get(name):
            shapes = f"{stored.get(name, 'missing')} instead of {own.get(name, 'none')}"
            raise RunError(f"{path} does not fit the model of its config.yaml ({name}: {shapes})")


def read_any(path: Path) -> dict[str, Any]:
    """A checkpoint of either kind, read by one process."""
    if not path.is_dir():
        return read_checkpoint(path)
    from primal_attention.train.sharded import read_whole

    return read_whole(path)
