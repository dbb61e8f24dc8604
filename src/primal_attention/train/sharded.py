"""Sharded checkpoints (torch.distributed.checkpoint): each process writes its part, any number of processes read them.

    checkpoints/000007.sharded/    .metadata, the index; *.distcp, tensors; rest.pt, everything else; checksums.json

A checkpoint is written under a hidden name and renamed when all of it is on disk. The last two are kept. The index is a
pickle: a restricted unpickler reads it, and it may declare nothing but tensors. torch would unpickle other entries.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from primal_attention.train.checkpoint import save_checkpoint
from primal_attention.train.readers import PROGRESS, Schema, digest, read_checkpoint, read_json
from primal_attention.utils.errors import RunError, WriteError
from primal_attention.utils.files import partial_name, sync_folder, write_error, write_json, write_weights

ENDING = ".sharded"
REST, CHECKSUMS = "rest.pt", "checksums.json"
REST_FIELDS: Schema = {**PROGRESS, "rest": dict}
KEEP = 2


def _is_of(kind: object, module: ModuleType) -> bool:
    return isinstance(kind, type) and kind.__module__ == module.__name__


# Whole names, never paths: a pickle may ask for "os.system" of any module that imports os.
KNOWN = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "device", "strided"},
    "torch.serialization": {"_get_layout"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    metadata.__name__: {name for name, kind in vars(metadata).items() if _is_of(kind, metadata)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}


class _Index(pickle.Unpickler):
    """The index of a checkpoint: sizes, types and file offsets."""

    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.memory_format))
        if number or name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's index")


class Reader(dcp.FileSystemReader):
    """torch's reader with the restricted index: tensors in files of the same folder, nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as content:
                index = _Index(content).load()
            check_index(index)
        except Exception as error:  # a damaged pickle raises nearly anything
            raise RunError(f"{file.parent} is damaged or no checkpoint of this library ({error})") from error
        storage = getattr(index, "storage_meta", None) or metadata.StorageMeta()
        storage.load_id = self.load_id
        index.storage_meta = storage
        return index


def check_index(index: Any) -> None:
    """Raise if an index declares anything but tensors, or names files outside of its folder."""
    if not isinstance(index, Metadata):
        raise ValueError(f"its index is a {type(index).__name__}")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"its entry {name!r} is not a tensor but a {type(entry).__name__}")
    for info in (index.storage_data or {}).values():
        if Path(info.relative_path).name != str(info.relative_path):
            raise ValueError(f"its index names the file {info.relative_path!r}")


class TensorPlanner(DefaultLoadPlanner):
    """torch's planner without the entries that it unpickles."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise RunError(f"the checkpoint's entry {read_item.dest_index.fqn!r} is not a tensor")


def load_tensors(state: dict[str, Tensor], place: Path, *, no_dist: bool = False) -> None:
    """Fill the tensors of `state` from a checkpoint, in one process or in all of them."""
    Reader(place).read_metadata()  # dcp.load would log its error with a traceback
    try:
        dcp.load(state, storage_reader=Reader(place), planner=TensorPlanner(), no_dist=no_dist)
    except (CheckpointException, Exception) as error:
        cause = first_failure(error)
        if isinstance(cause, RunError):
            raise cause from error
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise RunError(f"{place} is damaged or does not fit the model ({reason})") from error


def first_failure(error: BaseException) -> BaseException:
    """The error of one process, where torch gathers those of all."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def write_checksums(folder: Path) -> None:
    sums = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            sums[file.name] = digest(content, file.stat().st_size)
    write_json(folder / CHECKSUMS, sums)


def check_checksums(folder: Path) -> None:
    """Raise if a file of a checkpoint is missing or has changed."""
    sums = read_json(folder / CHECKSUMS)
    if not isinstance(sums, dict) or not {REST, ".metadata"} <= sums.keys():
        raise RunError(f"{folder / CHECKSUMS} does not list the files of a checkpoint")
    for name, expected in sums.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise RunError(f"{folder} is damaged ({name} is missing)")
        with file.open("rb") as content:
            if digest(content, file.stat().st_size) != expected:
                raise RunError(f"{folder} is damaged (the checksum of {name} does not match)")


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint in a folder."""
    return max(folder.glob(f"*{ENDING}"), default=None)


def flatten(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts by their path."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if not isinstance(tree, Mapping):
        return {}
    return {k: v for key, part in tree.items() for k, v in flatten(part, f"{prefix}/{key}" if prefix else key).items()}


def without_tensors(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: without_tensors(part) for key, part in tree.items() if not isinstance(part, Tensor)}
    return tree


def merged(tree: Any, rest: Any) -> Any:
    """The tensors of `tree` and everything else of `rest`."""
    if isinstance(tree, Tensor) or not isinstance(tree, Mapping):
        return tree if isinstance(tree, Tensor) else rest
    return {key: merged(part, rest.get(key) if isinstance(rest, Mapping) else None) for key, part in tree.items()}


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy with checkpoints that are whole or absent."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices, 1, save_distributed_checkpoint=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder = Path(self.broadcast(filepath)).parent
        last = self.broadcast(newest(folder))
        number = int(last.stem) + 1 if last is not None else 1
        place = folder / f"{number:06d}{ENDING}"
        partial = self.broadcast(partial_name(place))
        if self.is_global_zero:
            partial.mkdir(parents=True)
        self.barrier()
        optimizers = {f"optimizer_{i}": s for i, s in enumerate(checkpoint.pop("optimizer_states", []))}
        state = {"model": checkpoint.pop("state_dict"), **optimizers}
        try:
            dcp.save(flatten(state), storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
            if self.is_global_zero:
                save_checkpoint(partial / REST, {**checkpoint, "rest": without_tensors(state)})
                write_checksums(partial)
                sync_folder(partial)
                partial.rename(place)
                sync_folder(folder)
        except (CheckpointException, OSError, RuntimeError, WriteError) as error:
            if self.is_global_zero:
                shutil.rmtree(partial, ignore_errors=True)
            raise write_error(place, first_failure(error)) from error
        if self.is_global_zero:
            for old in sorted(folder.glob(f"*{ENDING}"))[:-KEEP]:
                old.rename(partial_name(old))  # a half-deleted one must not be taken for intact
                shutil.rmtree(partial_name(old))
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = True) -> dict[str, Any]:
        place = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        for i, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{i}"] = get_optimizer_state_dict(self.model, optimizer)
        load_tensors(flatten(state), place)
        checkpoint = read_checkpoint(place / REST, schema=REST_FIELDS)
        rest = checkpoint.pop("rest")
        set_model_state_dict(self.model, state["model"])
        for i, optimizer in enumerate(self.optimizers):
            name = f"optimizer_{i}"
            set_optimizer_state_dict(self.model, optimizer, merged(state[name], rest[name]))
        return checkpoint


def read_whole(place: Path) -> dict[str, Any]:
    """A checkpoint in one process, as `read_checkpoint` returns one that is a single file, without the optimiser."""
    check_checksums(place)
    checkpoint = read_checkpoint(place / REST, schema=REST_FIELDS)
    checkpoint.pop("rest")
    found: dict[str, Tensor] = {}
    for name, about in Reader(place).read_metadata().state_dict_metadata.items():
        if name.startswith("model/") and isinstance(about, TensorStorageMetadata):
            found[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it reads in a single process, which is meant
        load_tensors(found, place, no_dist=True)
    return {**checkpoint, "state_dict": {name.removeprefix("model/"): t for name, t in found.items()}}


def export(place: Path, file: Path) -> None:
    """One safetensors file of the weights that a run would save: the average's where there is one."""
    state = read_whole(place)["state_dict"]
    part = "averaged." if any(name.startswith("averaged.") for name in state) else "model."
    write_weights(file, {name.removeprefix(part): t for name, t in state.items() if name.startswith(part)})
