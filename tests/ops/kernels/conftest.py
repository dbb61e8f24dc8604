"""Where the kernels run, and what makes their mistakes show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from primal_attention.ops import backends

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU through Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not backends.interpreting():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return torch.device("cpu")


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN: a kernel that forgets a corner hands it on."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which torch asks for before it fills
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks of 64 rows instead of 1024, so that short sequences have several."""
    import primal_attention.ops.fused  # noqa: F401  (loads all kernels)
    from primal_attention.ops.kernels import sequences

    holders = [m for name, m in sys.modules.items() if name.startswith(sequences.__package__) and hasattr(m, "CHUNK")]
    for module in holders:
        monkeypatch.setattr(module, "CHUNK", 64)
    sequences._cached_uniform.cache_clear()
    yield 64
    sequences._cached_uniform.cache_clear()


@pytest.fixture
def bfloat16_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off where hardware rounds it to bfloat16: let it round."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        return cut(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
