"""Files that are whole or absent: written beside their place, flushed to disk, then renamed over it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from primal_attention.engine.errors import RunError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write` on a temporary file next to `path` and rename it; the old file stays if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        kept = "the version before it is untouched" if path.exists() else "nothing was written"
        raise RunError(f"cannot write {path} ({reason}): {kept}; free some space and go on with --resume") from error


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


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


def read_weights(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise RunError(f"{path} is missing: the run has not finished; continue it with --resume") from None
    except SafetensorError as error:
        raise RunError(f"{path} is not a safetensors file ({error})") from error
