"""Kill a rank of a training at random moments and see whether the run ends as an undisturbed one, by itself.

    python benchmarks/kill_points.py                     # 20 kills, two ranks, DDP and FSDP2 in turn
    python benchmarks/kill_points.py --points 4 --seed 7

Each point: `torchrun --nproc-per-node 2 --max-restarts 3 -m primal_attention train …` on a small made-up set, then
SIGKILL to one of its two processes after a random time, counted from the start of the run's folder. torchrun starts
both again, the run finds its last whole checkpoint, and in the end model.safetensors and metrics.csv must be those of
the undisturbed run, byte for byte. The log goes to results/faults/kill_points.json; the command fails if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primal_attention.data import uea
from primal_attention.data.uea import SeriesData, Split
from primal_attention.utils.provenance import origin

ROOT = Path(__file__).resolve().parents[1]
FLAGS = """
--model.kind modern --model.embed-dim 16 --model.num-heads 2 --model.layers 2 --model.ffn-dim 32 --model.rank 4
--model.landmarks 8 --model.dropout 0.1 --trainer.epochs 3 --trainer.batch-size 8 --trainer.ema 0.9
--trainer.checkpoint-steps 6 --trainer.accelerator cpu --trainer.devices 2 --trainer.no-progress
"""
FILES = ("model.safetensors", "metrics.csv")


def write_data(folder: Path) -> None:
    """Waves of three frequencies, lengths from 20 to 40."""
    rng = np.random.default_rng(0)

    def split(cases: int) -> Split:
        labels = np.arange(cases) % 3
        waves = []
        for label in labels:
            time_ = np.arange(rng.integers(20, 41))[:, None]
            waves.append(np.sin(0.3 * (1 + label) * time_ + rng.uniform(0, 6, 2)))
        return Split(waves, labels.astype(np.int64))

    uea.save_npz(SeriesData("Waves", split(160), split(40), ("a", "b", "c")), folder)


def launch(work: Path, out: Path, strategy: str) -> subprocess.Popen[str]:
    words = ["train", "uea/Waves", *FLAGS.split(), "--trainer.strategy", strategy, "--out", str(out)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "primal_attention.cli.main", *words],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(agent: int) -> dict[int, int]:
    """The processes that a torchrun has started: rank → process."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == agent:
                words = (status.parent / "environ").read_bytes().split(b"\0")
                rank = next(w.removeprefix(b"RANK=") for w in words if w.startswith(b"RANK="))
                found[int(rank)] = int(status.parent.name)
        except (OSError, StopIteration):  # ended while we looked
            continue
    return found


def state_of(out: Path) -> str:
    """How far a run is, in the words of its files."""
    rows = (out / "metrics.csv").read_text().count("\n") - 1 if (out / "metrics.csv").exists() else 0
    partial = " while a file was written" if any(out.rglob("*.partial")) else ""
    return f"{max(rows, 0)} epochs recorded{partial}"


def disturbed(work: Path, out: Path, strategy: str, delay: float, rank: int) -> dict[str, Any]:
    """One training with one kill."""
    process = launch(work, out, strategy)
    while process.poll() is None and not (out / "config.yaml").exists():
        time.sleep(0.01)
    time.sleep(delay)
    victims, when = ranks_of(process.pid), state_of(out)
    killed = rank in victims and process.poll() is None
    if killed:
        os.kill(victims[rank], signal.SIGKILL)
    words, _ = process.communicate(timeout=600)
    row = {"strategy": strategy, "rank": rank, "delay": round(delay, 3), "killed": killed, "when": when}
    return {**row, "exit": process.returncode, "tail": words[-500:] if process.returncode else ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults" / "kill_points.json")
    args = parser.parse_args()
    rng, rows, length = random.Random(args.seed), [], {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_data(work / "data" / "uea")
        for strategy in ("ddp", "fsdp"):
            process = launch(work, work / strategy, strategy)
            while process.poll() is None and not (work / strategy / "config.yaml").exists():
                time.sleep(0.01)
            begun = time.monotonic()
            words, _ = process.communicate(timeout=600)
            if process.returncode:
                print(words, file=sys.stderr)
                return 1
            length[strategy] = time.monotonic() - begun
        tries = 0
        while len(rows) < args.points:
            strategy, tries = ("ddp", "fsdp")[len(rows) % 2], tries + 1
            out = work / f"try-{tries}"
            row = disturbed(work, out, strategy, rng.uniform(0, length[strategy]), rng.randrange(2))
            if not row["killed"]:  # the run was faster than the moment: it proves nothing
                continue
            row["same"] = row["exit"] == 0 and all(
                (out / file).read_bytes() == (work / strategy / file).read_bytes() for file in FILES
            )
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = origin(torch.device("cpu"), f"python benchmarks/kill_points.py --points {args.points} --seed {args.seed}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**about, "seconds_undisturbed": length, "points": rows}
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    fine = sum(row["same"] for row in rows)
    print(f"{fine} of {len(rows)} ended with the same weights")
    return 0 if fine == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
