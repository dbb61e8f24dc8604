"""Shared set-up: fixed seeds, few threads, and where the optional real data lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1" if not os.path.exists("/dev/nvidiactl") else "0")

import pytest
import torch

# Workers that each take every core slow one another down many times over.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Small arrays that the published research code produced."""
    return Path(__file__).parent / "golden"


sys.path.insert(0, str(Path(__file__).parent / "train"))  # scripts that tests start as processes are also modules


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated archive of time series."""
    import toy

    torch.set_num_threads(1)
    return toy.folder(tmp_path_factory.mktemp("uea"))
