"""Errors that the user can correct, and the extra that installs a missing package.

Each message is one line that names the cause and what would work.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class RunError(Exception):
    """A recipe, a flag or a run folder is not valid."""


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Preempted(Exception):  # noqa: N818 - not an error
    """The process received SIGTERM and has saved a checkpoint."""


class DataError(ValueError):
    """Data cannot be used; the message names the file or folder."""


class FileError(RunError, DataError):
    """A file or folder cannot be read, or has other content than expected."""


class WriteError(FileError):
    """A file or folder cannot be written, for example because the disk is full."""


def check_name(name: str, known: Iterable[str], noun: str) -> None:
    """Raise a RunError with the nearest known name and all of them if a name is not among them."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RunError(f"no {noun} is called {name!r}: {hint}there are {', '.join(names)}")


# The packages of each extra, by the imported name. A package of several extras is listed under the smallest one.
EXTRAS = {
    "train": "lightning rich safetensors tensorboard tyro yaml",
    "timeseries": "aeon",
    "ksvd": "scipy sklearn",
    "language": "tokenizers",
    "lra": "pyarrow",
    "rl": "gymnasium h5py minari mujoco",
    "vision": "PIL timm torchvision",
    "hf": "accelerate transformers",
    "onnx": "onnx onnxruntime onnxscript",
    "report": "jinja2 matplotlib pandas plotly",
    "ray": "ray",
}
INSTALLED_AS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
INSTALLED_AS |= dict.fromkeys(("gymnasium", "mujoco"), "gymnasium[mujoco]")
# Imported name → the name to install, and its extra.
PACKAGES = {name: (INSTALLED_AS.get(name, name), extra) for extra, all_ in EXTRAS.items() for name in all_.split()}


def install_hint(module: str | None) -> str:
    """Return the command that installs the package of a module whose import failed."""
    package = (module or "").partition(".")[0]
    name, extra = PACKAGES.get(package, (package, None))
    return f"pip install {name}" if extra is None else f"pip install 'primal-attention[{extra}]'"


def import_package(module: str, purpose: str) -> Any:
    """Import a module of an optional package; a missing one is a DataError that names its extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = PACKAGES[module.partition(".")[0]][0]
        raise DataError(f"{purpose} needs {package}: {install_hint(module)}") from None
