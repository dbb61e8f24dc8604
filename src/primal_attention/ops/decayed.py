"""Sums over the past whose fading depends on the tokens, in chunks: γ_i is a number per token and head, in (0, 1).

    decayed_sum:     s_i = γ_i s_{i−1} + z_i
    decayed_weights: W_i = γ_i W_{i−1} + k_i v_iᵀ,   y_i = W_iᵀ q_i,   without ever forming a W per token

Inside a chunk the fading between two tokens is a C×C matrix; what came before enters through the chunks' own sums.
Every exponent is ≤ 0, so nothing overflows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import wide

CHUNK = 64


def decayed_sum(z: Tensor, log_decay: Tensor, start: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """s (B, H, N, p) of z and log γ (B, H, N), and the last s in at least float32, where the next stretch starts."""
    length = z.shape[2]
    (z,), fading = _chunks((z,), log_decay, chunk)  # (B, H, M, C, p), (B, H, M, C)
    within = _between(fading).to(z.dtype) @ z
    ends = _carry(within[..., -1, :].to(wide(z.dtype)), fading[..., -1], start)  # (B, H, M + 1, p)
    s = within.to(ends.dtype) + fading.exp()[..., None] * ends[:, :, :-1, None]
    return s.flatten(2, 3)[:, :, :length], ends[:, :, -1]


def decayed_weights(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, start: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """y (B, H, N, s) of q, k (B, H, N, p), v (B, H, N, s) and log γ (B, H, N), and the last W (B, H, p, s)."""
    length = q.shape[2]
    (q, k, v), fading = _chunks((q, k, v), log_decay, chunk)
    y = ((q @ k.mT) * _between(fading).to(q.dtype)) @ v
    to_end = (fading[..., -1:] - fading).exp().to(k.dtype)[..., None]
    written = ((k * to_end).mT @ v).to(wide(v.dtype))  # (B, H, M, p, s): what each chunk adds
    flat = None if start is None else start.flatten(-2)
    before = _carry(written.flatten(-2), fading[..., -1], flat).unflatten(-1, written.shape[-2:])
    y = y + (q * fading.exp().to(q.dtype)[..., None]) @ before[:, :, :-1].to(q.dtype)
    return y.flatten(2, 3)[:, :, :length], before[:, :, -1]


def _chunks(tensors: tuple[Tensor, ...], log_decay: Tensor, chunk: int) -> tuple[list[Tensor], Tensor]:
    """The tensors in chunks, and log γ summed from each chunk's start; what fills the last chunk changes nothing."""
    size = min(chunk, log_decay.shape[2])
    spare = -log_decay.shape[2] % size
    cut = [F.pad(t, (0, 0, 0, spare)).unflatten(2, (-1, size)) for t in tensors]
    return cut, F.pad(log_decay, (0, spare)).unflatten(2, (-1, size)).to(wide(log_decay.dtype)).cumsum(dim=-1)


def _between(fading: Tensor) -> Tensor:
    """How much of entry j is left at entry i, (…, C, C): γ_{j+1} ⋯ γ_i for j ≤ i, else nothing."""
    size = fading.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=fading.device).tril()
    return (fading[..., :, None] - fading[..., None, :]).masked_fill(~past, -torch.inf).exp()


def _carry(added: Tensor, fading: Tensor, start: Tensor | None) -> Tensor:
    """What stands before each chunk and after the last, (B, H, M + 1, ·), from what each chunk adds and keeps."""
    first = torch.zeros_like(added[:, :, 0]) if start is None else start.to(added.dtype)
    with torch.autocast(added.device.type, enabled=False):  # the state stays wide
        kept = _between(F.pad(fading, (1, 0)).cumsum(dim=-1))  # (B, H, M + 1, M + 1)
        return kept @ torch.cat([first[:, :, None], added], dim=2)
