"""Checkpoints in pieces (torch.distributed.checkpoint): every process writes its part, any number of them read it.

    checkpoints/000007.sharded/    tensors by torch.distributed.checkpoint; rest.pt, what is no tensor

A checkpoint grows under a hidden name and gets its own in one rename, after everything is on disk. A folder that ends
in ".sharded" is therefore whole, whatever happened. The index that torch writes is a pickle: it is read by an unpickler
that knows its few types and nothing else.
"""

from __future__ import annotations

import os
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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from primal_attention.engine.checkpoint import read_checkpoint
from primal_attention.engine.errors import RunError
from primal_attention.engine.files import write_atomically, write_weights

ENDING = ".sharded"
REST = "rest.pt"


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
    """torch's reader, but for the way to its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as content:
                index = _Index(content).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"its index is a {type(index).__name__}")
        except Exception as error:  # a damaged pickle raises nearly anything
            raise RunError(f"{file.parent} is damaged or no checkpoint of this library ({error})") from error
        storage = getattr(index, "storage_meta", None) or metadata.StorageMeta()
        storage.load_id = self.load_id
        index.storage_meta = storage
        return index


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
        place, partial = folder / f"{number:06d}{ENDING}", folder / f".{number:06d}.partial"
        if self.is_global_zero:
            for left in folder.glob(".*.partial"):  # by a process that was killed while it wrote
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            partial.mkdir(parents=True)
        self.barrier()
        optimizers = {f"optimizer_{i}": s for i, s in enumerate(checkpoint.pop("optimizer_states", []))}
        state = {"model": checkpoint.pop("state_dict"), **optimizers}
        dcp.save(flatten(state), storage_writer=dcp.FileSystemWriter(partial, sync_files=True))
        if self.is_global_zero:
            rest = {**checkpoint, "rest": without_tensors(state)}
            write_atomically(partial / REST, lambda file: torch.save(rest, file))
            partial.rename(place)
            _flush(folder)
            for old in sorted(folder.glob(f"*{ENDING}"))[:-1]:
                old.rename(old.with_suffix(".old"))  # a half-deleted one must not pass for whole either
                shutil.rmtree(old.with_suffix(".old"))
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = True) -> dict[str, Any]:
        place = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        for i, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{i}"] = get_optimizer_state_dict(self.model, optimizer)
        dcp.load(flatten(state), storage_reader=Reader(place))
        checkpoint = read_checkpoint(place / REST)
        rest = checkpoint.pop("rest")
        set_model_state_dict(self.model, state["model"])
        for i, optimizer in enumerate(self.optimizers):
            name = f"optimizer_{i}"
            set_optimizer_state_dict(self.model, optimizer, merged(state[name], rest[name]))
        return checkpoint


def _flush(folder: Path) -> None:
    """Put the rename itself on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_whole(place: Path) -> dict[str, Any]:
    """A checkpoint in one process, as `read_checkpoint` gives one that is a single file, without the optimiser."""
    reader = Reader(place)
    found: dict[str, Tensor] = {}
    for name, about in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model/") and isinstance(about, TensorStorageMetadata):
            found[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it reads in a single process, which is meant
        dcp.load(found, storage_reader=reader, no_dist=True)
    checkpoint = read_checkpoint(place / REST)
    checkpoint.pop("rest")
    return {**checkpoint, "state_dict": {name.removeprefix("model/"): t for name, t in found.items()}}


def export(place: Path, file: Path) -> None:
    """One safetensors file of the weights that a run would save: the average's where there is one."""
    state = read_whole(place)["state_dict"]
    part = "averaged." if any(name.startswith("averaged.") for name in state) else "model."
    write_weights(file, {name.removeprefix(part): t for name, t in state.items() if name.startswith(part)})
