"""Caches that are made again, and generated sets that are complete or absent."""

import copy
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hostile_data import COMMON, PICKLED, columns, make_listops
from primal_attention.data.lra import listops, pathfinder
from primal_attention.utils.errors import DataError, WriteError

GENERATED = {"listops": listops, "pathfinder": pathfinder}
SIZES = {"train": 7, "valid": 3, "test": 2}


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("part", ["train-tokens.npy", "train-labels.npy", "train.json"])
def test_a_damaged_cache_is_made_again(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_listops(tmp_path)
    monkeypatch.chdir(tmp_path)
    changes = {**COMMON, "missing": Path.unlink}
    if part.endswith(".npy"):
        changes["other-dtype"] = columns(array=lambda a: a.astype(np.float32))
        changes["other-shape"] = columns(array=lambda a: a[:-1])
        changes["other-values"] = columns(array=lambda a: a + 1)
        changes["pickled"] = columns(array=PICKLED)
    expected = copy.deepcopy(listops.load(tmp_path).train)  # not mapped to the file that is damaged
    for name, damage in changes.items():
        damage(tmp_path / ".cache" / part)
        again = listops.load(tmp_path).train
        np.testing.assert_array_equal(again.tokens, expected.tokens, err_msg=name)
        np.testing.assert_array_equal(again.labels, expected.labels, err_msg=name)
        assert again.tokens.dtype == np.uint8
        shutil.rmtree(tmp_path / ".cache")
        listops.load(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".cache", *listops.FILES.values()}, "nothing was executed"


def test_a_source_that_changed_without_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    make_listops(tmp_path)
    listops.load(tmp_path)
    file = tmp_path / "basic_train.tsv"
    times = file.stat()
    file.write_text(file.read_text().replace("[MAX 0 1 ]\t1", "[MIN 0 1 ]\t0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert listops.load(tmp_path).train.labels[0] == 0


@pytest.mark.parametrize("name", GENERATED)
def test_a_killed_set_is_absent_and_the_same_call_makes_it(name: str, tmp_path: Path) -> None:
    module, folder = GENERATED[name], tmp_path / "set"
    complete = tree(module.write(tmp_path / "complete", SIZES, seed=3))
    code = f"""
import os, signal
from primal_attention.data.lra import {name}
os.sync = lambda: os.kill(os.getpid(), signal.SIGKILL)  # all files are written, the folder has no name yet
{name}.write({str(folder)!r}, {SIZES}, seed=3)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    with pytest.raises(DataError, match=f"'primal data {name} --out {folder}'"):
        module.load(folder)
    module.write(folder, SIZES, seed=3)
    assert tree(folder) == complete
    assert {path.name for path in tmp_path.iterdir()} == {"complete", "set"}
    assert [len(split) for split in module.load(folder).splits.values()] == [7, 3, 2]
    with pytest.raises(DataError, match="already holds a set"):
        module.write(folder, SIZES, seed=3)
    other = tree(module.write(tmp_path / "other", SIZES, seed=4))
    assert other.keys() == complete.keys()
    assert other != complete


@pytest.mark.parametrize(("name", "limit"), [("listops", 300), ("pathfinder", 200)])
def test_a_full_disk_is_one_line_and_leaves_nothing(name: str, limit: int, tmp_path: Path) -> None:
    """A limit on the size of files takes the place of the full disk: writing fails in the same call."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(WriteError) as caught:
            GENERATED[name].write(tmp_path / "set", SIZES, seed=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"cannot write {tmp_path / 'set'} ({os.strerror(errno.EFBIG)}): nothing was written"
    assert not list(tmp_path.iterdir())


def test_a_cache_on_a_full_disk_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_listops(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert len(listops.load(tmp_path).train) == 8
    assert not list((tmp_path / ".cache").iterdir())
