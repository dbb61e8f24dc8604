"""Linear attention and the base of attentions by a feature map φ,

    y_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j),   the sums over j ≤ i if causal.

`LinearAttention` has φ(z) = elu(z) + 1: Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers
with Linear Attention", ICML 2020. Performer and cosFormer differ in φ only. The two sums are the streaming state.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from ...ops.padding import Tokens
from .base import AttentionTraits, StreamingAttention

CHUNK = 128
# The running maximum before the first key. Finite, so that the difference of two such maxima is not NaN.
NO_KEY = -1e30


class LinearState(NamedTuple):
    """Streaming state of a causal layer. Its size does not depend on the number of tokens."""

    kv: Tensor  # (B, H, f, p), exp(-log_scale) Σ k_j v_jᵀ
    k: Tensor  # (B, H, f), exp(-log_scale) Σ k_j
    log_scale: Tensor  # (B, H)
    position: Tensor  # (B,), tokens read


class KernelizedAttention(StreamingAttention):
    """Attention by a feature map: subclasses define `features` and its width f."""

    traits = AttentionTraits(supports_causal=True, streams=True)
    log_keys: ClassVar[bool] = False  # `features` returns log φ(k)
    eps: ClassVar[float] = 1e-6  # the least denominator
    num_features: int  # f

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k), each (B, H, N, f). positions: (B or 1, N), in each sequence; lengths: (B or 1,), its tokens."""
        raise NotImplementedError

    def divide(self, num: Tensor, den: Tensor) -> Tensor:
        return (num / den.clamp(min=self.eps).unsqueeze(-1)).to(num.dtype)

    def _resume(
        self, x: Tensor, tokens: Tokens, state: LinearState | None, nans: Tensor | None
    ) -> tuple[Tensor, LinearState | None]:
        q, k, v = self.project_in(x)
        length = x.shape[1]
        positions = torch.arange(length, device=x.device)[None]
        if state is not None:
            positions = positions + state.position[:, None]
        lengths = tokens.lengths if tokens.lengths is not None else positions.new_full((1,), length)
        phi_q, phi_k = self.features(q, k, positions, lengths)
        if tokens.present is not None:
            # `present`, not `valid`: an empty sequence must not change the state.
            absent = ~tokens.present[:, None, :, None]
            phi_k = phi_k.masked_fill(absent, -torch.inf if self.log_keys else 0.0)
        if not self.causal:
            return self._bidirectional(phi_q, phi_k, v), None
        num, den, new_state = causal_linear(phi_q, phi_k, v, state, self.log_keys)
        read = length if tokens.present is None else tokens.present.sum(dim=1)
        kv = new_state.kv if nans is None else new_state.kv + nans[:, -1, None, None, None].to(new_state.kv.dtype)
        return self.divide(num, den), LinearState(kv, new_state.k, new_state.log_scale, new_state.position + read)

    def _bidirectional(self, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
        if self.log_keys:
            peak = phi_k.detach().amax(dim=(-2, -1), keepdim=True).clamp(min=NO_KEY)
            phi_k = (phi_k - peak).exp().to(phi_q.dtype)
        num = phi_q @ (phi_k.mT @ v)
        total = phi_k.sum(-2, dtype=accumulation_dtype(phi_k.dtype)).unsqueeze(-1)  # (B, H, f, 1)
        return self.divide(num, (phi_q @ total.to(phi_q.dtype)).squeeze(-1))

    def initial_state(self, batch_size: int) -> LinearState:
        """Return the state before the first token."""
        if not self.causal:
            raise ValueError("initial_state needs a causal layer (causal=False): only a causal layer streams")
        return empty_state(batch_size, self.num_heads, self.num_features, self.head_dim, self.in_proj.weight)


class LinearAttention(KernelizedAttention):
    """Linear attention with φ(z) = elu(z) + 1."""

    order_matters = False

    def __init__(self, embed_dim: int, num_heads: int, **common: Any) -> None:
        super().__init__(embed_dim, num_heads, **common)
        self.num_features = self.head_dim

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # elu(z) + 1 from simpler operations: the compiled backward of torch's elu fails on transposed input.
        return q.clamp(min=0.0) + q.clamp(max=0.0).exp(), k.clamp(min=0.0) + k.clamp(max=0.0).exp()

    def divide(self, num: Tensor, den: Tensor) -> Tensor:
        return (num / (den + self.eps).unsqueeze(-1)).to(num.dtype)  # as in the authors' code


def empty_state(batch: int, heads: int, features: int, width: int, like: Tensor) -> LinearState:
    kv = torch.zeros(batch, heads, features, width, dtype=accumulation_dtype(like.dtype), device=like.device)
    position = torch.zeros(batch, dtype=torch.int64, device=like.device)
    return LinearState(kv, kv[..., 0].clone(), kv.new_full((batch, heads), NO_KEY), position)


def causal_linear(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState | None = None, log_keys: bool = False, chunk: int = CHUNK
) -> tuple[Tensor, Tensor, LinearState]:
    """num_i = Σ_{j≤i} (q_i·k_j) v_j (B, H, N, p), den_i = Σ_{j≤i} q_i·k_j (B, H, N), and the state after the tokens.

    Scores are formed inside chunks (C×C); earlier chunks enter as running sums of k vᵀ and k. With `log_keys` the sums
    are relative to the largest key so far, as in the online softmax, so that nothing overflows and no scale of a later
    key is read early.

    Args:
        q: (B, H, N, f).
        k: (B, H, N, f). With `log_keys` log φ(k), -inf at padding.
        v: (B, H, N, p).
        state: the state before the tokens. The caller advances its `position`.
        log_keys: k holds logarithms.
        chunk: C.
    """
    batch, heads, length, features = q.shape
    if state is None:
        state = empty_state(batch, heads, features, v.shape[-1], q)
    size = min(chunk, length)
    extra = -length % size
    q, v = (F.pad(t, (0, 0, 0, extra)).unflatten(2, (-1, size)) for t in (q, v))  # (B, H, n, C, ·)
    k = F.pad(k, (0, 0, 0, extra), value=-torch.inf if log_keys else 0.0).unflatten(2, (-1, size))
    scale = None
    if log_keys:
        peaks = k.detach().amax(dim=(-2, -1)).clamp(min=NO_KEY)
        scale = torch.cat([state.log_scale.unsqueeze(-1), peaks.to(state.log_scale.dtype)], dim=-1).cummax(-1).values
        k = (k - scale[..., 1:, None, None]).exp().to(q.dtype)
    sums_kv = _prefix_sums(state.kv, (k.mT @ v).to(state.kv.dtype), scale)  # (B, H, n + 1, f, p)
    sums_k = _prefix_sums(state.k.unsqueeze(-1), k.sum(-2, dtype=state.k.dtype).unsqueeze(-1), scale)
    before_kv, before_k = sums_kv[:, :, :-1], sums_k[:, :, :-1]
    if scale is not None:
        ratio = (scale[..., :-1] - scale[..., 1:]).exp()[..., None, None]
        before_kv, before_k = before_kv * ratio, before_k * ratio
    scores = (q @ k.mT).tril()  # (B, H, n, C, C)
    num = scores @ v + q @ before_kv.to(q.dtype)
    den = scores.sum(-1, dtype=state.k.dtype) + (q @ before_k.to(q.dtype)).squeeze(-1)
    log_scale = state.log_scale if scale is None else scale[..., -1]
    after = LinearState(sums_kv[:, :, -1], sums_k[:, :, -1, :, 0], log_scale, state.position)
    return num.flatten(2, 3)[:, :, :length], den.flatten(2, 3)[:, :, :length], after


def _prefix_sums(first: Tensor, chunks: Tensor, scale: Tensor | None) -> Tensor:
    """Sums over all chunks so far, `first` before them: (B, H, n + 1, ·, ·), entry c relative to exp(scale_c)."""
    sums = torch.cat([first.unsqueeze(2), chunks], dim=2)
    if scale is None:
        return sums.cumsum(dim=2)
    # Doubling: after the step with shift s, entry c holds its last 2s chunks, each scaled by exp(scale_c' - scale_c).
    shift = 1
    while shift < sums.shape[2]:
        ratio = (scale[..., :-shift] - scale[..., shift:]).exp()[..., None, None]
        sums = sums + F.pad(sums[:, :, :-shift] * ratio, (0, 0, 0, 0, shift, 0))
        shift *= 2
    return sums
