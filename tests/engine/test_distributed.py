"""Two processes on one machine: DDP and FSDP are flags, and both give the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import toy

FLAGS = """
--model.kind modern --model.embed-dim 8 --model.num-heads 2 --model.layers 1 --model.ffn-dim 16
--model.rank 3 --model.landmarks 4 --model.dropout 0 --trainer.epochs 2 --trainer.batch-size 8 --trainer.ema 0.9
--trainer.accelerator cpu --trainer.devices 2 --trainer.no-progress --trainer.no-tensorboard"""


def test_ddp_and_fsdp_train_by_flag_and_agree(tmp_path: Path):
    toy.folder(tmp_path / "data" / "uea")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for strategy in ("ddp", "fsdp"):
        words = ["train", "uea/Toy", *FLAGS.split(), "--trainer.strategy", strategy, "--out", strategy]
        command = [sys.executable, "-m", "primal_attention.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("run folder:") == 1, "only one process speaks"
    assert (tmp_path / "ddp" / "metrics.csv").read_bytes() == (tmp_path / "fsdp" / "metrics.csv").read_bytes()
