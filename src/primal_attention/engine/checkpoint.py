"""Checkpoints that survive: written whole or not at all, and read without running any code that is inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from primal_attention.engine.errors import RunError
from primal_attention.engine.files import write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files through a rename in the same folder, and `weights_only` on the way back."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path), map_location)


def read_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's content: tensors and plain values only, never pickled code."""
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(content, dict) or "callbacks" not in content:
            raise ValueError("it holds something else")
        return content
    except Exception as error:  # torch raises a dozen kinds for a damaged file, some without a word
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"{path} is damaged or no checkpoint of this library ({reason})") from error


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run: one file, or a folder that many processes wrote."""
    single = folder / "last.ckpt"
    if single.is_file():
        return single
    return max(folder.glob("*.sharded"), default=None)


def read_any(path: Path) -> dict[str, Any]:
    """A checkpoint of either kind, read by one process."""
    if path.is_file():
        return read_checkpoint(path)
    from primal_attention.engine.scale.sharded import read_whole

    return read_whole(path)
