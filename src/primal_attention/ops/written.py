"""Projection weights that the tokens write with correction, in chunks: γ, β in [0, 1] are a number per token and head.

    W_i = γ_i W_{i−1} + k_i u_iᵀ,   u_i = β_i (v_i − γ_i W_{i−1}ᵀ k_i),   y_i = W_iᵀ q_i

Each write is a step of least squares towards Wᵀ k_i = v_i: with ‖k‖ = 1 and β = 1 the token replaces what stood at its
place instead of adding to it. Inside a chunk the corrections solve a triangular system; from chunk to chunk W goes on
by W ↦ M W + B, the only thing done one after the other. Every exponent is ≤ 0, so nothing overflows, and nothing waits
for the device.

This is the plain form, for any device and dtype; `fused` asks for the kernels of `ops/fused/delta.py`, which do the
same in few launches.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, and with a fading
"Gated Delta Networks: Improving Mamba2 with Delta Rule", 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import backends
from .modes import COSINE
from .reference import wide

CHUNK = 64
WIDEST = 128  # heads and ranks that the kernels hold
SMALL = 8  # triangular matrices of this size are inverted by a product


def corrected_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    start: Tensor | None = None,
    chunk: int = CHUNK,
    *,
    crossed: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """y (…, N, s) of q, k (…, N, p), v (…, N, s), log γ and β (…, N), and the last W (…, p, s).

    log γ and `start` may broadcast over the leading dimensions. Matrix products are in the dtype of q, W and the
    fading in at least float32. Training keeps the arguments and one triangular matrix per chunk; the rest is made again
    on the way back.
    crossed: of q, k (…, A, H, N, p) the sides A meet each other: the first of q reads the last of k, and so on.
    fused: by the kernels, which have their own chunks; see `cannot_fuse`. They take (B, A, H, N, p) or (B, H, N, p).
    """
    length, full = q.shape[-2], wide(log_decay.dtype)
    if fused and length > 1:
        return _by_kernels(q, k, v, log_decay, strength, start, crossed)
    if crossed:
        k = k.flip(-4)
    if length == 1:
        return _step(q, k, v, log_decay, strength, start)
    size = min(chunk, 1 << (length - 1).bit_length())
    spare = -length % size
    q, k, v = (F.pad(t, (0, 0, 0, spare)).contiguous().unflatten(-2, (-1, size)) for t in (q, k, v))
    # What fills the last chunk neither fades nor writes.
    log_decay, strength = (F.pad(t.to(full), (0, spare)).unflatten(-1, (-1, size)) for t in (log_decay, strength))
    if start is None:
        start = torch.zeros(*k.shape[:-3], k.shape[-1], v.shape[-1], dtype=full, device=k.device)
    total, narrow = log_decay.cumsum(dim=-1), q.dtype
    strength = strength[..., None].to(narrow)
    k_written, v_written = k * strength, v * strength
    inverse = UnitLowerInverse.apply(_again(_clash, k, k_written, total), narrow)
    y, last = _again(_read, q, k, k_written, v_written, total, inverse, start.to(full))
    return y.flatten(-3, -2)[..., :length, :], last


def cannot_fuse(x: Tensor, head_dim: int, rank: int) -> str | None:
    """Why the kernels cannot serve features of a token sequence x, or None."""
    if (missing := backends.triton_missing()) is not None:
        return missing
    if not x.is_cuda and not backends.interpreting():
        return f"x is on {x.device.type!r}, the kernels run on 'cuda'"
    if x.is_cuda and (old := backends._old_gpu(x.device.index or 0)) is not None:
        return old
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if dtype not in backends.FUSED_DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    if head_dim > WIDEST or rank > WIDEST:
        return f"head width {head_dim} and rank {rank} must not exceed {WIDEST}"
    return backends.unfit(COSINE)


def fuses(backend: str, x: Tensor, head_dim: int, rank: int) -> bool:
    """Whether the kernels serve this call; raises where the caller insists on them and they cannot."""
    if backend == "fused":
        if (why := cannot_fuse(x, head_dim, rank)) is not None:
            raise ValueError(f"backend='fused' cannot serve this call: {why} (backend='auto' falls back by itself)")
        return True
    return backend == "auto" and x.is_cuda and cannot_fuse(x, head_dim, rank) is None


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, start: Tensor | None, crossed: bool
) -> tuple[Tensor, Tensor]:
    from .fused.delta import written

    if q.ndim == 5:
        return written(q, k, v, log_decay, strength, start, crossed)
    q, k, v = (t.unsqueeze(-4) for t in (q, k, v))
    log_decay, strength = log_decay.unsqueeze(-3), strength.unsqueeze(-3)
    y, last = written(q, k, v, log_decay, strength, None if start is None else start.unsqueeze(-4), crossed)
    return y.squeeze(-4), last.squeeze(-4)


def _step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, in the formulas' own words."""
    full = wide(log_decay.dtype)
    with torch.autocast(q.device.type, enabled=False):
        key, value, decay = k.to(full).mT, v.to(full), log_decay.to(full).exp()[..., None]
        w = torch.zeros_like(key @ value) if w is None else decay * w.to(full)
        w = w + key @ (strength.to(full)[..., None] * (value - key.mT @ w))
        return (q.to(full) @ w).to(v.dtype), w


def _again(function: Callable[..., Any], *given: Tensor) -> Any:
    """function(*given), keeping nothing else for the way back: what it was made of is made again."""
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def _left(total: Tensor, diagonal: int) -> Tensor:
    """How much of entry j is left at entry i, (…, C, C): γ_{j+1} ⋯ γ_i up to a diagonal, nothing above it."""
    size = total.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=total.device).tril(diagonal)
    return (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp()


def _clash(k: Tensor, k_written: Tensor, total: Tensor) -> Tensor:
    """How much a chunk's writes find of earlier ones: strictly lower triangular, in at least float32."""
    with torch.autocast(k.device.type, enabled=False):
        return (k_written @ k.mT) * _left(total, -1)


def _read(
    q: Tensor, k: Tensor, k_written: Tensor, v_written: Tensor, total: Tensor, inverse: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """y on chunks, (…, M, C, s), and the last W."""
    full, narrow = total.dtype, q.dtype
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    with torch.autocast(q.device.type, enabled=False):
        own, seen = inverse @ v_written, inverse @ (k_written * from_start.to(narrow))  # u = own − seen W
        written = (k * to_end.to(narrow)).mT
        eye = torch.eye(k.shape[-1], dtype=full, device=k.device)
        states = Carry.apply(from_start[..., -1:, :] * eye - written @ seen, (written @ own).to(full), start)
        before = states[..., :-1, :, :].to(narrow)
        near = (q @ k.mT) * _left(total, 0).to(narrow)
        y = near @ (own - seen @ before) + (q * from_start.to(narrow)) @ before
    return y, states[..., -1, :, :]


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ in another dtype for A (…, C, C) strictly lower triangular, C a power of two, by matrix products alone.

    Blocks of eight by their finite series, (I − A)(I + A²)(I + A⁴), whose terms stay small at that size; then two
    blocks and what stands between them become one, which is as stable as substitution.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, dtype: torch.dtype) -> Tensor:
        inverse = unit_lower_inverse(a).to(dtype)
        ctx.save_for_backward(inverse)
        ctx.dtype = a.dtype
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).to(ctx.dtype), None  # above the diagonal nobody looks at it


def unit_lower_inverse(a: Tensor) -> Tensor:
    """See `UnitLowerInverse`."""
    size, inverse = min(a.shape[-1], SMALL), torch.zeros_like(a)
    power = _diagonal_blocks(a, size)
    series, reach = torch.eye(size, dtype=a.dtype, device=a.device) - power, 2
    while reach < size:
        power = power @ power
        series, reach = series + series @ power, 2 * reach
    _diagonal_blocks(inverse, size).copy_(series)
    while size < a.shape[-1]:
        blocks = _diagonal_blocks(inverse, 2 * size)
        between = _diagonal_blocks(a, 2 * size)[..., size:, :size]
        blocks[..., size:, :size] = -(blocks[..., size:, size:] @ between @ blocks[..., :size, :size])
        size *= 2
    return inverse


def _diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """(…, C / size, size, size), a view."""
    blocks = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (…, row block, row, column block, column)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class Carry(torch.autograd.Function):
    """W_{m+1} = M_m W_m + B_m over the chunks: M (…, m, p, p), B (…, m, p, s) and W_0 → all W, (…, m + 1, p, s)."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, added: Tensor, start: Tensor) -> Tensor:
        first = start.expand_as(added[..., 0, :, :])[..., None, :, :]
        every = torch.cat([first, added], dim=-3)
        steps, states = transition.flatten(0, -4), every.flatten(0, -4)
        for m in range(added.shape[-3]):
            states[:, m + 1].baddbmm_(steps[:, m], states[:, m])
        ctx.save_for_backward(transition, every)
        ctx.start = start.shape
        return every

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        transition, every = ctx.saved_tensors
        total = grad.clone(memory_format=torch.contiguous_format)  # of each W with all that followed from it
        steps, sums = transition.flatten(0, -4), total.flatten(0, -4)
        for m in range(transition.shape[-3] - 1, -1, -1):
            sums[:, m].baddbmm_(steps[:, m].mT, sums[:, m + 1])
        later = total[..., 1:, :, :]
        return later @ every[..., :-1, :, :].mT, later, total[..., 0, :, :].sum_to_size(ctx.start)
