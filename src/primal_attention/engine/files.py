"""Write files atomically: to a temporary name in the same folder, flushed to disk, then renamed."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from primal_attention.engine.errors import WriteError


def partial_name(path: Path) -> Path:
    """The temporary name of a file that this process is writing."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None) -> None:
    """Call `write` on a temporary file next to `path` and rename it; the old file stays if anything fails.

    keep: new name of the old file, which is replaced otherwise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_name(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_error(path: Path, error: BaseException) -> WriteError:
    """The error for a file that cannot be written, with the reason that the system gave."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else (str(error).splitlines() or ["?"])[0]
    state = "the previous version is unchanged" if path.exists() else "nothing was written"
    return WriteError(f"cannot write {path} ({reason}): {state}")


def sync_folder(folder: Path) -> None:
    """Flush renames in a folder to disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    # Bytes of an argument that are no text are written as escapes, which JSON and YAML read back.
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with all their columns, in order of first appearance; a missing value is an empty cell."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Tensors as safetensors."""
    from safetensors.torch import save

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})
    write_atomically(path, lambda file: file.write(data))
