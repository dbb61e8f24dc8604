"""The command `primal`. This file only finds the function behind a command's name; the work is done elsewhere.

Exit code 0, or 2 with one line on stderr for what the user can mend.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from primal_attention.__main__ import interrupt
from primal_attention.utils.errors import install_hint


@dataclass(frozen=True)
class Command:
    """Where a command lives ("module:function", loaded when asked for), what it does, and the extra it needs."""

    target: str
    about: str
    extra: str = "train"

    def load(self) -> Callable[[Sequence[str]], int]:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


COMMANDS = {
    "demo": Command(
        "primal_attention.cli.demo:main", "train on real data and look at it, two minutes", "timeseries,report"
    ),
    "train": Command("primal_attention.cli.train:train", "train a recipe"),
    "evaluate": Command("primal_attention.cli.train:evaluate", "measure a finished run again"),
    "generate": Command("primal_attention.cli.generate:main", "text from a language run", "language"),
    "recipes": Command("primal_attention.cli.train:recipes", "list the recipes"),
    "table": Command(
        "primal_attention.cli.table:main", "run a table of the paper, and show it beside ours", "train,report"
    ),
    "data": Command("primal_attention.cli.data:main", "make sets of Long-Range Arena"),
    "bench": Command("primal_attention.cli.bench:main", "time attention layers on this machine", "report"),
    "spectrum": Command(
        "primal_attention.cli.spectrum:main", "how fast the attention's singular values fall", "train,report"
    ),
    "report": Command("primal_attention.cli.report:main", "one HTML page of runs, to look at", "train,report"),
    "info": Command("primal_attention.cli.info:main", "versions, devices, which backend runs here and why, extras"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: primal COMMAND …", "", *lines, "", "primal COMMAND --help says more.", "Example: primal demo"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what a user can mend is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no Greek shows a question mark
            stream.reconfigure(errors="replace")
    name, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        from primal_attention import __version__

        print(__version__)
        return 0
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return fail(f"no command is called {name!r}: {hint}primal --help lists them")
    warnings.showwarning = _one_line_warning
    resume = "; continue with --resume" if name == "train" else ""
    try:
        with one_line_interrupts():
            return call(command, name, args, resume)
    except KeyboardInterrupt:
        print(f"interrupted{resume}", file=sys.stderr)
        return 130


def call(command: Command, name: str, args: Sequence[str], resume: str) -> int:
    """Load and run a command; errors of its input become one line."""
    try:
        run = command.load()
        from primal_attention.utils.errors import DataError, Preempted, RunError
    except ModuleNotFoundError as missing:
        return fail(f"primal {name} needs {missing.name}: {install_hint(missing.name, command.extra)}")
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except (RunError, DataError) as error:
        return fail(str(error))
    except ModuleNotFoundError as missing:
        return fail(f"primal {name} needs {missing.name}: {install_hint(missing.name, command.extra)}")
    except Preempted as stop:
        print(f"primal: {stop}{resume}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)  # the scheduler waits a few seconds only, and everything is saved
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # standard output is a file
            with contextlib.suppress(OSError, ValueError):  # drop its buffer, which Python would write again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return fail(f"the output cannot be written ({error.strerror})")
        if not isinstance(error.filename, (str, os.PathLike)):
            raise
        return fail(file_trouble(error))


@contextlib.contextmanager
def one_line_interrupts() -> Iterator[None]:
    """Handle Ctrl-C by `interrupt`, also where the command is called from Python."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN):
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def file_trouble(error: OSError) -> str:
    """What stands in the way on the disk: a path, and what is the matter with it."""
    path = Path(error.filename)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        file = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{file} is a file where a folder is needed"
    return f"{path} cannot be read or written ({error.strerror})"


def fail(message: str) -> int:
    print(f"primal: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _one_line_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"primal: note: {message}", file=file or sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
