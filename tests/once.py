"""Something slow that all tests of a run share, made once even where several processes run them (pytest-xdist)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE = 600.0


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled; the first process to ask makes it, the others wait."""
    base = factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base  # one folder above the workers' own
    place, done, failed = root / name, root / f"{name}.done", root / f"{name}.failed"
    try:
        place.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + PATIENCE
        while not done.exists():
            assert not failed.exists(), f"{name} could not be made: see the other worker"
            assert time.monotonic() < deadline, f"{name} was not made in time"
            time.sleep(0.2)
        return place
    try:
        make(place)
    except BaseException:
        failed.touch()
        raise
    done.touch()
    return place
