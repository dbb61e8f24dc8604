"""Command-line arguments: argparse for short lists, tyro for dataclasses; errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from primal_attention.utils.errors import RunError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `RunError`, with a suggestion for a mistyped flag."""

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"unrecognized arguments: (--\S+)", message)
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [self, *(parser for group in groups for parser in group.choices.values())]
        flags = [name for parser in parsers for name in parser._option_string_actions]
        near = difflib.get_close_matches(flag[1], flags, n=1) if flag else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RunError(f"{message}{hint} (see {self.prog} --help)")


def positive(text: str) -> int:
    """Return a count of at least 1, as the type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return int(text)


def parse(kind: type[T], args: Sequence[str], *, prog: str, about: str, default: T | None = None) -> T:
    """Return an instance of a dataclass from command-line arguments; --help prints `about` and exits with code 0."""
    import tyro

    output = io.StringIO()
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(output):
            config = (tyro.conf.PositionalRequiredArgs,)  # fields without a default are positional
            return tyro.cli(kind, args=list(args), prog=prog, description=about, config=config, **keywords)
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
