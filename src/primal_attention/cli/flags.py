"""Command-line arguments: argparse for short lists, tyro for dataclasses; errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from primal_attention.utils.errors import RunError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `RunError`."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """Return a count of at least 1, as the type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return int(text)


def parse(default: T, args: Sequence[str], *, prog: str, about: str) -> T:
    """Return a dataclass as command-line arguments change it; --help prints `about` and exits with code 0."""
    import tyro

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(type(default), args=list(args), prog=prog, description=about, default=default)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise RunError(_one_line(output.getvalue(), prog)) from None


def read_device(name: str | None) -> torch.device:
    """Return the device of a flag; None is the GPU if there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise RunError(f"--device must be cpu, cuda or cuda:N (got {name!r})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: this machine has no CUDA device that torch can use")
    return device


def _one_line(text: str, prog: str) -> str:
    """Return the message inside tyro's box."""
    lines = [line.strip(" │|╭╰─╮╯") for line in text.splitlines()]
    lines = [line for line in lines if line and not re.fullmatch(r"[-─]+", line)]
    message: list[str] = []
    for line in lines[1:]:  # the first line is the title of the box
        if line.startswith(("Argument helptext", "For full helptext")):
            break
        message.append(line)
    joined = re.sub(r"\s+", " ", " ".join(message)) or "the arguments cannot be read"
    joined = re.sub(r" Perhaps you meant: (\S+).*", r"; did you mean \1?", joined)
    return f"{joined} (see {prog} --help)"
