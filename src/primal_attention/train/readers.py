"""Read the files of a run folder. Whatever is in them, the result is valid data or a one-line `RunError`.

    config.yaml          read_config       format, benchmark, config
    metrics.csv          read_metrics      columns of numbers, one row per epoch
    summary.json         read_summary      the fields of `SUMMARY`
    checkpoints/*.ckpt   read_checkpoint   the fields of `CHECKPOINT`, and a checksum
    *.safetensors        read_weights      named tensors

Each error names the path and, where it applies, the field. Nothing that is read is executed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import IO, Any

import primal_attention
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_cell, read_csv, read_json, read_yaml

FORMAT = 1
LARGEST_INTEGER = 2**63 - 1
MAX_CONFIG_BYTES = 2**20  # the YAML parser needs seconds for each megabyte
Table = dict[str, list[float | None]]
Schema = Mapping[str, type | tuple[type, ...]]

CONFIG: Schema = {"config": dict}
SUMMARY: Schema = {
    "benchmark": str,
    "label": str,
    "seed": int,
    "scores": dict,
    "parameters": int,
    "seconds_per_epoch": float,
    "device": str,
    "data": dict,
}
PROGRESS: Schema = {  # of a checkpoint, besides tensors
    "pytorch-lightning_version": str,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "lr_schedulers": list,
    "callbacks.RunState.rows": list,
    "callbacks.RunState.seconds": list,
    "callbacks.RunState.finished": bool,
    "callbacks.RunState.best": (dict, NoneType),
    "callbacks.RunState.chosen": (dict, NoneType),
    "callbacks.RunState.middle": (dict, NoneType),
    "callbacks.RunState.unmeasured": (dict, NoneType),
    "callbacks.RunState.peak_bytes": (int, NoneType),
}
CHECKPOINT: Schema = {"state_dict": dict, "optimizer_states": list, **PROGRESS}
TRAILER = b"\nsha256 "  # behind the content of a checkpoint, with the 64 digits and a line end
TRAILER_BYTES = len(TRAILER) + 64 + 1
KINDS = {dict: "a table", list: "a list", str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def check_fields(content: Any, schema: Schema, path: Path) -> None:
    """Raise if a field is missing or of another type. Names may be dotted; every int is also a float."""
    for name, kind in schema.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = content
        for key in name.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise RunError(f"{path} has no field {name}: it is damaged or of another version")
            value = value[key]
        if not _has_type(value, kinds):
            wanted = " or ".join(KINDS[k] for k in kinds if k in KINDS)
            raise RunError(f"{path}: {name} must be {wanted} (got {shorten(value)})")


def _has_type(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return False
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def check_format(content: Mapping[str, Any], path: Path) -> None:
    """Raise if a file was written in another format than this version reads."""
    if content.get("format") != FORMAT or isinstance(content["format"], bool):
        raise RunError(
            f"{path} was written by version {shorten(content.get('version', 'unknown'))} in format "
            f"{shorten(content.get('format'))}; this is version {primal_attention.__version__} and reads format "
            f"{FORMAT}: use the version that wrote it"
        )


def shorten(value: Any, limit: int = 60) -> str:
    """The value as text for an error message."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[:limit] + "…"


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.yaml, with the recipe as a plain table under "config"."""
    if not path.exists():
        raise _not_a_run(path.parent)
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise RunError(f"{path} is not a run's configuration: it has more than {MAX_CONFIG_BYTES} bytes")
    content = read_yaml(path)
    if not isinstance(content, dict) or "format" not in content:
        raise RunError(f"{path} is not a run's configuration")
    check_format(content, path)
    check_fields(content, CONFIG, path)
    return content


def _not_a_run(folder: Path) -> RunError:
    if folder.is_file():
        return RunError(f"{folder} is a file where a folder is needed")
    return RunError(f"{folder} is not a run folder: it has no config.yaml")


def read_metrics(path: Path) -> Table:
    """The columns of metrics.csv; an empty cell is None. A run without a finished epoch has no file and no columns."""
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


def read_summary(path: Path) -> dict[str, Any]:
    """The content of summary.json."""
    if not path.exists():
        if not (path.parent / "config.yaml").exists():
            raise _not_a_run(path.parent)
        raise RunError(f"{path} is missing: the run has not finished; 'primal train RECIPE … --resume' continues it")
    content = read_json(path)
    if not isinstance(content, dict):
        raise RunError(f"{path} is not a run's summary")
    check_format(content, path)
    check_fields(content, SUMMARY, path)
    for name, score in content["scores"].items():
        check_fields(content["scores"], {name: dict}, path)
        for key, value in score.items():
            if not _has_type(value, (float,)):
                raise RunError(f"{path}: scores.{name}.{key} must be a number (got {shorten(value)})")
    return content


def digest(file: IO[bytes], size: int) -> str:
    """The sha256 of the next `size` bytes."""
    found = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, 2**20))):
        found.update(block)
        size -= len(block)
    return found.hexdigest()


def check_checksum(path: Path) -> None:
    """Raise if a file does not end in the checksum of what stands before it."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END) - TRAILER_BYTES
        file.seek(max(0, size))
        if size <= 0 or not (trailer := file.read()).startswith(TRAILER):
            raise ValueError("it does not end in its checksum")
        file.seek(0)
        if digest(file, size).encode() != trailer[len(TRAILER) : -1]:
            raise ValueError("its checksum does not match")


def read_checkpoint(path: Path, map_location: Any = "cpu", schema: Schema = CHECKPOINT) -> dict[str, Any]:
    """The content of a checkpoint: tensors and plain values only, never pickled code."""
    import torch

    try:
        check_checksum(path)
        content = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except Exception as error:  # torch raises a dozen kinds for a damaged file, some without a message
        raise RunError(f"{path} is damaged or no checkpoint of this library ({_reason(error)})") from error
    check_fields(content, schema, path)
    return content


def read_weights(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by their names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise RunError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OSError) as error:
        raise RunError(f"{path} is not a safetensors file ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The first sentence of an error on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"
