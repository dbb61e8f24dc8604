"""The command `primal`: find the function of a command, run it, and turn errors into one line.

Exit code 0, or 2 with one line on stderr for errors that the user can correct.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import primal_attention
from primal_attention.cli.flags import COMMANDS, split_command
from primal_attention.utils.errors import DataError, Preempted, RunError, install_hint

AFTER_INTERRUPT = {
    "train": "; continue with --resume",
    "table": "; the same command continues",
    "data": "; the same command makes the set again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals without Unicode show a question mark
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(primal_attention.__version__)
        return 0
    warnings.showwarning = lambda message, *details, **more: print(f"primal: note: {message}", file=sys.stderr)
    advice = AFTER_INTERRUPT.get("".join(words[:1]), "")
    try:
        name, args = split_command("primal", {name: about for name, (_, about) in COMMANDS.items()}, words, "demo")
        module, _, function = COMMANDS[name][0].partition(":")
        code: int = getattr(importlib.import_module(f"primal_attention.cli.{module}"), function)(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"interrupted{advice}", file=sys.stderr)
        return 130
    except (RunError, DataError) as error:
        return fail(str(error))
    except ModuleNotFoundError as missing:
        return fail(f"primal {name} needs {missing.name}: {install_hint(missing.name)}")
    except Preempted as stop:
        print(f"primal: {stop}{advice}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)  # everything is saved, and schedulers wait a few seconds only
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        sys.stderr.close()
        return 0
    except OSError as error:
        return fail(describe_os_error(error))


def describe_os_error(error: OSError) -> str:
    """Return one line about a file or a full disk; raise errors of other kinds again."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # standard output is a file
        with contextlib.suppress(OSError, ValueError):  # drop its buffer, which Python would write again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"the output cannot be written ({error.strerror})"
    if not isinstance(error.filename, (str, os.PathLike)):
        raise error
    path = Path(error.filename)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        file = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{file} is a file where a folder is needed"
    return f"{path} cannot be read or written ({error.strerror})"


def fail(message: str) -> int:
    print(f"primal: {' '.join(message.split())}", file=sys.stderr)
    return 2
