"""Where the sequences lie, as the kernels read it: rows [start, start + length) of a (rows, width) tensor each.

Work is cut into chunks of at most `CHUNK` rows that never cross a sequence. The chunks' table is made on the device
without looking at it, from an upper bound of their number; chunks beyond the last row are empty.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling import ragged_landmark_indices

CHUNK = 1024


class Sequences(NamedTuple):
    """The tables that all kernels share; int64 throughout, so that no product of sizes overflows."""

    starts: Tensor  # (B,) first row of each sequence
    lengths: Tensor  # (B,)
    first_chunk: Tensor  # (B + 1,) chunks of sequence b: first_chunk[b] … first_chunk[b + 1]
    chunk_sequence: Tensor  # (chunks,)
    chunk_start: Tensor  # (chunks,) first row
    chunk_end: Tensor  # (chunks,) one past the last row
    single: bool = False  # every sequence has exactly one chunk


def _tables(starts: Tensor, lengths: Tensor, chunks: int) -> Sequences:
    last_chunk = ((lengths + CHUNK - 1) // CHUNK).cumsum(0)  # one past it
    first_chunk = torch.nn.functional.pad(last_chunk, (1, 0))
    chunk = torch.arange(chunks, device=starts.device)
    # Not in a slice of `first_chunk`: compiled for a GPU, the search would forget where the slice begins
    # (pytorch/pytorch#182343).
    sequence = torch.searchsorted(last_chunk, chunk, right=True).clamp(max=starts.shape[0] - 1)
    start = starts[sequence] + (chunk - first_chunk[sequence]) * CHUNK
    end = torch.minimum(start + CHUNK, starts[sequence] + lengths[sequence])
    return Sequences(starts, lengths, first_chunk, sequence, start, torch.maximum(end, start))


def uniform(batch: int, length: int, device: torch.device) -> Sequences:
    """Sequences of one length, row after row."""
    if torch.compiler.is_compiling():
        return _uniform(batch, length, device)
    return _cached_uniform(batch, length, device)


def _uniform(batch: int, length: int, device: torch.device) -> Sequences:
    if 0 < length <= CHUNK:
        return _chunk_each(batch, length, device)
    each = -(-length // CHUNK)  # chunks of a sequence
    first, chunk = torch.arange(batch + 1, device=device), torch.arange(batch * each, device=device)
    sequence = chunk // max(each, 1)
    start = sequence * length + (chunk - sequence * each) * CHUNK
    ends = torch.minimum(start + CHUNK, (sequence + 1) * length)
    starts = first[:-1] * length
    return Sequences(starts, torch.full_like(starts, length), first * each, sequence, start, ends, length <= CHUNK)


def _chunk_each(batch: int, length: int, device: torch.device) -> Sequences:
    """One chunk for each sequence: all tables are rows of one tensor, as compiled each would cost a launch."""
    # An even width: every row begins at a whole 16 bytes, whatever the batch, and no kernel is compiled anew.
    i, row = torch.arange(batch // 2 * 2 + 2, device=device)[None], torch.arange(4, device=device)[:, None]
    number, start, end, lengths = torch.where(
        row == 0, i, torch.where(row == 3, length, (i + torch.where(row == 2, 1, 0)) * length)
    ).unbind()
    first, start, end = number[: batch + 1], start[:batch], end[:batch]
    return Sequences(start, lengths[:batch], first, first[:-1], start, end, True)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a pass that trains may take up what one that does not has made
def _cached_uniform(batch: int, length: int, device: torch.device) -> Sequences:
    return _uniform(batch, length, device)


def padded(lengths: Tensor, chunk_end: Tensor, width: int) -> Sequences:
    """Sequence b in the first lengths[b] of its `width` rows; as many chunks for each, the last ones perhaps empty.

    lengths and chunk_end: as `rows.compact` finds them.
    """
    return uniform(lengths.shape[0], width, lengths.device)._replace(lengths=lengths, chunk_end=chunk_end)


def packed(cu_seqlens: Tensor, total: int) -> Sequences:
    """Sequences one after the other without padding."""
    bounds = cu_seqlens.long()
    return _tables(bounds[:-1].contiguous(), bounds.diff(), total // CHUNK + bounds.shape[0] - 1)


def landmark_table(sequences: Sequences, landmarks: int, shift: Tensor | None = None) -> Tensor:
    """The row of each landmark in the (rows, width) tensor, (B, n); −1 for an empty sequence."""
    rows = sequences.starts[:, None] + ragged_landmark_indices(sequences.lengths, landmarks, shift)
    return torch.where(sequences.lengths[:, None] > 0, rows, -1)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _cached_landmarks(batch: int, length: int, landmarks: int, device: torch.device) -> Tensor:
    return landmark_table(_uniform(batch, length, device), landmarks)


def uniform_landmarks(batch: int, length: int, landmarks: int, device: torch.device) -> Tensor:
    """`landmark_table` of sequences of one length."""
    if torch.compiler.is_compiling():
        return landmark_table(_uniform(batch, length, device), landmarks)
    return _cached_landmarks(batch, length, landmarks, device)
