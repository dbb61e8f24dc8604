"""Progress on stderr: one line that is rewritten on a terminal, one line per message in a log."""

from __future__ import annotations

import sys
import time


class Progress:
    """Count the steps of a long task, within a `with` block."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done, self.start = total, what, 0, time.perf_counter()
        self.is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def advance(self, message: str | None = None, count: int = 1) -> None:
        """Count steps. Without a message, a log gets no line."""
        self.done += count
        line = f"[{self.done}/{self.total} {time.perf_counter() - self.start:5.0f} s] {message or self.what}"
        if self.is_terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif message is not None:
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
