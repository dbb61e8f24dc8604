"""A slow fixture that all tests of a run share, computed once even with several processes (pytest-xdist)."""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` fills; the first process calls it, the others wait."""
    base = factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base  # one folder above the workers' own
    place, done = root / name, root / f"{name}.done"
    with FileLock(root / f"{name}.lock", timeout=600):
        if not done.exists():
            place.mkdir()  # raises if `make` has failed in another process
            make(place)
            done.touch()
    return place
