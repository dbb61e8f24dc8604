"""The files of a run folder: name, lock, config.yaml, checkpoints, and a reader for each file.

    config.yaml                   read_run          the resolved recipe, with the command and the versions
    metrics.csv                   read_metrics      one row per epoch; nothing that a second run would not repeat
    model.safetensors             read_weights      the weights that the test score belongs to
    summary.json                  read_summary      the result; written last: its presence means the run has finished
    checkpoints/last.ckpt         read_checkpoint   `torch.save`'s format, then a line with its sha256
    checkpoints/previous.ckpt                       the one before, used if last.ckpt is damaged
    checkpoints/000007.sharded/   read_sharded      rankN.safetensors of each process, rest.pt, checksums.json
    validation/                                     the same for the training with validation samples (protocol both)
    .lock                                           the process that trains here, while it does

FSDP runs write sharded checkpoints, which any number of processes can read; the last two are kept. A reader returns
valid data or raises a one-line `RunError` that names the path and the field. Nothing that is read is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

import primal_attention
from primal_attention.train.config import FORMAT, Recipe, from_plain, to_plain
from primal_attention.train.optimizer import load_optimizer
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import (
    COUNT,
    Number,
    check,
    partial_name,
    read_cell,
    read_csv,
    read_json,
    read_yaml,
    sync_folder,
    write_atomically,
    write_error,
    write_json,
    write_text,
    write_weights,
)
from primal_attention.utils.provenance import collect

LOCK = ".lock"
LAST, PREVIOUS, DAMAGED, SHARDED = "last.ckpt", "previous.ckpt", ".damaged", ".sharded"
REST, CHECKSUMS = "rest.pt", "checksums.json"
MAX_CONFIG_BYTES = 2**20  # the YAML parser needs seconds per megabyte
TRAILER = b"\nsha256 "  # follows the content of a checkpoint, with 64 digits and a newline
TRAILER_BYTES = len(TRAILER) + 64 + 1
Table = dict[str, list[float | None]]

SUMMARY = {
    "benchmark": str,
    "label": str,
    "seed": Number(integer=True),
    "scores": {...: {...: Number(finite=False)}},
    "parameters": Number(integer=True),
    "seconds_per_epoch": Number(finite=False),
    "device": str,
    "data": dict,
}
RUN = {  # fields of `State`
    "rows": list,
    "seconds": list,
    "finished": bool,
    "best": (dict, None),
    "chosen": (dict, None),
    "middle": (dict, None),
    "unmeasured": (dict, None),
    "peak_bytes": (Number(integer=True), None),
}
PROGRESS = {"global_step": Number(integer=True), "run": RUN}
CHECKPOINT = {"state_dict": dict, "optimizer_states": list, **PROGRESS}
SHARDED_REST = {"shapes": dict, "split": list, "param_groups": list, **PROGRESS}
# Fields that may change when a run resumes: they change no result, or only rounding and dropout (devices, context).
FREE = {
    "data.folder",
    "trainer.checkpoint_every",
    "trainer.checkpoint_steps",
    "trainer.context",
    "trainer.devices",
    "trainer.logger",
    "trainer.progress",
}
ENDS_AT_ZERO = ("onecycle", "onecycle-linear")  # schedules that a run cannot continue

# Names of run folders


def default_folder(name: str, recipe: Recipe, root: Path = Path("runs")) -> Path:
    """Return runs/<recipe>/<variant>-seed<n>."""
    return root / name / f"{recipe.label()}-seed{recipe.seed}"


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
    for name, old, new in differences(to_plain(before), to_plain(recipe)):
        if name not in free:
            flag = name.replace("_", "-")
            raise RunError(f"{folder} was started with --{flag} {old}, not {new}: resume with the same settings")
    if not extends:
        return Plan(text.get("schedule_epochs", epochs))
    schedule, old = before.optim.schedule, before.trainer.epochs
    if schedule in ENDS_AT_ZERO and not new_schedule:
        raise RunError(
            f"{folder} cannot go on to {epochs} epochs: its learning rate (--optim.schedule {schedule}) ends at zero "
            f"after {old}; give --optim.schedule again, for example --optim.schedule constant"
        )
    return Plan(epochs if new_schedule else text.get("schedule_epochs", old), extends=True)


def write_config(
    folder: Path, recipe: Recipe, plan: Plan, *, name: str, command: str, commit: str | None = None
) -> None:
    """Write config.yaml of a new or an extended run; that of a resumed run stays."""
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
            **collect(command=command, commit=commit),
            "config": to_plain(recipe),
        }
    write_text(file, yaml.safe_dump(text, sort_keys=False, allow_unicode=True))


def run_origin(folder: Path) -> dict[str, Any]:
    """Return provenance and settings of a run, so that its summary is complete without the folder."""
    text, recipe = read_run(folder)
    config = to_plain(recipe)
    config.get("data", {}).pop("folder", None)  # a path of this machine
    names = ("date", "command", "commit", "dirty", "commit_source", "versions")
    return {**{name: text[name] for name in names if name in text}, "config": config}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names and both values of fields that differ."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield prefix + key, a, b


def read_run(folder: Path) -> tuple[dict[str, Any], Recipe]:
    """Return the content of config.yaml and the recipe in it."""
    from primal_attention.train.registry import recipe_type

    file = folder / "config.yaml"
    if not file.exists():
        raise _not_a_run(folder)
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise RunError(f"{file} is not a run's configuration: it has more than {MAX_CONFIG_BYTES} bytes")
    text = read_yaml(file, {"format": ...})
    check_format(text, file)
    check(text, {"config": dict, "schedule_epochs?": COUNT, "extended_by?": list}, file)
    kind = recipe_type(str(text.get("benchmark")))
    if kind is None:
        name, version = shorten(text.get("benchmark")), primal_attention.__version__
        hint = "a recipe of your own needs --recipes FILE.py"
        raise RunError(f"{file}: benchmark {name} is unknown to this version ({version}); {hint}")
    return text, from_plain(kind, text["config"], f"{file}: ")


# The lock


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no second process writes there. A folder that is empty at the end is removed.

    The operating system releases the lock of a process that ends. The lock file holds the process's number.
    """
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _open_locked(folder / LOCK) as file:
            try:
                file.truncate(0)
                file.write(str(os.getpid()).encode())
                _remove_partial_files(folder)
                yield
            finally:
                (folder / LOCK).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # not empty
            for place in created:
                place.rmdir()


def _open_locked(path: Path) -> IO[bytes]:
    """Open a lock file and lock it; raise if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return path.open("ab+", buffering=0)
    while True:
        try:
            file = path.open("ab+", buffering=0)
        except OSError as error:
            raise write_error(path, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).decode(errors="replace")
            file.close()
            reason = f"is in use by process {owner}: wait until it ends, or choose another folder"
            raise RunError(f"{path.parent} {reason}") from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # the holder before has removed this file


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
    finished: bool = False
    best: dict[str, Any] | None = None  # epoch and rank of the chosen epoch
    chosen: dict[str, torch.Tensor] | None = None  # its weights
    middle: dict[str, Any] | None = None  # position within an epoch
    unmeasured: dict[str, Any] | None = None  # row of an epoch that is trained and not yet evaluated
    peak_bytes: int | None = None
    logger_ids: dict[str, str] = field(default_factory=dict)


def save_checkpoint(path: Path, content: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Write a checkpoint with its checksum; a file that it replaces is renamed to `keep`."""
    buffer = io.BytesIO()  # a file that runs Python code would turn Ctrl-C into an error of torch.save
    torch.save(content, buffer)
    data = buffer.getbuffer()
    write_atomically(path, lambda file: file.write(data) + file.write(_trailer(data)), keep=keep)
    sync_folder(path.parent)


def save(
    folder: Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    *,
    sharded: bool = False,
) -> None:
    """Write a checkpoint and keep the one before; all processes call this together."""
    if sharded:
        save_sharded(folder, module, optimizer, progress)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        tensors = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
        save_checkpoint(folder / LAST, {**tensors, **progress}, keep=folder / PREVIOUS)


def restore(place: Path, content: Mapping[str, Any], module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights and the optimizer state that `load_newest` found."""
    try:
        if place.is_dir():
            load_sharded(place, content, module, optimizer)
        else:
            module.load_state_dict(content["state_dict"])
            load_optimizer(optimizer, content["optimizer_states"][0])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise RunError(f"{place} does not fit the recipe of its config.yaml ({_reason(error)})") from error


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints of a training, newest first."""
    last, previous = folder / LAST, folder / PREVIOUS
    if previous.is_file():
        return [last, previous]
    return [last] if last.is_file() else sorted(folder.glob(f"*{SHARDED}"), reverse=True)


def load_newest(folder: Path, *, main: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest intact checkpoint and its content; None if there is no checkpoint.

    Damaged ones are reported and renamed, so that the next save does not replace an intact one by them.

    Args:
        folder: The checkpoints of one training.
        main: Whether this process reports and renames.
    """
    damaged: list[tuple[Path, RunError]] = []
    for place in candidates(folder):
        try:
            content = read_sharded(place) if place.is_dir() else read_checkpoint(place)
        except RunError as error:
            damaged.append((place, error))
            continue
        for bad, reason in damaged if main else ():
            if bad.exists():
                shutil.rmtree(bad.with_name(bad.name + DAMAGED), ignore_errors=True)  # a folder cannot be replaced
                bad.replace(bad.with_name(bad.name + DAMAGED))
            warnings.warn(f"{reason}: continuing from {place.name}", stacklevel=2)
        return place, content
    if damaged:
        reasons = "; ".join(str(reason) for _, reason in damaged)
        raise RunError(f"no intact checkpoint to continue from: {reasons}; train again in another folder")
    return None


def read_checkpoint(path: Path, schema: Any = CHECKPOINT) -> dict[str, Any]:
    """Return the content of a checkpoint: tensors on the CPU and plain values, never pickled code."""
    try:
        stored = path.read_bytes()
        data, trailer = stored[:-TRAILER_BYTES], stored[-TRAILER_BYTES:]
        if not trailer.startswith(TRAILER):
            raise ValueError("it does not end in its checksum")
        if trailer != _trailer(data):
            raise ValueError("its checksum does not match")
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except Exception as error:  # torch raises a dozen types for a damaged file, some without a message
        raise RunError(f"{path} is damaged or no checkpoint of this library ({_reason(error)})") from error
    if isinstance(content, dict) and isinstance(content.get("callbacks"), dict):  # of an earlier version
        content["run"] = content.pop("callbacks").get("RunState")
    check(content, schema, path)
    return content


def _trailer(data: bytes | memoryview) -> bytes:
    return TRAILER + hashlib.sha256(data).hexdigest().encode() + b"\n"


# Sharded checkpoints: a process writes its rows of the tensors that FSDP splits; the main process writes the others.


def flat_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of weights and optimizer as "model/NAME" and "optimizer/INDEX/KEY"."""
    tensors = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": tensor for key, tensor in entries.items()}
    return tensors


def save_sharded(
    folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]
) -> None:
    """Write a checkpoint under a hidden name and rename it when it is complete; all processes call this together."""
    rank = dist.get_rank()
    places: list[Any] = [None]
    if rank == 0:
        last = max(folder.glob(f"*{SHARDED}"), default=None)
        place = folder / f"{int(last.stem) + 1 if last is not None else 1:06d}{SHARDED}"
        places = [(place, partial_name(place))]
        places[0][1].mkdir(parents=True)
    dist.broadcast_object_list(places)
    place, partial = places[0]
    tensors = flat_tensors(module, optimizer)
    split = [name for name, tensor in tensors.items() if hasattr(tensor, "to_local")]
    own = {name: tensors[name].to_local() for name in split}  # type: ignore[attr-defined]
    if rank == 0:
        own |= {name: tensor for name, tensor in tensors.items() if name not in own}
    # If this fails in one process, the launcher ends the others; the next holder of the lock removes what is left.
    write_weights(partial / f"rank{rank}.safetensors", own)
    dist.barrier()
    if rank == 0:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        groups = optimizer.state_dict()["param_groups"]
        save_checkpoint(partial / REST, {**progress, "shapes": shapes, "split": split, "param_groups": groups})
        write_json(partial / CHECKSUMS, {file.name: _file_digest(file) for file in sorted(partial.iterdir())})
        sync_folder(partial)
        partial.rename(place)
        sync_folder(folder)
        for old in sorted(folder.glob(f"*{SHARDED}"))[:-2]:
            old.rename(partial_name(old))  # a half-deleted checkpoint must not look intact
            shutil.rmtree(partial_name(old))


def _file_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_sharded(place: Path) -> dict[str, Any]:
    """Check a sharded checkpoint and return its content without the tensors, which `read_shards` reads."""
    sums = read_json(place / CHECKSUMS, {REST: str, "rank0.safetensors": str, ...: str})
    for name, expected in sums.items():
        if Path(name).name != name or not (place / name).is_file():
            raise RunError(f"{place} is damaged ({name} is missing)")
        if _file_digest(place / name) != expected:
            raise RunError(f"{place} is damaged (the checksum of {name} does not match)")
    return read_checkpoint(place / REST, SHARDED_REST)


def read_shards(place: Path, content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors whose names start with `prefix`, one after the other."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = sorted(place.glob("rank*.safetensors"), key=lambda file: int(file.stem[4:]))
        shards = [stack.enter_context(safe_open(file, "pt")) for file in files]
        for name in content["shapes"]:
            if name.startswith(prefix):
                parts = [shard.get_tensor(name) for shard in (shards if name in content["split"] else shards[:1])]
                yield name.removeprefix(prefix), torch.cat(parts) if len(parts) > 1 else parts[0]


def load_sharded(
    place: Path, content: Mapping[str, Any], module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load weights and optimizer state from a checkpoint of any number of processes."""
    from primal_attention.train.distributed import load_full, split_like

    load_full(module, dict(read_shards(place, content, "model/")))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in read_shards(place, content, "optimizer/"):
        index, key = name.split("/")
        is_split = f"optimizer/{name}" in content["split"]
        state.setdefault(int(index), {})[key] = split_like(params[int(index)], tensor) if is_split else tensor
    optimizer.load_state_dict({"state": state, "param_groups": content["param_groups"]})


def export(place: Path, file: Path) -> None:
    """Write the weights that a run would save (the average's, if there is one) to one safetensors file."""
    content = read_sharded(place)
    has_average = any(name.startswith("model/averaged.") for name in content["shapes"])
    write_weights(file, dict(read_shards(place, content, "model/averaged." if has_average else "model/model.")))


# Readers of the other files


def _not_a_run(folder: Path) -> RunError:
    if folder.is_file():
        return RunError(f"{folder} is a file where a folder is needed")
    return RunError(f"{folder} is not a run folder: it has no config.yaml")


def read_metrics(path: Path) -> Table:
    """Return the columns of metrics.csv; an empty cell is None. A run without a finished epoch has no file."""
    if not path.exists():
        return {}
    header, rows = read_csv(path)
    if "epoch" not in header:
        raise RunError(f"{path}: the column epoch is missing")
    table: Table = {name: [] for name in header}
    for line, row in enumerate(rows, start=2):
        for name, cell in zip(header, row, strict=True):
            table[name].append(read_cell(cell, f"{path} line {line}: {shorten(name)}"))
        if not (table["epoch"][-1] or 0.5).is_integer():
            raise RunError(f"{path} line {line}: epoch is not a whole number")
    return table


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json, which a finished run has."""
    path = folder / "summary.json"
    if not path.exists():
        if not (folder / "config.yaml").exists():
            raise _not_a_run(folder)
        raise RunError(f"{path} is missing: the run has not finished; 'primal train RECIPE … --resume' continues it")
    content = read_json(path, {"format": ...})
    check_format(content, path)
    check(content, SUMMARY, path)
    return content


def read_weights(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise RunError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OSError) as error:
        raise RunError(f"{path} is not a safetensors file ({_reason(error)})") from error


def check_format(content: Mapping[str, Any], path: Path) -> None:
    """Raise if a file was written in another format than this version reads."""
    if content.get("format") != FORMAT or isinstance(content["format"], bool):
        raise RunError(
            f"{path} was written by version {shorten(content.get('version', 'unknown'))} in format "
            f"{shorten(content.get('format'))}; this is version {primal_attention.__version__} and reads format "
            f"{FORMAT}: use the version that wrote it"
        )


def shorten(value: Any, limit: int = 60) -> str:
    """Return a value as text for an error message."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[:limit] + "…"


def _reason(error: BaseException) -> str:
    """Return the message of an error on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"
