"""Kill a rank of a training at random moments and compare what the run ends with.

    python benchmarks/kill_points.py                     # 20 kills, two ranks, DDP and FSDP2 in turn
    python benchmarks/kill_points.py --points 4 --seed 7

Each point starts `torchrun --nproc-per-node 2 --max-restarts 3 -m primal_attention train …` on a small
generated set and sends SIGKILL to one rank after a random time. torchrun restarts both ranks, and the run resumes from
its last complete checkpoint. model.safetensors and metrics.csv must be those of the undisturbed run, byte for byte.
The log goes to results/faults/kill_points.json. The exit code is 1 if a run differs.
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

from primal_attention.utils.provenance import collect

ROOT = Path(__file__).resolve().parents[1]
FLAGS = """
--model.kind modern --model.embed-dim 16 --model.num-heads 2 --model.layers 2 --model.ffn-dim 32 --model.rank 4
--model.landmarks 8 --model.dropout 0.1 --trainer.epochs 3 --trainer.batch-size 8 --trainer.ema 0.9
--trainer.checkpoint-steps 6 --trainer.accelerator cpu --trainer.devices 2 --trainer.no-progress"""
FILES = ("model.safetensors", "metrics.csv")


def write_data(folder: Path) -> None:
    """Write waves of three frequencies, with lengths from 20 to 40."""
    rng = np.random.default_rng(0)

    def split(samples: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(samples) % 3
        lengths = rng.integers(20, 41, samples)
        waves = [
            np.sin(0.3 * (1 + label) * np.arange(length)[:, None] + rng.uniform(0, 6, 2))
            for label, length in zip(labels, lengths, strict=True)
        ]
        X = np.full((samples, 2, 40), np.nan)
        for row, wave in zip(X, waves, strict=True):
            row[:, : len(wave)] = wave.T
        return X, np.array(["a", "b", "c"])[labels]

    folder.mkdir(parents=True, exist_ok=True)
    for part, samples in (("TRAIN", 160), ("TEST", 40)):
        X, y = split(samples)
        np.savez(folder / f"Waves_{part}.npz", X=X, y=y)


def train(work: Path, out: Path, strategy: str, kill: tuple[float, int] | None = None) -> dict[str, Any]:
    """Run one training; `kill` is the delay in seconds after config.yaml was written, and the rank to kill."""
    words = ["train", "uea/Waves", *FLAGS.split(), "--trainer.strategy", strategy, "--out", str(out)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "primal_attention", *words],
        cwd=work, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    while process.poll() is None and not (out / "config.yaml").exists():
        time.sleep(0.01)
    started, row = time.monotonic(), {"strategy": strategy}
    if kill is not None:
        delay, rank = kill
        time.sleep(delay)
        pid = ranks_of(process.pid).get(rank)
        epochs = (out / "metrics.csv").read_text().count("\n") - 1 if (out / "metrics.csv").exists() else 0
        row |= {"rank": rank, "delay": round(delay, 3), "epochs_recorded": epochs, "killed": pid is not None}
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    tail = output[-500:] if process.returncode else ""
    return {**row, "exit": process.returncode, "tail": tail, "seconds": time.monotonic() - started}


def ranks_of(agent: int) -> dict[int, int]:
    """Return the processes that torchrun has started, by rank."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == agent:
                words = (status.parent / "environ").read_bytes().split(b"\0")
                rank = next(w.removeprefix(b"RANK=") for w in words if w.startswith(b"RANK="))
                found[int(rank)] = int(status.parent.name)
        except (OSError, StopIteration):  # the process has ended
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults" / "kill_points.json")
    args = parser.parse_args()
    rng, rows, tries = random.Random(args.seed), [], 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_data(work / "data" / "uea")
        undisturbed = {strategy: train(work, work / strategy, strategy) for strategy in ("ddp", "fsdp")}
        if any(run["exit"] for run in undisturbed.values()):
            print(json.dumps(undisturbed), file=sys.stderr)
            return 1
        while len(rows) < args.points:
            strategy, tries = ("ddp", "fsdp")[len(rows) % 2], tries + 1
            out = work / f"try-{tries}"
            kill = (rng.uniform(0, undisturbed[strategy]["seconds"]), rng.randrange(2))
            row = train(work, out, strategy, kill)
            if not row["killed"]:  # the run was over before
                continue
            pairs = [(out / file, work / strategy / file) for file in FILES]
            row["same"] = row["exit"] == 0 and all(a.read_bytes() == b.read_bytes() for a, b in pairs)
            rows.append(row)
            print(json.dumps(row), flush=True)
    command = f"python benchmarks/kill_points.py --points {args.points} --seed {args.seed}"
    about = collect(command=command, device=torch.device("cpu"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    seconds = {strategy: run["seconds"] for strategy, run in undisturbed.items()}
    result = {**about, "seconds_undisturbed": seconds, "points": rows}
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    same = sum(row["same"] for row in rows)
    print(f"{same} of {len(rows)} ended with the same weights")
    return 0 if same == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
