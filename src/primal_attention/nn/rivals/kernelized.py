"""Attention by a feature map: y_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j), the sums over j ≤ i if causal.

The base of linear attention, Performer and cosFormer, which differ in φ only. Causal layers stream: the two sums are
the whole state.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.reference import wide
from .base import RivalAttention, Tokens
from .chunked import LinearState, causal_linear, empty_state


class KernelizedAttention(RivalAttention):
    """φ by `features`; the division by `divide`."""

    supports_causal = True
    streams = True
    log_keys: ClassVar[bool] = False  # `features` returns log φ(k)

    @property
    def num_features(self) -> int:
        raise NotImplementedError

    def features(self, q: Tensor, k: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k), each (B, H, N, f). positions: (B or 1, N), in each sequence; lengths: (B or 1,), its tokens."""
        raise NotImplementedError

    def divide(self, num: Tensor, den: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Any:
        """y, or (y, state) with `return_state`; `state` resumes where an earlier stretch of the sequences ended."""
        if (state is not None or return_state) and not self.causal:
            raise ValueError("state needs a causal layer (causal=False): only a causal layer streams")
        padding = self.read_mask(x, key_padding_mask)
        tokens = Tokens() if padding is None else padding.tokens
        heads, after = self._attend(x if padding is None else padding.enter(x), tokens, state)
        y = self.project_out(heads)
        y = y if padding is None else padding.leave(y)
        return (y, after) if return_state else y

    def _attend(self, x: Tensor, tokens: Tokens, state: LinearState | None) -> tuple[Tensor, LinearState | None]:
        q, k, v = self.project_in(x)
        length = x.shape[1]
        positions = torch.arange(length, device=x.device)[None]
        if state is not None:
            positions = positions + state.position[:, None]
        lengths = tokens.lengths if tokens.lengths is not None else positions.new_full((1,), length)
        phi_q, phi_k = self.features(q, k, positions, lengths)
        if tokens.present is not None:
            # A sequence of padding alone must leave the state as it was: hide what is absent, not what is invalid.
            absent = ~tokens.present[:, None, :, None]
            phi_k = phi_k.masked_fill(absent, -torch.inf if self.log_keys else 0.0)
        if not self.causal:
            return self._attend_all(phi_q, phi_k, v), None
        num, den, after = causal_linear(phi_q, phi_k, v, state, self.log_keys)
        read = length if tokens.present is None else tokens.present.sum(dim=1)
        return self.divide(num, den), after._replace(position=after.position + read)

    def _attend_all(self, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
        if self.log_keys:
            peak = phi_k.detach().amax(dim=(-2, -1), keepdim=True).clamp(min=-1e30)
            phi_k = (phi_k - peak).exp().to(phi_q.dtype)
        num = phi_q @ (phi_k.mT @ v)
        total = phi_k.sum(-2, dtype=wide(phi_k.dtype)).unsqueeze(-1)  # (B, H, f, 1)
        return self.divide(num, (phi_q @ total.to(phi_q.dtype)).squeeze(-1))

    def initial_state(self, batch_size: int) -> LinearState:
        """The state before the first token."""
        if not self.causal:
            raise ValueError("initial_state needs a causal layer (causal=False): only a causal layer streams")
        weight = self.in_proj.weight
        return empty_state(batch_size, self.num_heads, self.num_features, self.head_dim, weight.dtype, weight.device)

    def step(self, x_t: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """One token of each sequence: x_t (B, embed_dim) → y_t, row t of the full pass, and the state after it."""
        if x_t.ndim != 2 or x_t.shape[-1] != self.embed_dim:
            raise ValueError(f"x_t must have shape (batch, {self.embed_dim}) (got {tuple(x_t.shape)})")
        y, state = self(x_t[:, None], state=state, return_state=True)
        return y[:, 0], state
