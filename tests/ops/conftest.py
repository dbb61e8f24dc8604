"""Fixtures of the kernel tests: the device, NaN in unwritten memory, rounding to bfloat16, short chunks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from primal_attention.ops import primal

if not primal.HAS_TRITON:
    collect_ignore_glob = ["triton/test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU with Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not primal.HAS_TRITON or not primal.is_interpreting():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return torch.device("cpu")


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill new tensors with NaN, so that elements that a kernel does not write show up in the results."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # required for the filling
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def bfloat16_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round float32 to bfloat16 in Triton's interpreter, as hardware does; it truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    truncate = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        return truncate(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks of 64 rows instead of 1024, so that short sequences have several."""
    import primal_attention.ops.triton.layer  # noqa: F401  (imports all kernels)
    from primal_attention.ops.triton import common

    package = common.__package__
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(package) and hasattr(m, "CHUNK")]:
        monkeypatch.setattr(module, "CHUNK", 64)
    common.uniform_sequences.cache_clear()
    yield 64
    common.uniform_sequences.cache_clear()
