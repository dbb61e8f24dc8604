"""One BLAS thread: the matrices here are small, and threads that wait for each other are slow on a shared machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="session")
def _single_threaded_blas() -> Iterator[None]:
    with threadpool_limits(limits=1, user_api="blas"):
        yield
