"""A slow fixture that all tests of a run share, computed once even with several processes (pytest-xdist)."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT = 600.0


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` fills; the first process calls it, the others wait."""
    base = factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base  # one folder above the workers' own
    place, done, failed = root / name, root / f"{name}.done", root / f"{name}.failed"
    try:
        place.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + TIMEOUT
        while not done.exists():
            assert not failed.exists(), f"{name} failed in another worker"
            assert time.monotonic() < deadline, f"{name} timed out"
            time.sleep(0.2)
        return place
    try:
        make(place)
    except BaseException:
        failed.touch()
        raise
    done.touch()
    return place
