"""Fixtures: the results of four processes, computed once for all tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from once import once

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Largest differences from a single process, by case and quantity, of four gloo processes started by torchrun."""
    return json.loads((once(tmp_path_factory, "ranks", _run_ranks) / "differences.json").read_text())


def _run_ranks(place: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    script, out = Path(__file__).with_name("worker.py"), place / "differences.json"
    command = [sys.executable, *launch, str(script), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def alone():
    """A process group with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
