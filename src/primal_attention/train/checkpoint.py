"""The files of a run folder: name, lock, config.yaml, checkpoints, and readers of what a training needs.

    config.yaml                   read_run          the resolved recipe, with the command and the versions
    metrics.csv                                     one row per epoch; `report.results` reads it
    model.safetensors             read_weights      the weights that the test score belongs to
    summary.json                  read_summary      the result; written last: its presence means the run has finished
    checkpoints/last.ckpt         read_checkpoint   `torch.save`'s format, then a line with its sha256
    checkpoints/previous.ckpt                       the one before, used if last.ckpt is damaged
    validation/                                     the same for the training with validation samples (protocol both)
    .lock                                           the process that trains here, while it does

A checkpoint of an FSDP run is a folder with the file rankN.ckpt of each process, which has its rows of the tensors; any
number of processes can read it. A reader returns valid data or raises a one-line `RunError` that names the path and the
field. Nothing that is read is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from torch.utils._pytree import tree_map

import primal_attention
from primal_attention.data.storage import one_line
from primal_attention.train import distributed
from primal_attention.train.config import FORMAT, Recipe, flatten, from_plain, override, to_plain
from primal_attention.utils import files
from primal_attention.utils.errors import RunError
from primal_attention.utils.provenance import collect

LOCK = ".lock"
FOLDER = "PRIMAL_RUN_FOLDER"
LAST, PREVIOUS, DAMAGED = "last.ckpt", "previous.ckpt", ".damaged"
ROWS = "rows"  # key of a process's rows of a tensor that FSDP splits
MAX_CONFIG_BYTES = 2**20  # the YAML parser needs seconds per megabyte
TRAILER = b"\nsha256 "  # follows the content of a checkpoint, with 64 digits and a newline
TRAILER_BYTES = len(TRAILER) + 64 + 1

SUMMARY = {
    "benchmark": str,
    "label": str,
    "seed": files.Number(integer=True),
    "scores": {...: {...: files.Number(finite=False)}},
    "parameters": files.Number(integer=True),
    "seconds_per_epoch": files.Number(finite=False),
    "device": str,
    "data": dict,
}
CHECKPOINT = {
    "state_dict": dict,
    "optimizer_states": [dict],
    "global_step": files.Number(integer=True),
    "run": {"rows": list, "seconds": list, "best": (dict, None), "chosen": (dict, None)},
}
# Fields that may change when a run resumes: they change no result, or only rounding and dropout (devices, context).
FREE = {
    "data.file",
    "data.folder",
    "data.test_file",
    "trainer.checkpoint_every",
    "trainer.checkpoint_steps",
    "trainer.context",
    "trainer.devices",
    "trainer.logger",
    "trainer.progress",
}
ENDS_AT_ZERO = ("onecycle", "onecycle-linear")  # schedules that a run cannot continue

# Names of run folders


def default_folder(name: str, recipe: Recipe, *, resume: bool) -> Path:
    """Return runs/<recipe>/<variant>-seed<n>, numbered if it is taken; with `resume` the last one."""
    if distributed.launched():
        raise RunError("several processes start at once and each would pick a folder: name it with --out FOLDER")
    place = Path("runs", name, f"{recipe.label()}-seed{recipe.seed}")
    place = newest_folder(place) if resume else unused_folder(place)
    if distributed.is_main():
        os.environ[FOLDER] = str(place)  # for the processes that Fabric starts
    return Path(os.environ.get(FOLDER, place))


def unused_folder(folder: Path) -> Path:
    """Return the folder if it holds no run, else the first free name with a number."""
    number, place = 1, folder
    while (place / "config.yaml").exists() or (place / LOCK).exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def newest_folder(folder: Path) -> Path:
    """Return the last of the numbered folders that `unused_folder` has returned."""
    number, place = 1, folder
    while (following := folder.with_name(f"{folder.name}-{number + 1}")).joinpath("config.yaml").exists():
        number, place = number + 1, following
    return place


# config.yaml


class Plan(NamedTuple):
    """How a run in a folder goes on: `extends` adds epochs; warmup is a part of `schedule_epochs`."""

    schedule_epochs: int
    extends: bool = False


def check_config(folder: Path, recipe: Recipe, *, resume: bool, new_schedule: bool = False) -> Plan:
    """Compare a recipe with the run in a folder, if there is one.

    Args:
        folder: The run folder.
        recipe: The resolved recipe.
        resume: Continue the run. More epochs than before extend it.
        new_schedule: The user gave --optim.schedule, which may then differ when epochs are added.

    Raises:
        RunError: If the folder holds another run, or the schedule does not allow more epochs.
    """
    epochs = recipe.trainer.epochs
    if not (folder / "config.yaml").exists():
        return Plan(epochs)
    if not resume:
        raise RunError(f"{folder} already holds a run: add --resume to continue it, or choose another --out")
    text, before = read_run(folder)
    extends = epochs > before.trainer.epochs
    free = FREE | ({"trainer.epochs"} if extends else set())
    free |= {"optim.schedule", "optim.warmup", "optim.lr"} if extends and new_schedule else set()
    stored = dict(flatten(to_plain(before.resolved())))
    for name, new in flatten(to_plain(recipe)):
        if name not in free and (old := stored.get(name)) != new:
            flag = name.replace("_", "-")
            raise RunError(f"{folder} was started with --{flag} {old}, not {new}: resume with the same settings")
    if not extends:
        return Plan(text.get("schedule_epochs", epochs))
    schedule, old_epochs = before.optim.schedule, before.trainer.epochs
    if schedule in ENDS_AT_ZERO and not new_schedule:
        raise RunError(
            f"{folder} cannot go on to {epochs} epochs: its learning rate (--optim.schedule {schedule}) ends at zero "
            f"after {old_epochs}; give --optim.schedule again, for example --optim.schedule constant"
        )
    return Plan(epochs if new_schedule else text.get("schedule_epochs", old_epochs), extends=True)


def keep_settings(folder: Path, recipe: Recipe, name: str, flags: Collection[str]) -> Recipe:
    """Return the recipe with the settings of the run in a folder that no flag gives.

    Args:
        folder: The run folder.
        recipe: Recipe of the command that resumes the run.
        name: Name of the recipe.
        flags: Flags of the command, as --group.field.
    """
    text, before = read_run(folder)
    own = text.get("recipe") or name
    if own != name or type(before) is not type(recipe):
        raise RunError(f"{folder} was started with recipe {own}, not {name}: resume with the same recipe")
    values = dict(flatten(to_plain(before)))
    given = {field for field in values if f"--{field.replace('_', '-')}" in flags}
    return override(before, {field: value for field, value in flatten(to_plain(recipe)) if field in given})


def has_other_data(folder: Path, data_sha256: str | None) -> bool:
    """Return True if the run in a folder was trained on data with another hash."""
    before = read_run(folder)[0].get("data_sha256") if (folder / "config.yaml").exists() else None
    return None not in (before, data_sha256) and before != data_sha256


def write_config(folder: Path, recipe: Recipe, plan: Plan, *, name: str, command: str, **origin: Any) -> None:
    """Write config.yaml of a new or an extended run; that of a resumed run stays.

    Args:
        folder: The run folder.
        recipe: The resolved recipe.
        plan: Of `check_config`.
        name: Name of the recipe.
        command: The command line.
        origin: Commit of the code and hash of the data, as in `provenance.collect`.
    """
    file = folder / "config.yaml"
    if plan.extends:
        text, _ = read_run(folder)
        text |= {"config": to_plain(recipe), "schedule_epochs": plan.schedule_epochs}
        text["extended_by"] = [*text.get("extended_by", []), command]
        (folder / "summary.json").unlink(missing_ok=True)  # first: a folder with a summary counts as finished
    elif file.exists():
        return
    else:
        text = {
            "format": FORMAT,
            "version": primal_attention.__version__,
            "benchmark": recipe.benchmark,
            "recipe": name,
            **collect(command=command, **origin),
            "config": to_plain(recipe),
        }
    files.write_text(file, yaml.safe_dump(text, sort_keys=False, allow_unicode=True))


def run_origin(folder: Path) -> dict[str, Any]:
    """Return provenance and settings of a run, so that its summary is complete without the folder."""
    text, recipe = read_run(folder)
    config = to_plain(recipe)
    for name in ("folder", "file", "test_file"):  # paths of this machine
        config.get("data", {}).pop(name, None)
    names = ("date", "command", "extended_by", "commit", "dirty", "commit_source", "versions")
    return {**{name: text[name] for name in names if name in text}, "config": config}


def read_run(folder: Path) -> tuple[dict[str, Any], Recipe]:
    """Return the content of config.yaml and the recipe in it."""
    from primal_attention.train.registry import recipe_type

    file = folder / "config.yaml"
    if not file.exists():
        raise _not_a_run(folder)
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise RunError(f"{file} is not a run's configuration: it has more than {MAX_CONFIG_BYTES} bytes")
    text = files.read_yaml(file)
    check_content(text, {"config": dict, "schedule_epochs?": files.COUNT, "extended_by?": list}, file)
    kind = recipe_type(str(text.get("benchmark")))
    if kind is None:
        name, version = one_line(text.get("benchmark"), 60), primal_attention.__version__
        hint = "a recipe of your own needs --recipes FILE.py"
        raise RunError(f"{file}: benchmark {name} is unknown to this version ({version}); {hint}")
    return text, from_plain(kind, text["config"], f"{file}: ")


# The lock


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no second process writes there. A folder that is empty at the end is removed.

    The operating system releases the lock of a process that ends. The lock file holds the process's number.
    """
    from filelock import FileLock, Timeout

    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file, timeout=0)
    try:
        try:
            lock.acquire()
        except Timeout:
            reason = f"is in use by process {file.read_text()}: wait until it ends, or choose another folder"
            raise RunError(f"{folder} {reason}") from None
        except OSError as error:
            raise files.write_error(file, error) from error
        try:
            file.write_text(str(os.getpid()))
            _remove_partial_files(folder)
            yield
        finally:
            file.unlink(missing_ok=True)
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # not empty
            for place in created:
                place.rmdir()


def _remove_partial_files(folder: Path) -> None:
    """Remove unfinished files of killed processes; only the holder of the lock writes here."""
    for part in ("", "checkpoints", "validation", "validation/checkpoints"):
        for left in (folder / part).glob(".*.[0-9]*.partial"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


# Checkpoints


@dataclass
class State:
    """Progress of a training besides weights; stored in every checkpoint.

    metrics.csv is always written from `rows`, so a resumed run has the file of an uninterrupted one.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None  # epoch and rank of the chosen epoch
    chosen: dict[str, torch.Tensor] | None = None  # its weights
    middle: dict[str, Any] | None = None  # position within an epoch
    peak_bytes: int | None = None
    logger_ids: dict[str, str] = field(default_factory=dict)


def save(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]) -> None:
    """Write last.ckpt and rename the one before to previous.ckpt; all processes call this together."""
    rank, last, previous = dist.get_rank() if dist.is_initialized() else 0, folder / LAST, folder / PREVIOUS
    tensors = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    if not any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        if rank == 0:
            write_checkpoint(last, {**tensors, **progress}, keep=previous)
        return
    rows = tree_map(lambda value: {ROWS: value.to_local()} if hasattr(value, "to_local") else value, tensors)
    content = {**rows, **(progress if rank == 0 else {}), "processes": dist.get_world_size()}
    places = [files.partial_name(last)]  # by the number of the main process
    dist.broadcast_object_list(places)
    # If this fails in one process, the launcher ends the others; the next holder of the lock removes what is left.
    write_checkpoint(places[0] / f"rank{rank}.ckpt", content)
    dist.barrier()
    if rank == 0:
        if last.exists():
            shutil.rmtree(previous, ignore_errors=True)
            last.rename(previous)
        places[0].rename(last)
        files.sync_folder(folder)


def write_checkpoint(path: Path, content: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Write one file with its checksum; a file that it replaces is renamed to `keep`."""
    buffer = io.BytesIO()  # a file that runs Python code would turn Ctrl-C into an error of torch.save
    torch.save(content, buffer)
    data = buffer.getbuffer()
    files.write_atomically(path, lambda file: file.write(data) + file.write(_trailer(data)), keep=keep)
    files.sync_folder(path.parent)


def join_parts(*parts: Any) -> Any:
    """Join the rows of a tensor that FSDP splits, given the values of all processes; others are the main process's."""
    return torch.cat([part[ROWS] for part in parts]) if _is_split(parts[0]) else parts[0]


def _is_split(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {ROWS}


def restore(place: Path, content: Mapping[str, Any], module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer state of a checkpoint, written by any number of processes."""
    try:
        distributed.load_full(module, content["state_dict"])
        state = content["optimizer_states"][0]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entries in state["state"].items():
            shape = params[index].shape
            entries |= {key: distributed.split_like(params[index], t) for key, t in entries.items() if t.shape == shape}
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise RunError(f"{place} does not fit the recipe of its config.yaml ({one_line(error)})") from error


def load_newest(folder: Path, *, is_main: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest intact checkpoint and its content; None if there is no checkpoint.

    Damaged ones are reported and renamed, so that the next save does not replace an intact one by them.

    Args:
        folder: The checkpoints of one training.
        is_main: Whether this process reports and renames.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    if not last.exists() and not previous.exists():
        return None
    try:
        return last, read_checkpoint(last)
    except RunError as error:
        reason = error
    try:
        content = read_checkpoint(previous)
    except RunError as error:
        both = f"{reason}; {error}"
        raise RunError(f"no intact checkpoint to continue from: {both}; train again in another folder") from None
    if is_main:
        if last.exists():
            damaged = last.with_name(last.name + DAMAGED)
            shutil.rmtree(damaged, ignore_errors=True)  # a folder cannot be replaced
            last.replace(damaged)
        warnings.warn(f"{reason}: continuing from {previous.name}", stacklevel=2)
    return previous, content


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint: unsharded tensors on the CPU and plain values, never pickled code."""
    if not path.is_dir():
        content = _read_part(path)
    else:
        content = _read_part(path / "rank0.ckpt")
        files.check(content, {"processes": files.COUNT}, path)
        parts = [content, *(_read_part(path / f"rank{rank}.ckpt") for rank in range(1, content["processes"]))]
        try:
            for key in ("state_dict", "optimizer_states"):
                content[key] = tree_map(join_parts, *(part[key] for part in parts), is_leaf=_is_split)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise RunError(f"{path} is damaged: its parts do not fit each other ({one_line(error)})") from error
    files.check(content, CHECKPOINT, path)
    return content


def _read_part(file: Path) -> dict[str, Any]:
    """Return the content of a file that `write_checkpoint` wrote."""
    try:
        stored = file.read_bytes()
        data, trailer = stored[:-TRAILER_BYTES], stored[-TRAILER_BYTES:]
        if not trailer.startswith(TRAILER):
            raise ValueError("it does not end in its checksum")
        if trailer != _trailer(data):
            raise ValueError("its checksum does not match")
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        files.check(content, dict, file)
        return content
    except FileNotFoundError:
        raise RunError(f"{file} is missing") from None
    except Exception as error:  # torch raises a dozen types for a damaged file, some without a message
        raise RunError(f"{file} is damaged or no checkpoint of this library ({one_line(error)})") from error


def _trailer(data: bytes | memoryview) -> bytes:
    return TRAILER + hashlib.sha256(data).hexdigest().encode() + b"\n"


def export(place: Path, file: Path) -> None:
    """Write the weights of a checkpoint (the average's, if there is one) to one safetensors file."""
    state = read_checkpoint(place)["state_dict"]
    prefix = "averaged." if any(name.startswith("averaged.") for name in state) else "model."
    files.write_weights(file, {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})


# Readers of the other files


def _not_a_run(folder: Path) -> RunError:
    if folder.is_file():
        return RunError(f"{folder} is a file where a folder is needed")
    return RunError(f"{folder} is not a run folder: it has no config.yaml")


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json, which a finished run has."""
    path = folder / "summary.json"
    if not path.exists():
        if not (folder / "config.yaml").exists():
            raise _not_a_run(folder)
        raise RunError(f"{path} is missing: the run has not finished; 'primal train RECIPE … --resume' continues it")
    content = files.read_json(path)
    check_content(content, SUMMARY, path)
    return content


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Load the safetensors file of a run folder into its model."""
    try:
        model.load_state_dict(read_weights(file))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()[:200]
        raise RunError(f"{file} does not fit the model of its config.yaml ({reason})") from error


def read_weights(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise RunError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OSError) as error:
        raise RunError(f"{path} is not a safetensors file ({one_line(error)})") from error


def check_content(content: Any, schema: files.Schema, path: Path) -> None:
    """Raise if a file was written in another format than this version reads, or does not match its schema."""
    files.check(content, {"format": ...}, path)
    number, version = content.get("format"), primal_attention.__version__
    if number != FORMAT or isinstance(number, bool):
        writer = one_line(content.get("version", "unknown"), 60)
        raise RunError(
            f"{path} was written by version {writer} in format {one_line(number, 60)}; this is version {version} and "
            f"reads format {FORMAT}: use the version that wrote it"
        )
    files.check(content, schema, path)
