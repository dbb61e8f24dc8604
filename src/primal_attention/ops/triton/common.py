"""Shared by the kernels of all modes: sequence tables, tile sizes, matrix products, norms and padding.

Rows of all sequences are concatenated in a (rows, width) tensor. Work is split into chunks of at most CHUNK rows
that never cross a sequence boundary; the tables that describe them are built on the device without synchronisation.
Sums over chunks are written as partial sums and added in a fixed order, so that results are bit-reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..feature_maps import EPS, HUGE_NORM, HUGE_SCALE
from ..landmarks import landmark_indices, ragged_landmark_indices

CHUNK = 1024  # rows
LANE = 8  # scores are stored in rows of a multiple of 8 numbers: whole 16-byte pieces in 16-bit types
P = ParamSpec("P")
T = TypeVar("T")
INTERPRETED = bool(triton.knobs.runtime.interpret)
MAX_COMPILED = 4096  # compiled kernels that are cached, by their arguments


class Kernel(triton.JITFunction):  # type: ignore[misc]
    """A kernel whose repeated eager launches look up the compiled kernel themselves.

    Triton binds and inspects every argument at each launch, which takes most of its host time. This lookup key has the
    same effect: Triton specialises on constants, dtypes, integers and the alignment of pointers.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.num_inputs = sum(not parameter.is_constexpr for parameter in self.params)
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.run, grid=grid, warmup=False)

    def run(self, *inputs: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        if warmup or len(inputs) != self.num_inputs or has_launch_hooks():
            return super().run(*inputs, grid=grid, warmup=warmup, **constants)
        device = inputs[0].get_device()
        specialisations = [a if a.__class__ is int else (a.dtype, a.data_ptr() % 16) for a in inputs]
        key = (device, *specialisations, *constants.items())
        if (known := self.compiled.get(key)) is None:
            compiled = super().run(*inputs, grid=grid, warmup=False, **constants)
            if compiled is None:  # a hook has compiled the kernel elsewhere
                return None
            if len(self.compiled) >= MAX_COMPILED:
                self.compiled.clear()
            values = [constants[name] for name in self.arg_names[self.num_inputs :]]
            self.compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, values
            return compiled
        compiled, launch, function, metadata, values = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *inputs, *values)
        return compiled


def has_launch_hooks() -> bool:
    """Return True if Triton calls a function at every launch, for example of a profiler."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def jit_kernel(function: Any) -> Any:
    """Decorate a kernel: `Kernel` with the Triton versions whose launchers take its arguments, else `triton.jit`."""
    is_known = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9) and not INTERPRETED
    return Kernel(function) if is_known else triton.jit(function)


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of sizes: equal calls return the same result. A compiler traces the function itself."""
    # Outside of inference mode, since the tensors are also used in training.
    stored = lru_cache(maxsize=64)(torch.inference_mode(False)(function))
    captured: dict[Any, T] = {}  # CUDA graphs read these tensors at every replay, so they are never freed

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # such as fake tensors
            return function(*args, **keywords)
        result = stored(*args, **keywords)  # type: ignore[arg-type]
        if not INTERPRETED and torch.cuda.is_current_stream_capturing():
            result = captured.setdefault((args, *keywords.items()), result)
        return result

    call.cache_clear = stored.cache_clear  # type: ignore[attr-defined]
    return call


class _NoContext:
    """Takes what `forward` saves where no backward pass follows."""

    @staticmethod
    def save_for_backward(*tensors: object) -> None: ...

    mark_non_differentiable = save_for_backward


def operation(function: Any) -> Any:
    """Return `function.apply`, or its forward alone where no gradients are recorded: a node costs host time."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply
    return partial(function.forward, _NoContext())


def forbid_double_backward() -> None:
    """Raise if a backward pass is to be differentiated again (`create_graph=True`)."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError("a fast path cannot be differentiated twice: build the layer with backend='reference'")


def can_overwrite_saved() -> bool:
    """Return True if this backward pass frees its graph, so that a gradient may overwrite a saved tensor."""
    if torch.compiler.is_compiling():
        return False  # the compiler plans memory itself
    keep_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keep_graph is not None and not keep_graph()


HAS_OUT_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def matmul_to(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`; 16-bit products become float32 without an intermediate rounding where torch can."""
    if HAS_OUT_DTYPE and a.is_cuda and a.dtype != dtype == torch.float32 and not torch.compiler.is_compiling():
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


# Sequence tables


class Sequences(NamedTuple):
    """Tables of the sequences and chunks, int64."""

    starts: Tensor  # (B,), first row of each sequence
    lengths: Tensor  # (B,)
    first_chunk: Tensor  # (B + 1,), chunks of sequence b: first_chunk[b] … first_chunk[b + 1]
    chunk_sequence: Tensor  # (chunks,)
    chunk_start: Tensor  # (chunks,), first row
    chunk_end: Tensor  # (chunks,), one past the last row
    is_single_chunk: bool = False  # every sequence has exactly one chunk


@cached
def uniform_sequences(batch: int, length: int, device: torch.device) -> Sequences:
    """Return the tables of sequences of one length."""
    chunks = max(1, ceil_div(length, CHUNK))  # of each sequence
    sequence, chunk = torch.arange(batch + 1, device=device), torch.arange(batch * chunks, device=device)
    chunk_sequence = chunk // chunks
    start = chunk_sequence * length + (chunk - chunk_sequence * chunks) * CHUNK
    end = torch.minimum(start + CHUNK, (chunk_sequence + 1) * length)
    starts = sequence[:-1] * length
    return Sequences(
        starts, torch.full_like(starts, length), sequence * chunks, chunk_sequence, start, end, length <= CHUNK
    )


def packed_sequences(cu_seqlens: Tensor, total: int) -> Sequences:
    """Return the tables of packed sequences. The number of chunks is an upper bound; chunks at the end may be empty."""
    bounds = cu_seqlens.long()
    starts, lengths = bounds[:-1].contiguous(), bounds.diff()
    last_chunk = ((lengths + CHUNK - 1) // CHUNK).cumsum(0)  # one past it
    first_chunk = torch.nn.functional.pad(last_chunk, (1, 0))
    chunk = torch.arange(total // CHUNK + starts.shape[0], device=starts.device)
    # Not a slice of `first_chunk`: compiled for a GPU, searchsorted loses the offset (pytorch/pytorch#182343).
    sequence = torch.searchsorted(last_chunk, chunk, right=True).clamp(max=starts.shape[0] - 1)
    start = starts[sequence] + (chunk - first_chunk[sequence]) * CHUNK
    end = torch.minimum(start + CHUNK, starts[sequence] + lengths[sequence])
    return Sequences(starts, lengths, first_chunk, sequence, start, torch.maximum(end, start))


def landmark_table(sequences: Sequences, landmarks: int, shift: Tensor | None = None) -> Tensor:
    """Return the row of each landmark, (B, n); −1 for an empty sequence."""
    rows = sequences.starts[:, None] + ragged_landmark_indices(sequences.lengths, landmarks, shift)
    return torch.where(sequences.lengths[:, None] > 0, rows, -1)


@cached
def uniform_landmark_table(batch: int, length: int, landmarks: int, device: torch.device) -> Tensor:
    """`landmark_table` of sequences of one length."""
    return torch.arange(batch, device=device)[:, None] * length + landmark_indices(length, landmarks, device)


# Tile sizes


class Tiles(NamedTuple):
    """Tile sizes of a kernel. They depend on dtype, head width and rank only, so that no length recompiles a kernel."""

    tokens: int  # rows of a block
    width: int  # head width, rounded up to a power of two
    rank: int  # directions of a block, a power of two
    rank_blocks: int  # blocks that cover the stored rank
    warps: int
    stages: int = 3


def ceil_div(value: int, by: int) -> int:
    return (value + by - 1) // by


def power_of_two(value: int, least: int = 16) -> int:
    return max(least, 1 << (value - 1).bit_length())


def stored_rank(rank: int) -> int:
    """Return the rank as scores are stored: rounded up to a multiple of LANE."""
    return ceil_div(rank, LANE) * LANE


@torch.compiler.assume_constant_result
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; the interpreter uses that of an H200."""
    return 132 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.assume_constant_result
def is_shared_memory_small(device: torch.device) -> bool:
    """Return True if a block has less shared memory than the 227 KiB of an H200: 163 KiB on an A100, 99 on others."""
    properties = None if INTERPRETED else torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 2**20) < 200 * 2**10


@torch.compiler.assume_constant_result
def precision(dtype: torch.dtype) -> str:
    """Return how products are computed.

    float32 is exact, unless the user allows TF32. Then three passes are used: a single pass truncates the operands, so
    that a sum of squares would be a thousandth too small. The interpreter cannot multiply bfloat16, which is widened.
    """
    if INTERPRETED:
        return "widened" if dtype == torch.bfloat16 else "ieee"
    return "tf32x3" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@torch.compiler.assume_constant_result
def float32_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32 intermediates of a call in `dtype`: at least three TF32 passes."""
    return precision(dtype) if dtype == torch.float32 else ("ieee" if INTERPRETED else "tf32x3")


# Device functions

EPSILON = tl.constexpr(EPS)
HUGE_SQUARE = tl.constexpr(HUGE_NORM**2)
SHRINK = tl.constexpr(HUGE_SCALE)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, accumulated in float32."""
    if PRECISION == "widened":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def inverse_norms(z):
    """1 / max(‖z‖, EPS) of the rows of a float32 block, for any finite z, and whether the norm is above EPS."""
    square, small = tl.sum(z * z, 1), z * SHRINK
    is_huge = square > HUGE_SQUARE
    norm = tl.sqrt(tl.where(is_huge, tl.sum(small * small, 1), square))
    floor = tl.where(is_huge, 0.0, EPSILON)
    return tl.where(is_huge, SHRINK, 1.0) / tl.maximum(norm, floor), norm > floor


@triton.jit
def scale_weights(w):
    """Divide large weights by a power of two, so that products with large rows stay finite. Returns the factor too."""
    largest = tl.max(tl.max(tl.abs(w.to(tl.float32)), 1), 0)
    factor = tl.where((largest > 65536.0) & (largest < float("inf")), tl.exp2(tl.floor(tl.log2(largest))), 1.0)
    return (w.to(tl.float32) * (1.0 / factor)).to(w.dtype), factor


# Sums over chunks


@jit_kernel
def _segment_sum_kernel(parts, sums, first_chunk, width, BC: tl.constexpr, BW: tl.constexpr):
    blocks = tl.cdiv(width, BW)  # one grid dimension: the others are limited to 65,535 programs
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BW + tl.arange(0, BW)
    end = tl.load(first_chunk + sequence + 1)
    total = tl.zeros((BC, BW), tl.float32)  # several loads at once: one after the other, long sequences wait for memory
    for first in range(tl.load(first_chunk + sequence), end, BC):
        chunk = first + tl.arange(0, BC)
        inside = (chunk < end)[:, None] & (column < width)[None]
        total += tl.load(parts + chunk[:, None] * width + column[None], mask=inside, other=0.0)
    tl.store(sums + sequence * width + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < width)


def segment_sum(
    parts: Tensor, first_chunk: Tensor, is_single_chunk: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Add the partial sums of each sequence's chunks: (chunks, …) float32 → (B, …) in `dtype`."""
    if is_single_chunk:
        return parts
    batch, width = first_chunk.shape[0] - 1, parts.shape[1:].numel()
    sums = torch.empty((batch, *parts.shape[1:]), dtype=dtype, device=parts.device)
    _segment_sum_kernel[(batch * ceil_div(width, 128),)](parts, sums, first_chunk, width, BC=8, BW=128)
    return sums


# Padding: the valid tokens of each sequence move to the front of its rows, and back.


@jit_kernel
def _compact_kernel(
    valid, source, place, lengths, chunk_end, width, chunks, BT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * width
    t = tl.arange(0, BT)
    count = tl.zeros((), tl.int32)
    for start in range(0, width, BT):
        token = start + t
        is_valid = tl.load(valid + first + token, mask=token < width, other=0).to(tl.int32)
        target = count + tl.cumsum(is_valid, 0) - is_valid
        tl.store(place + first + token, tl.where(is_valid > 0, target, -1), mask=token < width)
        tl.store(source + first + target, token, mask=is_valid > 0)
        count += tl.sum(is_valid, 0)
    for start in range(0, width, BT):
        token = start + t
        tl.store(source + first + token, -1, mask=(token < width) & (token >= count))
    tl.store(lengths + sequence, count.to(tl.int64))
    for start in range(0, chunks, BT):
        chunk = start + t
        begin = chunk * ROWS
        end = tl.maximum(tl.minimum(begin + ROWS, count), begin)
        tl.store(chunk_end + sequence * chunks + chunk, first + end.to(tl.int64), mask=chunk < chunks)


def compact(valid: Tensor) -> tuple[Tensor, Tensor, Sequences]:
    """Return the row permutation that moves valid tokens (B, N) to the front, and the tables of the result.

    source[b, t] is the token that moves to row t, −1 after the last; place[b, i] is the row of token i, −1 at padding.
    """
    batch, width = valid.shape
    source, place = (torch.empty((batch, width), dtype=torch.int32, device=valid.device) for _ in range(2))
    chunks = max(1, ceil_div(width, CHUNK))
    lengths = torch.empty(batch, dtype=torch.int64, device=valid.device)
    chunk_end = torch.empty(batch * chunks, dtype=torch.int64, device=valid.device)
    _compact_kernel[(batch,)](
        valid.to(torch.uint8).contiguous(), source, place, lengths, chunk_end, width, chunks, BT=1024, ROWS=CHUNK
    )
    starts, _, first_chunk, chunk_sequence, chunk_start, _, is_single = uniform_sequences(batch, width, valid.device)
    sequences = Sequences(starts, lengths, first_chunk, chunk_sequence, chunk_start, chunk_end, is_single)
    return source, place, sequences


@jit_kernel
def _permute_rows_kernel(x, index, out, width, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    blocks = tl.cdiv(width, BT)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    first = sequence * width
    origin = tl.load(index + first + token, mask=token < width, other=-1)
    fits = (token < width)[:, None] & (column < D)[None]
    row = tl.load(x + (first + origin)[:, None] * D + column[None], mask=fits & (origin >= 0)[:, None], other=0.0)
    tl.store(out + (first + token)[:, None] * D + column[None], row, mask=fits)


def _permute_rows(x: Tensor, index: Tensor) -> Tensor:
    batch, width, d = x.shape
    x, out = x.contiguous(), torch.empty((batch, width, d), dtype=x.dtype, device=x.device)
    columns = min(power_of_two(d), 256)
    rows = max(1, 4096 // columns)
    _permute_rows_kernel[(batch * ceil_div(width, rows), ceil_div(d, columns))](
        x, index, out, width, D=d, BT=rows, BD=columns
    )
    return out


class PermuteRows(torch.autograd.Function):
    """out[b, t] = x[b, index[b, t]], zero where the index is −1. Padding, which may have NaNs, is never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _permute_rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return PermuteRows.apply(grad, inverse, index), None, None  # type: ignore[no-any-return]
