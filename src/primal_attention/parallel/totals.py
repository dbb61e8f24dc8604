"""What a stretch of tokens leaves behind: T = Σ_i γ^(tokens after i) z_i, the running sum's last row and nothing else.

A rank needs the ranks before it only through their totals. Taking the last row of `running_sum` would keep the sums of
all tokens for the way back; the total needs the tokens alone, and its gradient is g·γ^age at each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.once import once
from ..ops.reference import wide

BLOCK = 2**14  # tokens whose wide copies exist at a time


class _FadingTotal(torch.autograd.Function):
    """(z (B, H, N, p), log γ (H,), age (B or 1, N)) → (B, H, p); a token of negative age counts for nothing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_decay: Tensor, age: Tensor) -> Tensor:
        ctx.save_for_backward(z, log_decay, age)
        total = z.new_zeros(*z.shape[:2], z.shape[3], dtype=log_decay.dtype)
        for block in _blocks(z.shape[2]):
            power = _powers(log_decay, age[:, block])
            total += (power[:, :, None] @ z[:, :, block].to(total.dtype)).squeeze(2)
        return total

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        z, log_decay, age = ctx.saved_tensors
        grad_z, grad_log = torch.empty_like(z), torch.zeros_like(log_decay)
        for block in _blocks(z.shape[2]):
            power = _powers(log_decay, age[:, block])
            grad_z[:, :, block] = power[..., None] * grad[:, :, None]
            met = (z[:, :, block].to(grad.dtype) @ grad[..., None]).squeeze(3)  # (B, H, n)
            grad_log += (met * power * age[:, None, block].clamp(min=0)).sum((0, 2))
        return grad_z, grad_log, None


def _blocks(tokens: int) -> list[slice]:
    return [slice(first, min(first + BLOCK, tokens)) for first in range(0, tokens, BLOCK)]


def _powers(log_decay: Tensor, age: Tensor) -> Tensor:
    """γ_h^age, (B or 1, H, n); zero where the age is negative."""
    power = (log_decay[None, :, None] * age[:, None].clamp(min=0)).exp()
    return power.masked_fill(age[:, None] < 0, 0.0)


def log_of(decay: Tensor) -> Tensor:
    """log γ, finite even where γ has run down to zero."""
    return decay.clamp(min=torch.finfo(decay.dtype).tiny).log()


def total(z: Tensor, decay: Tensor | None, valid: Tensor | None) -> Tensor:
    """The last row of `running_sum(z, decay, valid)`, (B, H, N, p) → (B, H, p), in at least float32."""
    if decay is None:
        kept = z if valid is None else z.masked_fill(~valid[:, None, :, None], 0.0)
        return kept.sum(dim=2, dtype=wide(z.dtype))
    if valid is None:
        age = torch.arange(z.shape[2] - 1, -1, -1, device=z.device)[None]
    else:
        count = valid.long()
        age = count.sum(dim=1, keepdim=True) - count.cumsum(dim=1)
        age = torch.where(valid, age, -1)
    return _FadingTotal.apply(z, log_of(decay.to(wide(z.dtype))), age)  # type: ignore[no-any-return]
