"""Command-line arguments: argparse with errors of one line."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from primal_attention.utils.errors import RunError, check_name

if TYPE_CHECKING:
    import torch

# A command: its "module:function" in this package, which is imported on use, and a summary.
COMMANDS = {
    "demo": ("demo:main", "Train on real data and compare with softmax, two minutes."),
    "train": ("train:train", "Train a recipe."),
    "evaluate": ("train:evaluate", "Measure a finished run on the test set again, or play episodes again (d4rl)."),
    "generate": ("generate:main", "Generate text with a language model."),
    "export": ("export:main", "Write the model of a run as an ONNX file."),
    "recipes": ("train:recipes", "List the recipes."),
    "table": ("table:main", "Run a table of the paper and show its numbers beside ours."),
    "data": ("data:main", "Make data sets of Long-Range Arena."),
    "bench": ("bench:main", "Time attention layers and models on this machine."),
    "spectrum": ("spectrum:main", "Singular values of a model's attention matrices."),
    "report": ("report:main", "Write an HTML page about runs."),
    "info": ("info:main", "Versions, devices, extras, and the backend that runs here and why."),
}
DEVICE = "cpu, cuda or cuda:N (default: the GPU if there is one)"


class Parser(argparse.ArgumentParser):
    """The arguments of `primal COMMAND`: the summary of the command, then `about`. Errors are a `RunError`."""

    def __init__(self, command: str, example: str = "", about: str = "") -> None:
        text = f"{COMMANDS[command][1]} {about}" if command in COMMANDS else about
        epilog = f"Example: primal {command} {example}"
        super().__init__(prog=f"primal {command}", description=text, epilog=epilog, allow_abbrev=False)

    def flag(self, name: str, help: str, **options: Any) -> None:
        """Add an argument; one that is off by default needs its name and help only."""
        is_switch = name.startswith("--") and not options
        self.add_argument(name, help=help, **{"action": "store_true"} if is_switch else options)

    def error(self, message: str) -> NoReturn:
        _, _, unknown = message.partition("unrecognized arguments: ")
        near = difflib.get_close_matches(unknown.partition(" ")[0], self._option_string_actions, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RunError(f"{message}{hint} (see {self.prog} --help)")


def split_command(
    prog: str, commands: Mapping[str, str], words: Sequence[str], example: str
) -> tuple[str, Sequence[str]]:
    """Return the first word, which names one of several commands, and the others; --help lists the commands."""
    name, *others = words or ["--help"]
    if name in ("-h", "--help", "help"):
        ending = f"{prog} COMMAND --help describes a command.\nExample: {prog} {example}"
        raw = argparse.RawDescriptionHelpFormatter
        page = argparse.ArgumentParser(usage=f"{prog} COMMAND …", epilog=ending, formatter_class=raw, add_help=False)
        group = page.add_argument_group("commands")
        for command, about in commands.items():
            group.add_argument(command, help=about)
        page.print_help()
        raise SystemExit(0)
    check_name(name, commands, f"command of {prog}")
    return name, others


def read_integer(text: str, least: int = 0) -> int:
    """Return a whole number of at least `least`, as the type of an argument, for example a seed."""
    if not text.isdecimal() or not least <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, below 2^63 (got {text!r})")
    return int(text)


positive = functools.partial(read_integer, least=1)


def read_device(name: str | None) -> torch.device:
    """Return the device of a flag; None is the GPU if there is one."""
    import torch

    word = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", word):
        raise RunError(f"--device must be cpu, cuda or cuda:N (got {name!r})")
    device = torch.device(word)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"--device {name}: this machine has no CUDA device that torch can use")
    if (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise RunError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    return device
