"""Row blocks: how every pass over the data keeps its temporary memory bounded."""

from __future__ import annotations

from collections.abc import Iterator

# 2**24 entries are 128 MiB in float64: large enough for full BLAS speed, small next to the data itself.
BLOCK_ENTRIES = 2**24


def row_blocks(n_rows: int, width: int, *, entries: int = BLOCK_ENTRIES) -> Iterator[slice]:
    """Slices that cover `n_rows` rows, each with at most `entries` numbers when a row has `width` of them."""
    step = max(1, entries // max(1, width))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))
