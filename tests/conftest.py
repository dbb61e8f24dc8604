"""Shared set-up: fixed seeds, few threads, and where the optional real data lies."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1" if not os.path.exists("/dev/nvidiactl") else "0")

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Small arrays that the published research code produced."""
    return Path(__file__).parent / "golden"
