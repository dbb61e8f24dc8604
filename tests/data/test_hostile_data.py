"""Damaged data files of every kind: one DataError line that names the file, nothing executed, nothing written."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hostile_data import GENERIC, KINDS, damages, object_array, run_and_kill, write_listops
from primal_attention.cli import main as cli
from primal_attention.data import d4rl, lm, storage, uea
from primal_attention.data import image as images
from primal_attention.data.lra import image as pixels
from primal_attention.data.lra import listops, pathfinder, retrieval
from primal_attention.data.lra import text as reviews
from primal_attention.utils.errors import DataError, WriteError

ROOT = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content; caches may be written at any time and are left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if ".cache" not in path.parts
    }


@pytest.mark.parametrize("name", KINDS)
def test_every_damage_of_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)
    (tmp_path / "valid").mkdir()
    kind.write(tmp_path / "valid")
    kind.load(tmp_path / "valid")
    for damage, apply in damages(kind).items():
        folder = tmp_path / damage
        folder.mkdir()
        apply(kind.write(folder))
        before = tree(folder)
        with pytest.raises(DataError) as caught:  # noqa: PT012
            kind.load(folder)
            pytest.fail(f"{damage}: no error")
        message = str(caught.value)
        assert str(folder) in message, damage
        assert "\n" not in message, damage
        assert len(message) < 600, damage
        assert "unsafe" not in message, "no advice to unpickle"
        assert tree(folder) == before, damage


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].command])
def test_the_command_fails_with_one_line(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    kind = KINDS[name]
    for package in ("lightning", "tyro", *kind.needs):
        pytest.importorskip(package)
    folder, work = tmp_path / "set", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for damage in ("random-bytes", "no folder"):
        folder.mkdir()
        file = kind.write(folder)
        GENERIC[damage](file) if damage in GENERIC else shutil.rmtree(folder)
        assert cli.main([*kind.command, str(folder)]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("primal: ")
        assert errors.count("\n") == 1
        assert str(folder) in errors
        assert not list(work.iterdir()), "no run folder is left"
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("part", ["train-tokens.npy", "train-labels.npy", "train.json"])
def test_a_damaged_cache_is_made_again(part: str, tmp_path: Path) -> None:
    write_listops(tmp_path)
    file = tmp_path / ".cache" / part
    changes = dict(GENERIC)
    if part.endswith(".npy"):
        changes |= {
            "other-dtype": lambda file: np.save(file, np.load(file).astype(np.float32)),
            "other-shape": lambda file: np.save(file, np.load(file)[:-1]),
            "other-values": lambda file: np.save(file, np.load(file) + 1),
            "pickled": lambda file: np.save(file, object_array(file), allow_pickle=True),
        }
    expected = copy.deepcopy(listops.load(tmp_path).train)  # not mapped to the file that is damaged
    for name, damage in changes.items():
        damage(file)
        again = listops.load(tmp_path).train
        np.testing.assert_array_equal(again.tokens, expected.tokens, err_msg=name)
        np.testing.assert_array_equal(again.labels, expected.labels, err_msg=name)
        assert again.tokens.dtype == np.uint8
        assert not (tmp_path / ".cache" / "executed").exists()
        shutil.rmtree(tmp_path / ".cache")
        listops.load(tmp_path)


def test_a_source_that_changed_without_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = write_listops(tmp_path)
    listops.load(tmp_path)
    times = file.stat()
    file.write_text(file.read_text().replace("[MAX 0 1 ]\t1", "[MIN 0 1 ]\t0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert listops.load(tmp_path).train.labels[0] == 0


LOADERS = {
    "uea": (lambda folder: uea.load("JapaneseVowels", folder), "JapaneseVowels_TRAIN.ts"),
    "d4rl": (lambda folder: d4rl.load("hopper-medium", folder), "hopper-medium.hdf5"),
    "listops": (listops.load, "basic_train.tsv"),
    "retrieval": (retrieval.load, "new_aan_pairs.train.tsv"),
    "pathfinder": (pathfinder.load, "metadata/*.npy"),
    "text": (reviews.load, "train.parquet"),
    "pixels": (pixels.load, "train_images.npy"),
    "images": (images.load, "train/CLASS/*.jpg"),
    "lm": (lm.load, "wiki.train.tokens"),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_folder_without_the_set_is_an_error_that_names_folder_and_layout(loader: str, tmp_path: Path) -> None:
    load, layout = LOADERS[loader]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(DataError) as caught:
            load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert layout in str(caught.value)


# Interrupted and failed writing

SIZES = ("--train", "21", "--valid", "6", "--test", "5", "--seed", "3")
LOAD = {"listops": listops.load, "pathfinder": pathfinder.load}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["primal_attention.cli.data", "primal_attention.cli.main", "tyro", "rich.progress"])


def primal_data(
    name: str, folder: Path, words: Sequence[str] = SIZES, kill_at: int = -1, largest: int = -1
) -> tuple[int, str]:
    """Exit code and stderr of `primal data` in a process of its own; see `run_and_kill`."""
    errors = folder.with_suffix(".stderr")
    arguments = (["data", name, "--out", str(folder), *words], errors, kill_at, largest)
    process = SERVER.Process(target=run_and_kill, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode, errors.read_text()


@pytest.mark.parametrize(("name", "kill_at"), [("listops", 2), ("pathfinder", 4)])
def test_a_killed_set_is_incomplete_and_the_same_command_completes_it(name: str, kill_at: int, tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    complete, folder = tmp_path / "complete", tmp_path / "set"
    assert primal_data(name, complete)[0] == 0
    assert primal_data(name, folder, kill_at=kill_at)[0] == -signal.SIGKILL
    hint = f"{folder} is incomplete.*'primal data {name} --out {folder} --train 21"
    with pytest.raises(DataError, match=hint) as caught:
        LOAD[name](folder)
    assert "\n" not in str(caught.value)
    code, errors = primal_data(name, folder, (*SIZES[:-1], "4"))
    assert code == 2
    assert "holds an interrupted set with other settings" in errors
    image = folder / "imgs" / "0" / "sample_4.png"
    if image.exists():
        image.write_bytes(image.read_bytes()[:50])  # damaged between the two commands
    assert primal_data(name, folder)[0] == 0
    assert tree(folder) == tree(complete)
    assert [len(split) for split in LOAD[name](folder).splits.values()] == [21, 6, 5]


@pytest.mark.parametrize("damage", [name for name in GENERIC if name not in ("folder", "missing")])
def test_a_damaged_marker_still_marks_the_set_as_incomplete(damage: str, tmp_path: Path) -> None:
    write_listops(tmp_path)
    marker = tmp_path / storage.INCOMPLETE
    marker.write_text("{}")
    GENERIC[damage](marker)
    for use in (listops.load, lambda folder: listops.write(folder, train=1, valid=1, test=1)):
        with pytest.raises(DataError, match=r"incomplete\.json: not the marker of an interrupted set: rem") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "limit"), [("listops", 300), ("pathfinder", 200)])
def test_a_full_disk_is_one_line_and_leaves_no_partial_file(name: str, limit: int, tmp_path: Path) -> None:
    """A limit on the size of files takes the place of the full disk: writing fails in the same call."""
    pytest.importorskip("tyro")
    pytest.importorskip("resource")
    folder = tmp_path / "set"
    code, errors = primal_data(name, folder, largest=limit)
    assert code == 2
    assert errors.count("\n") == 1
    assert f"cannot write {folder}" in errors
    assert os.strerror(errno.EFBIG) in errors
    assert {p.name for p in folder.rglob("*") if p.is_file()} <= {storage.INCOMPLETE}
    assert primal_data(name, folder)[0] == 0
    LOAD[name](folder)


def test_a_cache_on_a_full_disk_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_listops(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert len(listops.load(tmp_path).train) == 8
    assert not list((tmp_path / ".cache").iterdir())
    with pytest.raises(WriteError, match="No space left on device"):
        uea.save_npz(uea.SeriesData("Toy", *[uea.Split([np.zeros((2, 1))], np.zeros(1, int))] * 2, ("a",)), tmp_path)
    assert not list(tmp_path.glob("*Toy*"))
