"""SIGTERM, a scheduler's way to say that the machine is needed: save where the training stands, then leave with 143.

The signal only leaves a note. Processes agree on it between two batches, because a checkpoint needs all of them: a
process that stopped alone would leave the others waiting in a reduction.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

CODE = 128 + signal.SIGTERM  # 143, as a shell reports it


class Notice:
    """Whether the processes of this run were asked to stop."""

    def __init__(self) -> None:
        self.here = False
        self._before: Any = None

    def listen(self) -> None:
        """From now on a SIGTERM is a note. Signals reach the main thread alone: elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def rest(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.here = True

    def anywhere(self, device: torch.device) -> bool:
        """Whether any process has the note; all of them must ask at the same moment."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return self.here
        note = torch.tensor([float(self.here)], device=device)
        distributed.all_reduce(note, op=distributed.ReduceOp.MAX)
        return bool(note.item())


@contextlib.contextmanager
def leave_at_once() -> Iterator[None]:
    """Outside of a training there is nothing to save that is not saved: a SIGTERM ends the command with 143."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(CODE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
