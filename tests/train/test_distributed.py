"""Two processes train as one does: DDP, FSDP2 and split sequences; stopped and killed runs resume."""

import os
import subprocess
import sys
from pathlib import Path

import many
import pytest
import torch
import toy
from faults import assert_same

from once import once
from primal_attention.train import checkpoint, distributed, loop
from primal_attention.train.checkpoint import export, read_checkpoint, read_weights
from primal_attention.train.config import TrainerConfig
from primal_attention.train.uea import ClassificationModule, UEARecipe
from primal_attention.utils.errors import RunError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
CLOSE = 1e-5  # float32 sums in another order, over a dozen steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings on two ranks, and the same ones in this process."""
    return once(tmp_path_factory, "many", _train_all)


def _train_all(root: Path) -> None:
    many.write_data(root)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, *launch, str(Path(__file__).with_name("many.py")), str(root)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    loop.train(many.series(root), root / "one")
    loop.train(many.text(root), root / "text-one")
    ClassificationModule.ksvd_reduction = "batch"
    try:
        loop.train(many.series(root), root / "one-batch")
    finally:
        ClassificationModule.ksvd_reduction = "sample"


def curves(place: Path) -> dict[str, list[float]]:
    return {key: [row[key] for row in toy.rows(place)] for key in ("loss", "task_loss", "ksvd_loss", "J")}


@pytest.mark.supports("DDP", "cpu")
@pytest.mark.supports("FSDP2", "cpu")
@pytest.mark.supports("context parallelism", "cpu")
@pytest.mark.parametrize(
    ("shared", "alone"),
    [*((way, "one") for way in many.WAYS), ("ddp-batch", "one-batch"), ("text-context", "text-one")],
)
def test_two_ranks_train_as_one(runs: Path, shared: str, alone: str):
    expected = curves(runs / alone)
    for key, values in curves(runs / shared).items():
        assert values == pytest.approx(expected[key], rel=CLOSE, abs=CLOSE), key
    one = read_weights(runs / alone / "model.safetensors")
    for name, weight in read_weights(runs / shared / "model.safetensors").items():
        torch.testing.assert_close(weight.double(), one[name].double(), rtol=1e-3, atol=1e-4)  # Adam divides by √v
    if "batch" in shared:
        assert curves(runs / "one")["ksvd_loss"][0] != pytest.approx(expected["ksvd_loss"][0], rel=1e-3)


def test_stopped_and_killed_ranks_resume_to_the_same_weights(runs: Path):
    assert_same(runs / "ddp-stopped", runs / "ddp")
    assert_same(runs / "fsdp-killed", runs / "fsdp")
    assert not list((runs / "fsdp-killed").rglob("*.partial"))
    assert loop.read_summary(runs / "landmarks")["scores"], "landmarks move where processes share each sequence"


def test_a_sharded_checkpoint_resumes_with_another_number_of_ranks_and_exports(runs: Path):
    place = runs / "fsdp-stopped"
    saved = place / "checkpoints" / "last.ckpt"
    export(saved, runs / "exported.safetensors")
    stored, exported = read_checkpoint(saved)["state_dict"], read_weights(runs / "exported.safetensors")
    assert {f"averaged.{name}" for name in exported} == {name for name in stored if name.startswith("averaged.")}
    assert all(torch.equal(tensor, stored[f"averaged.{name}"]) for name, tensor in exported.items())

    shard = saved / "rank1.ckpt"  # damaged: the run continues from the checkpoint before
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    try:
        with pytest.warns(UserWarning, match=rf"{shard.name} is damaged.*: continuing from previous.ckpt"):
            loop.train(many.series(runs, **many.WAYS["fsdp"]), place, resume=True)
    finally:
        torch.distributed.destroy_process_group()
    for key, values in curves(place).items():
        assert values == pytest.approx(curves(runs / "one")[key], rel=CLOSE, abs=CLOSE), key


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "add --trainer.devices 4"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, "add --trainer.devices 8"),
    ],
)
def test_devices_must_match_the_launcher(monkeypatch: pytest.MonkeyPatch, environment, complaint):
    assert distributed.machines(TrainerConfig(devices=2)) == (2, 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=complaint):
        distributed.machines(TrainerConfig(devices=2))
    with pytest.raises(RunError, match="name it with --out"):
        checkpoint.default_folder("uea/X", UEARecipe(), resume=False)
    if "SLURM_STEP_NUM_NODES" in environment:
        assert distributed.machines(TrainerConfig(devices=8)) == (4, 2)


def test_all_processes_use_the_folder_of_the_main_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(checkpoint.FOLDER, "runs/of/another")  # left by an earlier run of the same process
    folder = checkpoint.default_folder("uea/X", UEARecipe(seed=3), resume=False)
    assert folder == Path("runs/uea/X/primal-seed3")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()  # the main process has begun
    monkeypatch.setenv("RANK", "1")
    assert checkpoint.default_folder("uea/X", UEARecipe(seed=3), resume=False) == folder
