"""Two processes train as one does: DDP, FSDP2 and split sequences by flag; stopped and killed runs go on."""

from __future__ import annotations

import csv
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import many
import pytest
import torch
import toy

from once import once
from primal_attention.train import distributed, runner
from primal_attention.train.checkpoint import candidates
from primal_attention.train.config import TrainerConfig
from primal_attention.train.readers import read_weights
from primal_attention.train.sharded import Reader, export, read_whole
from primal_attention.train.uea import ClassificationModule
from primal_attention.utils.errors import RunError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# float32 sums in another order, over some dozen steps.
CLOSE = 1e-5


def torchrun(what: str, root: Path, *options: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command = [sys.executable, *launch, str(Path(__file__).with_name("many.py")), what, str(root)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings on two ranks, and the same ones in this process."""
    return once(tmp_path_factory, "many", _train_all)


def _train_all(root: Path) -> None:
    torch.set_num_threads(1)
    toy.folder(root / "data")
    many.write_text(root)
    torchrun("match", root)
    runner.train(many.series(root), root / "one")
    ClassificationModule.ksvd_reduction = "batch"
    try:
        runner.train(many.series(root), root / "one-batch")
    finally:
        ClassificationModule.ksvd_reduction = "sample"
    runner.train(many.text(root), root / "text-one")


def curves(place: Path) -> dict[str, list[float]]:
    with (place / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in ("loss", "task_loss", "ksvd_loss", "J")}


@pytest.mark.parametrize(
    ("shared", "alone"),
    [
        *((way, "one") for way in many.WAYS),
        ("ddp-batch", "one-batch"),
        ("fsdp-batch", "one-batch"),
        ("text-ddp", "text-one"),
        ("text-context", "text-one"),
    ],
)
def test_two_ranks_train_as_one(runs: Path, shared: str, alone: str):
    expected = curves(runs / alone)
    for key, values in curves(runs / shared).items():
        assert values == pytest.approx(expected[key], rel=CLOSE, abs=CLOSE), key
    one = read_weights(runs / alone / "model.safetensors")
    for name, weight in read_weights(runs / shared / "model.safetensors").items():
        torch.testing.assert_close(weight.double(), one[name].double(), rtol=1e-3, atol=1e-4)  # Adam divides by √v


def test_the_reductions_differ(runs: Path):
    assert curves(runs / "one")["ksvd_loss"][0] != pytest.approx(curves(runs / "one-batch")["ksvd_loss"][0], rel=1e-3)


def test_a_run_that_one_rank_was_asked_to_stop_goes_on_to_the_same_weights(runs: Path):
    for file in ("model.safetensors", "metrics.csv"):
        assert (runs / "ddp-stopped" / file).read_bytes() == (runs / "ddp" / file).read_bytes()


def test_a_sharded_checkpoint_goes_on_with_another_number_of_ranks_and_exports(runs: Path):
    place = runs / "fsdp-stopped"
    saved, before = candidates(place / "checkpoints")
    assert saved.is_dir()
    export(saved, runs / "exported.safetensors")
    averaged = {n.removeprefix("averaged."): t for n, t in read_whole(saved)["state_dict"].items() if "averaged." in n}
    exported = read_weights(runs / "exported.safetensors")
    assert exported.keys() == averaged.keys()
    assert all(torch.equal(exported[n], averaged[n]) for n in averaged)

    shard = saved / "__1_0.distcp"  # damaged, so that the run continues from the checkpoint before
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    script = "import sys, many, pathlib; from primal_attention.train import runner; root = pathlib.Path(sys.argv[1]);"
    script += "runner.train(many.series(root, **many.WAYS['fsdp']), root / 'fsdp-stopped', resume=True)"
    command = [sys.executable, "-c", script, str(runs)]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"the checksum of {shard.name} does not match): continuing from {before.name}" in done.stderr
    for key, values in curves(place).items():
        assert values == pytest.approx(curves(runs / "one")[key], rel=CLOSE, abs=CLOSE), key


def test_a_killed_rank_restarts_the_run_from_its_last_checkpoint(runs: Path):
    torchrun("kill", runs, "--max-restarts", "2")
    for file in ("model.safetensors", "metrics.csv"):
        assert (runs / "fsdp-killed" / file).read_bytes() == (runs / "fsdp" / file).read_bytes()
    assert not list((runs / "fsdp-killed").rglob("*.partial"))


def test_a_half_written_checkpoint_is_never_taken(tmp_path: Path):
    (tmp_path / ".000003.sharded.7.partial").mkdir()
    (tmp_path / ".000003.sharded.7.partial" / "rest.pt").write_bytes(b"")
    (tmp_path / ".last.ckpt.7.partial").write_bytes(b"half")
    assert candidates(tmp_path) == []
    (tmp_path / "000002.sharded").mkdir()
    assert candidates(tmp_path) == [tmp_path / "000002.sharded"]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("torch", "os.system"), ("torch.distributed.checkpoint.metadata", "os.system")],
    ids=["by its name", "by way of torch", "by way of a module that an index names"],
)
def test_an_index_that_names_code_is_refused(tmp_path: Path, module: str, name: str):
    def word(text: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(text.encode())]) + text.encode()

    (tmp_path / "000001.sharded").mkdir()
    (tmp_path / "000001.sharded" / ".metadata").write_bytes(
        pickle.PROTO + b"\x04" + word(module) + word(name) + pickle.STACK_GLOBAL
        + word(f"touch {tmp_path}/ran") + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    )  # fmt: skip
    with pytest.raises(RunError, match="no place in a checkpoint's index"):
        Reader(tmp_path / "000001.sharded").read_metadata()
    assert not (tmp_path / "ran").exists()


def test_an_index_that_is_something_else_is_one_line(tmp_path: Path):
    place = tmp_path / "000001.sharded"
    place.mkdir()
    (place / ".metadata").write_bytes(pickle.dumps({1: 2}))
    with pytest.raises(RunError, match="its index is a dict"):
        Reader(place).read_metadata()


def test_a_run_stopped_by_sigterm_at_any_moment_ends_with_the_same_weights(tmp_path: Path):
    script = Path(__file__).with_name("stopped.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all(line.endswith(": same") for line in lines), done.stdout + done.stderr


def test_sigterm_ends_the_command_with_143_within_ten_seconds(tmp_path: Path):
    toy.folder(tmp_path / "data" / "uea")
    words = "--model.embed-dim 8 --model.num-heads 2 --model.rank 3 --model.landmarks 4 --trainer.epochs 100000"
    words += " --trainer.accelerator cpu --trainer.no-progress --trainer.no-tensorboard --out run"
    command = [sys.executable, "-m", "primal_attention", "train", "uea/Toy", *words.split()]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    saved = tmp_path / "run" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 90
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - asked < 10
    assert "asked to stop: saved" in words
    assert "--resume" in words


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "add --trainer.devices 4"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, "add --trainer.devices 8"),
    ],
)
def test_a_launcher_with_another_number_of_processes_is_told_so(monkeypatch, environment, complaint):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=complaint):
        distributed.machines(TrainerConfig(devices=2))
    with pytest.raises(RunError, match="name it with --out"):
        distributed.agree_on_folder(Path("x"), named=False)


def test_machines_are_counted_from_the_launcher(monkeypatch):
    assert distributed.machines(TrainerConfig(devices=2)) == (2, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert distributed.machines(TrainerConfig(devices=8)) == (4, 2)


def test_context_must_divide_the_devices():
    with pytest.raises(RunError, match=r"trainer.context must divide trainer.devices \(got 2 and 3\)"):
        TrainerConfig(devices=3, context=2)


def test_a_folder_that_is_named_is_every_process_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever an earlier run in the same shell or process left in the environment."""
    monkeypatch.setenv(distributed.FOLDER, "runs/of/another")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert distributed.agree_on_folder(tmp_path, named=True) == tmp_path
    assert distributed.agree_on_folder(tmp_path, named=False) == Path("runs/of/another")
