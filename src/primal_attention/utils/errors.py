"""Errors that the user can correct, and the extra that installs a missing package.

Each message is one line that names the cause and what would work.
"""

from __future__ import annotations

import importlib
from typing import Any


class RunError(Exception):
    """A recipe, a flag or a run folder is not valid."""


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Preempted(Exception):  # noqa: N818 - not an error
    """The process received SIGTERM and has saved a checkpoint."""


class DataError(ValueError):
    """User error about data, with a one-line message that names the file or folder."""


class WriteError(RunError, DataError):
    """A file or folder cannot be written, for example because the disk is full."""


# Packages that reading some kinds of files needs: the name to install, and the extra that has it.
PACKAGES = {
    "aeon": ("aeon", "timeseries"),
    "h5py": ("h5py", "rl"),
    "minari": ("minari", "rl"),
    "tokenizers": ("tokenizers", "language"),
    "torchvision.transforms.v2": ("torchvision", "vision"),
    "PIL.Image": ("pillow", "vision"),
    "pyarrow.parquet": ("pyarrow", "lra"),
}


def import_package(module: str, purpose: str, otherwise: str = "") -> Any:
    """Import a module of `PACKAGES`; a missing one is a DataError that names its extra."""
    package, extra = PACKAGES[module]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{purpose} needs {package}: pip install 'primal-attention[{extra}]'{otherwise}") from None


# By the name that is imported. A package of several extras is listed under the smallest one.
EXTRAS = {
    "PIL": "vision",
    "accelerate": "hf",
    "aeon": "timeseries",
    "gymnasium": "rl",
    "h5py": "rl",
    "imageio": "rl",
    "jinja2": "report",
    "lightning": "train",
    "markupsafe": "report",
    "matplotlib": "report",
    "minari": "rl",
    "mujoco": "rl",
    "pandas": "report",
    "plotly": "report",
    "ray": "ray",
    "rich": "train",
    "safetensors": "train",
    "scipy": "ksvd",
    "sklearn": "ksvd",
    "tensorboard": "train",
    "timm": "vision",
    "tokenizers": "language",
    "torchvision": "vision",
    "transformers": "hf",
    "tyro": "train",
    "yaml": "train",
}


def install_hint(module: str | None, extra: str | None = None) -> str:
    """The command that installs a missing package.

    Args:
        module: The name whose import failed.
        extra: The extra of the command that needs it, preferred where it brings the package.
    """
    package = (module or "").partition(".")[0]
    own = EXTRAS.get(package)
    if own is None:
        return f"pip install {package}"
    known = {"train": {"train"}, "timeseries": {"timeseries", "ksvd", "train"}, "language": {"language", "train"}}
    brought = {name for part in (extra or "").split(",") for name in known.get(part, {part})}
    return f"pip install 'primal-attention[{extra if own in brought else own}]'"
