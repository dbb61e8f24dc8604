"""Short chunks for the tests of the kernels; without Triton none of them is collected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks of 64 rows instead of 1024, so that short sequences have several."""
    import primal_attention.ops.triton.layer  # noqa: F401  (imports all kernels)
    from primal_attention.ops.triton import common

    package = common.__package__
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(package) and hasattr(m, "CHUNK")]:
        monkeypatch.setattr(module, "CHUNK", 64)
    common._cached_uniform_sequences.cache_clear()
    yield 64
    common._cached_uniform_sequences.cache_clear()
