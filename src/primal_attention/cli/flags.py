"""Flags from types: tyro reads a dataclass, and what it complains about becomes one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from primal_attention.utils.errors import RunError

T = TypeVar("T")


def read_device(name: str | None) -> torch.device:
    """The device of a flag; None is the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise RunError(f"--device must be cpu, cuda or cuda:N (got {name!r})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: this machine has no CUDA device that torch can use")
    return device


def parse(kind: type[T], args: Sequence[str], *, prog: str, about: str, default: T | None = None) -> T:
    """An instance of `kind` from command-line words; --help prints `about` and leaves with code 0."""
    try:
        import tyro
    except ImportError:
        raise RunError("the command line needs tyro: pip install 'primal-attention[train]'") from None
    complaint = io.StringIO()
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            # A field without a default is a word in its place, not a flag.
            place = (tyro.conf.PositionalRequiredArgs,)
            return tyro.cli(kind, args=list(args), prog=prog, description=about, config=place, **keywords)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise RunError(one_line(complaint.getvalue(), prog)) from None


def one_line(text: str, prog: str) -> str:
    """The complaint inside tyro's box, without the box."""
    lines = [line.strip(" │|╭╰─╮╯") for line in text.splitlines()]
    lines = [line for line in lines if line and not re.fullmatch(r"[-─]+", line)]
    said: list[str] = []
    for line in lines[1:]:  # the first line is the box's title
        if line.startswith(("Argument helptext", "For full helptext")):
            break
        said.append(line)
    message = re.sub(r"\s+", " ", " ".join(said)) or "the arguments cannot be read"
    message = re.sub(r" Perhaps you meant: (\S+).*", r"; did you mean \1?", message)
    return f"{message} (see {prog} --help)"
