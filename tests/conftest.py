"""Shared set-up: fixed seeds, one thread, and small data."""

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1" if not os.path.exists("/dev/nvidiactl") else "0")
# The tensors are tiny: threads would wait for each other. Processes that tests start inherit the limit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would import torch once more

import pytest
import torch

import fast_interpreter

torch.set_num_threads(1)
gc.set_threshold(100_000, 50, 100)  # the default looks through a million objects of imported modules every second

if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"):
    fast_interpreter.install()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _skip_old_objects_in_collections() -> None:
    """Calls of gc.collect() in the library and in torch would look through all objects of imported modules."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of CUDA devices where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


sys.path.insert(0, str(Path(__file__).parent / "train"))  # scripts that tests start as processes are also modules


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated archive of time series."""
    import toy

    return toy.folder(tmp_path_factory.mktemp("uea"))
