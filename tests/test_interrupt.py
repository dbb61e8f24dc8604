"""Ctrl-C and SIGTERM end the command with one line and exit code 130 or 143."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy

COMMAND = [sys.executable, "-m", "primal_attention"]
# A compiled module turns the exception of a signal handler into an ImportError.
INTERRUPTING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass
except BaseException as error:
    raise ImportError("initialization failed") from error
"""


@pytest.fixture(autouse=True)
def _children_receive_sigint() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and its children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def environment(*paths: Path) -> dict[str, str]:
    places = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}


@pytest.mark.parametrize("module", ["difflib", "torch"])
def test_ctrl_c_while_modules_load(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    words = ["train", "uea/JapaneseVowels", "--out", str(tmp_path / "run")]
    done = subprocess.run([*COMMAND, *words], env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not (tmp_path / "run").exists()


def interrupt(words: list[str], folder: Path, file: str, number: int, seconds: float = 30) -> tuple[int, str]:
    """Start the command in a process group of its own, and send a signal once `file` exists.

    A terminal sends SIGINT to the group; a scheduler sends SIGTERM to the first process.
    """
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=folder, env=environment(), start_new_session=True, text=True, **pipes
    )
    deadline = time.monotonic() + 90
    while not list(folder.rglob(file)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    err = process.communicate(timeout=seconds)[1]
    deadline = time.monotonic() + 10  # the resource tracker of multiprocessing ends last
    while group_exists(process.pid):
        assert time.monotonic() < deadline, "a worker still runs"
        time.sleep(0.1)
    return process.returncode, err


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "interrupted; continue with --resume\n"),
        (signal.SIGTERM, 143, r"primal: asked to stop: saved after batch \d of epoch \d+; continue with --resume\n"),
    ],
)
def test_a_signal_ends_training_within_ten_seconds_and_the_run_can_be_resumed(
    number: int, code: int, message: str, toy_folder: Path, tmp_path: Path
) -> None:
    words = ["train", "uea/Toy", "--data.folder", str(toy_folder), "--out", "run", *toy.FLAGS]
    words += ["--trainer.epochs", "100000"]
    returned, err = interrupt(words, tmp_path, "previous.ckpt", number, seconds=10)
    assert returned == code
    assert re.fullmatch(message, err)
    assert not (tmp_path / "run" / ".lock").exists()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGINT, (130, "interrupted; the same command continues\n")),
        (signal.SIGTERM, (143, "primal: asked to stop; the same command continues\n")),
    ],
)
def test_a_signal_in_a_table_ends_its_workers(
    number: int, expected: tuple[int, str], toy_folder: Path, tmp_path: Path
) -> None:
    small = {**toy.SMALL, "trainer.epochs": 100000}
    changes = [f"{name}={value}" for name, value in small.items() if name != "trainer.progress"]
    words = ["table", "uea", "--sets", "Toy", "--data", str(toy_folder), "--models", "primal", "--seeds", "1"]
    assert interrupt([*words, "--set", *changes], tmp_path, "last.ckpt", number) == expected
