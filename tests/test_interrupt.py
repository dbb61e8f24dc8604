"""Ctrl-C ends the command with one line and exit code 130; hints name flags and extras that exist."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from primal_attention.utils.errors import EXTRAS, install_hint

pytest.importorskip("lightning")

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


@pytest.mark.parametrize("module", ["difflib", "torch", "lightning", "yaml"])
def test_ctrl_c_while_modules_load(module: str, tmp_path: Path):
    (tmp_path / f"{module}.py").write_text(INTERRUPTING)
    words = ["train", "uea/JapaneseVowels", "--out", str(tmp_path / "run")]
    done = subprocess.run([*COMMAND, *words], env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not (tmp_path / "run").exists()


SERIES = """
import sys
from pathlib import Path
import numpy as np
from primal_attention.data import uea
from primal_attention.data.uea import SeriesData, Split
rng = np.random.default_rng(0)
halves = [Split([rng.standard_normal((9, 2)) for _ in range(n)], np.arange(n, dtype=np.int64) % 2) for n in (16, 8)]
uea.save_npz(SeriesData("Toy", *halves, ("a", "b")), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, "-c", SERIES, str(place)], check=True, timeout=120)
    return place


SMALL = "--model.embed-dim 8 --model.num-heads 2 --model.layers 1 --model.ffn-dim 16 --model.rank 3".split()  # noqa: SIM905
SMALL += "--trainer.accelerator cpu --trainer.no-progress --trainer.epochs 100000".split()  # noqa: SIM905


def test_ctrl_c_in_training_leaves_a_run_that_can_be_resumed(series: Path, tmp_path: Path):
    words = ["train", "uea/Toy", "--data.folder", str(series), "--out", "run", *SMALL]
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "run" / "checkpoints" / "previous.ckpt", process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert (process.returncode, err) == (130, "interrupted; continue with --resume\n")
    assert not (tmp_path / "run" / ".lock").exists()
    assert not list(tmp_path.rglob("*.partial"))


def test_ctrl_c_in_a_table_ends_its_workers(series: Path, tmp_path: Path):
    words = ["table", "uea", "--sets", "Toy", "--data", str(series), "--models", "primal", "--seeds", "1"]
    words += ["--set", "trainer.epochs=100000", "model.embed_dim=8", "model.num_heads=2", "trainer.accelerator=cpu"]
    words += ["model.rank=3", "model.landmarks=4"]
    process = start(words, tmp_path)
    wait_for(tmp_path, process, "last.ckpt")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    err = process.communicate(timeout=30)[1]
    assert (process.returncode, err) == (130, "interrupted\n")
    time.sleep(2)  # multiprocessing's resource tracker ends after the others
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a terminal starts it."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    words = [*COMMAND, *words]
    return subprocess.Popen(words, cwd=folder, env=environment(), start_new_session=True, text=True, **pipes)


def wait_for(place: Path, process: subprocess.Popen[str], name: str | None = None) -> None:
    deadline = time.monotonic() + 90
    while not (place.exists() if name is None else list(place.rglob(name))):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("module", "extra", "expected"),
    [
        ("tyro", None, "primal-attention[train]"),
        ("lightning.pytorch", "train", "primal-attention[train]"),
        ("tyro", "timeseries,report", "primal-attention[timeseries,report]"),
        ("matplotlib", "timeseries,report", "primal-attention[timeseries,report]"),
        ("sklearn", "train", "primal-attention[ksvd]"),
        ("transformers", "train", "primal-attention[hf]"),
        ("tokenizers.models", "language", "primal-attention[language]"),
        ("nothing_known", "train", "nothing_known"),
    ],
)
def test_a_hint_names_the_extra_that_brings_the_package(module: str, extra: str | None, expected: str):
    assert install_hint(module, extra).replace("'", "") == f"pip install {expected}"


def test_every_extra_of_the_hints_declares_its_package():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    names = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "mujoco": "gymnasium[mujoco]"}
    for module, extra in EXTRAS.items():
        (declared,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert f'"{names.get(module, module)}' in declared, module
