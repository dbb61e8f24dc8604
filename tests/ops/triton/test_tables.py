"""Sequence tables: every row of every sequence is in exactly one chunk. Tiles cover all sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.primal import FUSED_DTYPES
from primal_attention.ops.triton import common
from primal_attention.ops.triton.bidirectional import score_tiles
from primal_attention.ops.triton.causal_sum import causal_tiles
from primal_attention.ops.triton.common import CHUNK, Sequences, Tiles, stored_rank

LENGTHS = st.lists(st.sampled_from([0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), min_size=1, max_size=5)
CPU = torch.device("cpu")


def check(tables: Sequences, starts: list[int], lengths: list[int]) -> None:
    """The chunks of each sequence, in order and without a gap, are its rows."""
    assert tables.starts.tolist() == starts
    assert tables.lengths.tolist() == lengths
    assert all(table.dtype == torch.int64 for table in tables[:-1])
    bounds = tables.first_chunk.tolist()
    assert len(bounds) == len(lengths) + 1
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        at = start
        for chunk in range(bounds[b], bounds[b + 1]):
            assert tables.chunk_sequence[chunk] == b
            if tables.chunk_end[chunk] == tables.chunk_start[chunk]:
                assert at == start + length, "an empty chunk stands before rows"
                continue
            assert tables.chunk_start[chunk] == at
            assert 0 < tables.chunk_end[chunk] - at <= CHUNK
            at = int(tables.chunk_end[chunk])
        assert at == start + length
    spare = slice(bounds[-1], None)
    assert torch.equal(tables.chunk_start[spare], tables.chunk_end[spare]), "a chunk beyond the last one holds rows"


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS)
def test_packed_sequences_follow_one_another(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    check(common.packed_sequences(bounds.int(), int(bounds[-1])), bounds[:-1].tolist(), lengths)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, spare=st.sampled_from([0, 1, CHUNK]))
def test_padded_sequences_start_at_their_row_of_the_batch(device, lengths: list[int], spare: int) -> None:
    width = max(1, max(lengths) + spare)
    valid = (torch.arange(width) < torch.tensor(lengths)[:, None]).to(device)
    check(common.compact(valid)[2], [b * width for b in range(len(lengths))], lengths)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), shape=st.sampled_from([(1, 1), (3, 7), (2, 1030)]))
def test_valid_tokens_move_to_the_front_in_their_order_and_back(device, seed: int, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    valid = (torch.rand(shape, generator=draw) < 0.6).to(device)
    source, place, tables = common.compact(valid)
    lengths = tables.lengths
    assert torch.equal(lengths, valid.sum(dim=1))
    x = torch.randn(*shape, 5, generator=draw).to(device).masked_fill(~valid[..., None], torch.nan)
    front = common._permute_rows(x, source)
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(front[b, :length], x[b][valid[b]])
    assert not front.isnan().any(), "the tail is zero, whatever stood in the padding"
    assert torch.equal(common._permute_rows(front, place), x.nan_to_num(nan=0.0))


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 2 * CHUNK])
@pytest.mark.parametrize("batch", [1, 3])
def test_uniform_sequences_know_when_each_is_one_chunk(batch: int, length: int) -> None:
    tables = common.uniform_sequences(batch, length, CPU)
    check(tables, [b * length for b in range(batch)], [length] * batch)
    assert tables.is_single_chunk == (length <= CHUNK)
    assert tables.chunk_start.shape[0] == tables.first_chunk[-1], "no spare chunks where the lengths are known"


def test_tables_of_one_length_are_made_once() -> None:
    assert common.uniform_sequences(2, 9, CPU) is common.uniform_sequences(2, 9, CPU)
    assert common.uniform_landmark_table(2, 9, 4, CPU) is common.uniform_landmark_table(2, 9, 4, CPU)


def test_landmarks_are_rows_of_their_own_sequence() -> None:
    tables = common.packed_sequences(torch.tensor([0, 7, 7, 9]), 9)
    table = common.landmark_table(tables, 4)
    assert table.tolist() == [landmark_indices(7, 4).tolist(), [-1] * 4, (7 + landmark_indices(2, 4)).tolist()]
    assert (table.diff(dim=1) >= 0).all(), "equal rows must stand together"


def test_landmarks_of_one_length_are_those_of_the_table() -> None:
    table = common.landmark_table(common.uniform_sequences(3, 11, CPU), 5)
    assert torch.equal(common.uniform_landmark_table(3, 11, 5, CPU), table)


@pytest.mark.parametrize("choose", [score_tiles, causal_tiles])
def test_few_tile_sizes_serve_all_widths_and_ranks(choose: Callable[..., Tiles]) -> None:
    sizes = set()
    for dtype, head_dim, rank in product(FUSED_DTYPES, range(1, 257, 5), range(1, 257, 5)):
        tiles = choose(dtype, head_dim, rank)
        sizes.add(tiles)
        assert tiles.width >= head_dim
        assert tiles.rank * (tiles.rank_blocks - 1) < stored_rank(rank) <= tiles.rank * tiles.rank_blocks
        # Triton multiplies blocks of powers of two of at least 16.
        assert all(side >= 16 and side & (side - 1) == 0 for side in (tiles.tokens, tiles.width, tiles.rank))
        assert CHUNK % tiles.tokens == 0
    assert len(sizes) <= 64
