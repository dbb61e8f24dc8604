"""Command-line arguments: argparse with errors of one line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from primal_attention.utils.errors import RunError, check_name

if TYPE_CHECKING:
    import torch

DEVICE = "cpu, cuda or cuda:N (default: the GPU if there is one)"


class Parser(argparse.ArgumentParser):
    """The arguments of `primal COMMAND`. Errors are a `RunError`."""

    def __init__(self, command: str, about: str, example: str = "") -> None:
        epilog = f"Example: primal {command} {example}"
        super().__init__(prog=f"primal {command}", description=about, epilog=epilog)

    def flag(self, name: str, help: str, **options: Any) -> None:
        """Add an argument; one that is off by default needs its name and help only."""
        is_switch = name.startswith("--") and not options
        self.add_argument(name, help=help, **{"action": "store_true"} if is_switch else options)

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def split_command(
    prog: str, commands: Mapping[str, str], words: Sequence[str], example: str
) -> tuple[str, Sequence[str]]:
    """Return the first word, which names one of several commands, and the others; --help lists the commands."""
    name, *others = words or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {command:<{width}}  {about}" for command, about in commands.items()]
        ending = [f"{prog} COMMAND --help describes a command.", f"Example: {prog} {example}"]
        print("\n".join([f"usage: {prog} COMMAND …", "", *lines, "", *ending]))
        raise SystemExit(0)
    check_name(name, commands, f"command of {prog}")
    return name, others


def positive(text: str) -> int:
    """Return a count of at least 1, as the type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return int(text)


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
