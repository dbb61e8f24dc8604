"""Flags of benchmarks on the CPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from primal_attention.cli.bench import read_flags


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Namespace]:
    """Flags of a benchmark on the CPU that writes to a temporary folder."""

    def read(words: str) -> Namespace:
        folder: Path = tmp_path_factory.mktemp("bench")
        args = read_flags([*words.split(), "--device", "cpu", "--out", str(folder)])
        args.seconds = 0.01
        return args

    return read
