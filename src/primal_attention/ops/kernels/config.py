"""Which tile sizes a kernel runs with: a bounded table, so that no length of sequence compiles anything anew."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

QUICK = "rounded"  # where TF32 is allowed, in loops that wait for their products; "tf32x3": as everywhere else
LANE = 8  # scores are stored in rows of a multiple of 8 numbers: whole 16-byte pieces in 16-bit types


INTERPRETED = bool(triton.knobs.runtime.interpret)  # as at import, when the kernels are made


FULL = 288  # programs that fill a large GPU
MULTIPROCESSORS = 132  # of a large GPU


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; in the interpreter as on a large GPU."""
    if INTERPRETED:
        return 227 * 2**10
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


class Tiles(NamedTuple):
    """Sizes that make one specialisation of the score kernels."""

    tokens: int  # rows of a block
    width: int  # head width, rounded up to a power of two
    rank: int  # directions of a block, a power of two
    rank_blocks: int  # how many blocks cover the stored rank
    warps: int
    stages: int = 3  # of a loop's loads in flight
    registers: int | None = None  # most for a thread, where the compiler would take more than pays
    sides: int = 1  # of q and k, that a program holds the sums of
    programs: int = FULL  # among which sequences are split


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)  # Triton's own cdiv costs as much host time as a launch


def power_of_two(value: int, least: int = 16) -> int:
    return max(least, 1 << (value - 1).bit_length())


def stored_rank(rank: int) -> int:
    """The rank as scores are stored: rounded up to a whole number of lanes."""
    return ceil_div(rank, LANE) * LANE


def tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """One choice per (dtype, head width, rank): blocks that keep operands in registers and shared memory."""
    width, full = power_of_two(head_dim), power_of_two(stored_rank(rank))
    block = min(full, 64 if width >= 256 or dtype == torch.float32 else 128)
    tokens = 128 if width * max(block, width) <= 64 * 64 else (64 if width <= 128 else 32)
    if dtype == torch.float32:
        tokens = min(tokens, 64 if width <= 64 else 32)
    return Tiles(tokens, width, block, ceil_div(stored_rank(rank), block), 4 if tokens * width <= 128 * 64 else 8)


def running_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """As `tiles`, for the causal scan: its triangle of tokens × tokens wants short blocks.

    Few warps: measured on an H200, two beat four by a third in the way back, and one beats two forward.
    """
    width, full = power_of_two(head_dim), power_of_two(stored_rank(rank))
    block = min(full, 64 if width <= 128 else 32)
    warps = 2 if width <= 64 and dtype != torch.float32 else 4
    blocks = ceil_div(stored_rank(rank), block)
    return Tiles(32 if width <= 128 else 16, width, block, blocks, warps, 3 if blocks == 1 and width <= 64 else 1)


def landmark_tiles(head_dim: int, rank: int) -> Tiles:
    """For W_{·|X} and its way back to x; `tokens` are landmarks. Blocks of the rank that leave little of it empty."""
    width, stored = power_of_two(head_dim), stored_rank(rank)
    fits = ceil_div(stored, 64) * 64 == ceil_div(stored, 32) * 32 and width <= 128
    block = min(power_of_two(stored), 64 if fits else 32)
    return Tiles(64 if width <= 64 else 32, width, block, ceil_div(stored, block), 4)


def landmark_weight_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """For W_{·|X} itself: all of the rank at once where 16 bits let it fit, so that rows are read once."""
    size = landmark_tiles(head_dim, rank)
    if dtype == torch.float32 or size.width > 64:
        return size
    block = min(power_of_two(stored_rank(rank)), 128)
    return Tiles(32, size.width, block, ceil_div(stored_rank(rank), block), 4) if block > size.rank else size


def landmark_sum_tiles(dtype: torch.dtype, head_dim: int, rank: int, landmarks: int) -> Tiles:
    """For the way back to W, where large tiles spare reading rows and gradients again and again.

    Of a large rank both sides in one program, two of which stand side by side: measured on an H200 (256 sequences, 197
    landmarks, 6 heads of 64, rank 96, bf16) they take 52 µs, a side at a time 66.
    """
    size = landmark_tiles(head_dim, rank)
    if dtype == torch.float32 or size.width > 64:
        return size
    block = min(power_of_two(stored_rank(rank)), 128)
    blocks = ceil_div(stored_rank(rank), block)
    if block == 128:
        return Tiles(64, size.width, block, blocks, 4, stages=2, sides=2, programs=2 * MULTIPROCESSORS)
    return Tiles(128 if landmarks > 64 else 64, size.width, block, blocks, 4)


def wide_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """As `tiles`, for `wide.py`: no rank in the loop over tokens, and blocks of it before and after.

    Measured on an H200 at head width 64, rank 96: 168 registers let three programs stand side by side, 136 → 110 µs.
    """
    size = _wide_blocks(dtype, head_dim, rank)
    if dtype == torch.float32:
        return size
    block = min(64, power_of_two(stored_rank(rank)))
    return size._replace(rank=block, rank_blocks=ceil_div(stored_rank(rank), block), stages=2, registers=168)


def wide_back_tiles(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """As `wide_tiles`, for the way back: in 16 bits all of the rank at once where it fits."""
    size, whole = _wide_blocks(dtype, head_dim, rank), power_of_two(stored_rank(rank))
    return size if dtype == torch.float32 or whole > 128 else size._replace(rank=whole, rank_blocks=1)


def _wide_blocks(dtype: torch.dtype, head_dim: int, rank: int) -> Tiles:
    """Small blocks of the rank; taller blocks of tokens meet the errors of `square.no_sums`.

    In float32 all 255 registers: not told so, ptxas 12.8 finds no fit for some of these kernels and leaves them 32.
    """
    width, block = power_of_two(head_dim), min(32, power_of_two(stored_rank(rank)))
    blocks = ceil_div(stored_rank(rank), block)
    return Tiles(32, width, block, blocks, 8, 1, 255) if dtype == torch.float32 else Tiles(64, width, block, blocks, 4)


def wide_running_tiles(dtype: torch.dtype, head_dim: int, rank: int, decay: bool) -> Tiles:
    """As `wide_tiles`, for the causal scan.

    Four warps let two programs stand side by side where eight leave room for one; products in several passes, and those
    of the decay, would not fit in their registers.
    """
    size = _wide_blocks(dtype, head_dim, rank)
    many = dtype == torch.float32 and (decay or quick_precision(dtype) != "rounded")
    size = size._replace(tokens=32, warps=8 if many or decay else 4, stages=2 if many else 1)
    return size if many else size._replace(registers=None)


def precision(dtype: torch.dtype) -> str:
    """How products are formed: those of float32 exactly, unless the user allowed TF32.

    Then in three passes of it. One would cut the last bits off every operand, and what is a sum of squares, an energy
    for one, would come out a thousandth too small; most kernels wait for memory more than for these products.
    Triton's interpreter cannot multiply bfloat16, which numpy lacks: there it is widened first, and float32 is exact.
    """
    if INTERPRETED:
        return "widened" if dtype == torch.bfloat16 else "ieee"
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32x3"
    return "ieee"


def quick_precision(dtype: torch.dtype) -> str:
    """As `precision`, in loops that wait for their products: one pass of TF32, of operands rounded to the nearest.

    Rounding is right on average where cutting off is not, and what it does to single tokens averages out in their sums.
    """
    found = precision(dtype)
    return QUICK if found == "tf32x3" else found


def fine_precision(dtype: torch.dtype) -> str:
    """As `precision`, where small differences count that the operands' own bits do not hold: three passes of TF32."""
    return precision(dtype) if dtype == torch.float32 else "tf32x3"
