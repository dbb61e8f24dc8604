"""A bar where somebody watches and rich is installed; else one line per measurement, for logs."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done, self.start = total, what, 0, time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        return self

    def advance(self, message: str) -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=message)
        else:
            elapsed = time.perf_counter() - self.start
            print(f"[{self.done}/{self.total} {elapsed:5.0f} s] {message}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
