"""Run every case on every mesh under torchrun; rank 0 writes the differences as JSON.

torchrun --standalone --nproc-per-node 4 tests/parallel/worker.py differences.json
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

import parallel_cases as cases
import parallel_composed as composed

SIZES = (1, 2, 3, 4)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        mesh = DeviceMesh("cpu", list(range(size)))
        if dist.get_rank() < size:
            torch.manual_seed(size)
            for name, case in cases.of_size(size, mesh):
                torch.manual_seed(0)
                found[f"{size} ranks: {name}"] = attempt(case)
            if size == 2:
                for name, case in composed.on_two(mesh):
                    torch.manual_seed(0)
                    found[name] = attempt(case)
    for name, case in composed.on_four():
        torch.manual_seed(0)
        found[name] = attempt(case)
    everyone: list[dict[str, dict[str, float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(merged(everyone), indent=1, ensure_ascii=False))
    dist.destroy_process_group()


def attempt(case) -> dict[str, float]:
    try:
        return case()
    except Exception as error:  # all ranks fail alike; the test of this case reports it
        traceback.print_exc()
        return {f"{type(error).__name__}: {error}": float("inf")}


def merged(everyone: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the largest difference over the ranks of each case."""
    worst: dict[str, dict[str, float]] = {}
    for found in everyone:
        for name, differences in found.items():
            known = worst.setdefault(name, {})
            for key, value in differences.items():
                known[key] = max(known.get(key, 0.0), value)
    return worst


if __name__ == "__main__":
    main(Path(sys.argv[1]))
