"""Errors of the data package, and imports that name the extra of a missing package."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(ValueError):
    """User error about data, with a one-line message that names the file or folder."""


class WriteError(DataError):
    """A file or folder could not be written, for example because the disk is full."""


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
