"""Tile sizes: a bounded table that no length of sequence enlarges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from primal_attention.ops.backends import FUSED_DTYPES
from primal_attention.ops.kernels import config, sequences
from primal_attention.ops.kernels.config import Tiles, running_tiles, stored_rank, tiles

EVERY = [(dtype, head_dim, rank) for dtype in FUSED_DTYPES for head_dim in range(1, 257) for rank in range(1, 257)]


@pytest.mark.parametrize("choose", [tiles, running_tiles])
def test_few_tile_sizes_serve_all_widths_and_ranks(choose: Callable[..., Tiles]) -> None:
    """What a compiled kernel depends on beside the layer's own sizes."""
    assert len({choose(*case) for case in EVERY}) <= 64


@pytest.mark.parametrize("choose", [tiles, running_tiles])
def test_tiles_cover_the_head_and_the_rank(choose: Callable[..., Tiles]) -> None:
    for dtype, head_dim, rank in EVERY:
        size = choose(dtype, head_dim, rank)
        assert size.width >= head_dim
        assert size.rank * (size.rank_blocks - 1) < stored_rank(rank) <= size.rank * size.rank_blocks
        # Triton multiplies blocks of powers of two of at least 16.
        assert all(side >= 16 and side & (side - 1) == 0 for side in (size.tokens, size.width, size.rank))
        assert sequences.CHUNK % size.tokens == 0


def test_stored_rows_are_whole_lanes() -> None:
    assert [stored_rank(rank) for rank in (1, 8, 9, 30, 96)] == [8, 8, 16, 32, 96]


@pytest.mark.parametrize(("allowed", "expected"), [(False, ("ieee", "ieee")), (True, ("tf32x3", config.QUICK))])
def test_float32_products_are_exact_unless_the_user_allows_tf32(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(config, "INTERPRETED", False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        assert (config.precision(torch.float32), config.quick_precision(torch.float32)) == expected
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
