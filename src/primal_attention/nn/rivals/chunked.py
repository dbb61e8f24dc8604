"""Causal linear attention in chunks: num_i = Σ_{j≤i} (q_i·k_j) v_j and den_i = Σ_{j≤i} q_i·k_j.

Inside a chunk the scores are formed (C×C); what came before enters as running sums of k vᵀ and k. Neither a loop over
tokens nor a p×p matrix per token. Keys may come as logarithms (positive random features): then the sums are kept
relative to the largest key so far, as in the online softmax, so that nothing overflows and no scale is seen early.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.reference import wide

CHUNK = 128
# The running maximum before the first key: finite, so that the difference of two of them is not NaN.
NOTHING = -1e30


class LinearState(NamedTuple):
    """Where a causal kernel attention stands: its size does not depend on how much it has read."""

    kv: Tensor  # (B, H, f, p), exp(-log_scale) Σ k_j v_jᵀ
    k: Tensor  # (B, H, f), exp(-log_scale) Σ k_j
    log_scale: Tensor  # (B, H)
    position: Tensor  # (B,), tokens read


def empty_state(
    batch: int, heads: int, features: int, width: int, dtype: torch.dtype, device: torch.device
) -> LinearState:
    kv = torch.zeros(batch, heads, features, width, dtype=wide(dtype), device=device)
    position = torch.zeros(batch, dtype=torch.int64, device=device)
    return LinearState(kv, kv[..., 0].clone(), kv.new_full((batch, heads), NOTHING), position)


def causal_linear(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState | None = None, log_keys: bool = False, chunk: int = CHUNK
) -> tuple[Tensor, Tensor, LinearState]:
    """num (B, H, N, p), den (B, H, N) and the state after, whose `position` is left as it was.

    Args:
        q: (B, H, N, f), k: (B, H, N, f), v: (B, H, N, p). With `log_keys`, k holds log φ(k), -inf at padding.
    """
    batch, heads, length, features = q.shape
    if state is None:
        state = empty_state(batch, heads, features, v.shape[-1], q.dtype, q.device)
    size = min(chunk, length)
    extra = -length % size
    q, v = (F.pad(t, (0, 0, 0, extra)).unflatten(2, (-1, size)) for t in (q, v))  # (B, H, n, C, ·)
    k = F.pad(k, (0, 0, 0, extra), value=-torch.inf if log_keys else 0.0).unflatten(2, (-1, size))

    scale = None
    if log_keys:
        peaks = k.detach().amax(dim=(-2, -1)).clamp(min=NOTHING)
        scale = torch.cat([state.log_scale.unsqueeze(-1), peaks.to(state.log_scale.dtype)], dim=-1).cummax(-1).values
        k = (k - scale[..., 1:, None, None]).exp().to(q.dtype)

    sums_kv = _running(state.kv, (k.mT @ v).to(state.kv.dtype), scale)  # (B, H, n + 1, f, p)
    sums_k = _running(state.k.unsqueeze(-1), k.sum(-2, dtype=state.k.dtype).unsqueeze(-1), scale)
    before_kv, before_k = sums_kv[:, :, :-1], sums_k[:, :, :-1]
    if scale is not None:
        fade = (scale[..., :-1] - scale[..., 1:]).exp()[..., None, None]
        before_kv, before_k = before_kv * fade, before_k * fade

    scores = (q @ k.mT).tril()  # (B, H, n, C, C)
    num = scores @ v + q @ before_kv.to(q.dtype)
    den = scores.sum(-1, dtype=state.k.dtype) + (q @ before_k.to(q.dtype)).squeeze(-1)
    after = LinearState(
        sums_kv[:, :, -1],
        sums_k[:, :, -1, :, 0],
        state.log_scale if scale is None else scale[..., -1],
        state.position,
    )
    return num.flatten(2, 3)[:, :, :length], den.flatten(2, 3)[:, :, :length], after


def _running(first: Tensor, chunks: Tensor, scale: Tensor | None) -> Tensor:
    """Sums over all chunks so far, `first` before them: (B, H, n + 1, ·, ·), entry c relative to exp(scale_c)."""
    sums = torch.cat([first.unsqueeze(2), chunks], dim=2)
    if scale is None:
        return sums.cumsum(dim=2)
    # Doubling: after the step with shift s, entry c holds its last 2s chunks, each faded by exp(scale_c' - scale_c).
    shift = 1
    while shift < sums.shape[2]:
        fade = (scale[..., :-shift] - scale[..., shift:]).exp()[..., None, None]
        sums = sums + F.pad(sums[:, :, :-shift] * fade, (0, 0, 0, 0, shift, 0))
        shift *= 2
    return sums
