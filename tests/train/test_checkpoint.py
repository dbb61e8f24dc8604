"""Files of a run folder: damage is found and reported in one line, and nothing in them is executed."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from faults import assert_same, cut_off

from primal_attention.cli import main as cli
from primal_attention.report.results import read_metrics
from primal_attention.train import checkpoint, loop
from primal_attention.utils import files
from primal_attention.utils.errors import RunError

STEPS = 4  # of an epoch of the toy set


@pytest.fixture(scope="module")
def finished(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "run"
    loop.train(toy.recipe(toy_folder), place)
    return place


@pytest.fixture(scope="module")
def interrupted(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in the third epoch: last.ckpt after the second one, previous.ckpt after the first."""
    place = tmp_path_factory.mktemp("runs") / "run"
    cut_off(toy.recipe(toy_folder), place, step=2 * STEPS + 1)
    assert {p.name for p in (place / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt"}
    return place


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(interrupted, tmp_path / "run")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resave(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's content and write it with a valid checksum."""
    content = checkpoint._read_part(file)
    change(content)
    checkpoint.write_checkpoint(file, content)


# Checkpoints

DAMAGES: dict[str, Callable[[Path], object]] = {
    "one flipped bit": flip,
    "a flipped bit in the checksum": lambda file: file.write_bytes(file.read_bytes()[:-2] + b"x\n"),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "truncated by the checksum": lambda file: os.truncate(file, file.stat().st_size - checkpoint.TRAILER_BYTES),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
    "another file": lambda file: file.write_bytes(b"PK\x03\x04 something else"),
    "a list": lambda file: checkpoint.write_checkpoint(file, [1, 2]),  # type: ignore[arg-type]
    "no optimizer": lambda file: resave(file, lambda content: content.pop("optimizer_states")),
    "no weights": lambda file: resave(file, lambda content: content.pop("state_dict")),
    "no run state": lambda file: resave(file, lambda content: content["run"].clear()),
    "rows of another type": lambda file: resave(file, lambda content: content["run"].update(rows=3)),
}


@pytest.fixture
def shards(run: Path) -> Path:
    """The run's checkpoints as two processes would write them."""
    last = run / "checkpoints" / "last.ckpt"
    for file in (last, last.with_name("previous.ckpt")):
        content = checkpoint.read_checkpoint(file)
        file.unlink()
        for rank in range(2):
            state = {n: {"rows": t.chunk(2)[rank]} if t.ndim == 2 else t for n, t in content["state_dict"].items()}
            checkpoint.write_checkpoint(file / f"rank{rank}.ckpt", {**content, "state_dict": state, "processes": 2})
    return last


SHARD_DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda place: flip(place / "rank1.ckpt"),
    "a part missing": lambda place: (place / "rank1.ckpt").unlink(),
    "the first part missing": lambda place: (place / "rank0.ckpt").unlink(),
    "a part of another model": lambda place: resave(place / "rank1.ckpt", lambda part: part["state_dict"].clear()),
    "no number of processes": lambda place: resave(place / "rank0.ckpt", lambda part: part.pop("processes")),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *SHARD_DAMAGES], ids=lambda name: name.replace(" ", "-"))
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    damage: str, run: Path, interrupted: Path, request: pytest.FixtureRequest
):
    folder = run / "checkpoints"
    if damage in SHARD_DAMAGES:
        request.getfixturevalue("shards")
    last, previous = folder / "last.ckpt", folder / "previous.ckpt"
    (folder / ".last.ckpt.7.partial").mkdir()  # half-written
    apply = {**DAMAGES, **SHARD_DAMAGES}[damage]
    apply(last)
    with pytest.warns(UserWarning, match=r"last\.ckpt.*: continuing from previous\.ckpt") as said:
        place, content = checkpoint.load_newest(folder)  # type: ignore[misc]
    assert len(said) == 1
    assert (place, content["global_step"]) == (previous, STEPS)
    assert not last.exists(), "the next checkpoint would replace the intact one by it"
    previous.rename(last)
    apply(last)
    shutil.copy(interrupted / "checkpoints" / "previous.ckpt", previous)
    flip(previous)
    with pytest.raises(RunError, match=r"no intact checkpoint.*last\.ckpt.*previous\.ckpt"):
        checkpoint.load_newest(folder)
    assert previous.exists()


def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_weights(run: Path, finished: Path, toy_folder: Path):
    flip(run / "checkpoints" / "last.ckpt")
    with pytest.warns(UserWarning, match="its checksum does not match"):
        loop.train(toy.recipe(toy_folder), run, resume=True)
    assert_same(run, finished)
    assert (run / "checkpoints" / "last.ckpt.damaged").exists()


def test_a_checkpoint_of_another_model_is_one_line(run: Path, toy_folder: Path):
    resave(run / "checkpoints" / "last.ckpt", lambda content: content["state_dict"].popitem())
    with pytest.raises(
        RunError, match=r"last\.ckpt does not fit the recipe of its config\.yaml \(.*Missing key"
    ) as caught:
        loop.train(toy.recipe(toy_folder), run, resume=True)
    assert "\n" not in str(caught.value)


def test_shards_hold_what_the_checkpoint_holds(shards: Path, interrupted: Path):
    original = interrupted / "checkpoints" / "last.ckpt"
    state, expected = (checkpoint.read_checkpoint(place)["state_dict"] for place in (shards, original))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


# The lock


HOLD_LOCK = """
import sys
from pathlib import Path
from primal_attention.train import checkpoint
with checkpoint.lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    input()
"""


def test_a_second_process_gets_one_line_until_the_first_one_ends(
    run: Path, toy_folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["train", "uea-modern/Toy", "--out", str(run), "--resume", "--data.folder", str(toy_folder)]
    files_before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(run)], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"locked\n"
        code = cli.main(words)
        other.kill()
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert f"{run} is in use by process {other.pid}" in err
    assert (run / ".lock").exists()
    with checkpoint.lock_folder(run):
        pass
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files_before


def test_a_lock_is_held_once_and_removed(tmp_path: Path):
    place = tmp_path / "a" / "run"
    with checkpoint.lock_folder(place):
        assert (place / ".lock").read_text() == str(os.getpid())
        assert checkpoint.unused_folder(place) == place.with_name("run-2")
        with pytest.raises(RunError, match="in use by process"), checkpoint.lock_folder(place):
            pass
        assert (place / ".lock").exists()
    assert not place.parent.exists(), "a folder in which nothing was written is removed"


def test_the_holder_of_the_lock_removes_partial_files(tmp_path: Path):
    (tmp_path / "checkpoints" / ".previous.ckpt.12.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".last.ckpt.12.partial").touch()
    (tmp_path / ".mine.partial").touch()
    with checkpoint.lock_folder(tmp_path):
        assert sorted(p.name for p in tmp_path.rglob(".*")) == [".lock", ".mine.partial"]


# A full disk


@pytest.mark.parametrize("file", ["config.yaml", "last.ckpt", "metrics.csv", "model.safetensors", "summary.json"])
def test_a_full_disk_is_one_line_and_leaves_no_half_file(
    file: str, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """File systems may report it as late as fsync."""
    place, fsync = tmp_path / "run", os.fsync

    def full(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == f".{file}.{os.getpid()}.partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    words = ["train", "uea-modern/Toy", "--out", str(place), "--data.folder", str(toy_folder), *toy.FLAGS]
    code = cli.main(words)
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{file} (No space left on device): nothing was written" in err
    assert "continue with --resume" in err
    assert not list(place.rglob(".*"))
    assert not list(place.rglob(file))


# Readers: `test_hostile_files.py` damages each file and reads it through the commands


def test_what_the_writers_write_the_readers_read(tmp_path: Path):
    assert read_metrics(tmp_path / "metrics.csv") == {}, "no epoch has ended yet"
    files.write_csv(tmp_path / "metrics.csv", [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "J": -1}])
    expected = {"epoch": [1.0, 2.0], "loss": [0.5, 0.25], "J": [None, -1.0]}
    assert read_metrics(tmp_path / "metrics.csv") == expected
    files.write_json(tmp_path / "a.json", {"command": "primal \udcff"})  # an argument that is not UTF-8
    assert files.read_json(tmp_path / "a.json") == {"command": "primal \udcff"}
