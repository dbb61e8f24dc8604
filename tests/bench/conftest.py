"""One thread: the layers are tiny, and threads of a busy machine would wait for each other."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from primal_attention.cli.bench import read_flags


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Namespace]:
    """Flags of a benchmark on the CPU that writes to a temporary folder."""

    def read(words: str) -> Namespace:
        folder: Path = tmp_path_factory.mktemp("bench")
        return read_flags([*words.split(), "--device", "cpu", "--out", str(folder)])

    return read
