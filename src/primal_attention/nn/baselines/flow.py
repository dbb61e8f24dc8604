"""Flowformer: attention as a flow network whose capacities are conserved, φ = sigmoid,

    I_i = φ(q_i)·Σ_j φ(k_j),            O_j = φ(k_j)·Σ_i φ(q_i)               (in of each sink, out of each source)
    Î_i = φ(q_i)·Σ_j φ(k_j)/O_j,        Ô_j = φ(k_j)·Σ_i φ(q_i)/I_i           (with the other side fixed to 1)
    Y_i = sigmoid(Î_i) · φ(q_i)/I_i · Σ_j φ(k_j)ᵀ (L softmax_j(Ô) v_j)

Wu et al., "Flowformer: Linearizing Transformers with Conservation Flows", ICML 2022. The causal form sums over j ≤ i
and counts the tokens so far where the other counts L, as the authors' code does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.feature_maps import accumulation_dtype
from ...ops.padding import Tokens
from .base import AttentionTraits, BaselineAttention
from .linear import causal_linear

EPS = 1e-6  # added to both sides of each flow, as in the authors' code


class FlowAttention(BaselineAttention):
    """Linear attention with flow conservation, competition and allocation."""

    traits = AttentionTraits(supports_causal=True)
    order_matters = False

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.project_in(x)
        dtype = q.dtype
        # Flows are sums over N: not in bfloat16.
        q, k = (t.to(accumulation_dtype(dtype)).sigmoid() for t in (q, k))
        if self.causal:
            return self._causal(q, k, v).to(dtype)
        incoming = _flow(q, _total(k, tokens))
        outgoing = _flow(k, _total(q, tokens))
        conserved_in = _flow(q, _total(k / outgoing.unsqueeze(-1), tokens))
        conserved_out = _flow(k, _total(q / incoming.unsqueeze(-1), tokens))
        if tokens.valid is not None:
            conserved_out = conserved_out.masked_fill(~tokens.valid[:, None, :], -torch.inf)
        number = q.shape[2] if tokens.lengths is None else tokens.lengths.to(q.dtype)[:, None, None]
        competition = conserved_out.softmax(-1) * number
        sources = k.mT.to(dtype) @ (v * competition.unsqueeze(-1).to(dtype))  # (B, H, p, p)
        y = (q / incoming.unsqueeze(-1)).to(dtype) @ sources
        return y * conserved_in.sigmoid().unsqueeze(-1).to(dtype)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Padding is after all tokens, so no running sum of a token includes it.
        count = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=q.dtype)
        incoming = _flow(q, k.cumsum(2))
        outgoing = _flow(k, q.cumsum(2))
        conserved_in = _flow(q, (k * (count / outgoing).unsqueeze(-1)).cumsum(2)) / count
        conserved_out = _flow(k, (q * (count / incoming).unsqueeze(-1)).cumsum(2)) / count
        competition = (conserved_out - conserved_out.logcumsumexp(-1)).exp() * count
        y, _, _ = causal_linear(
            (q / incoming.unsqueeze(-1)).to(v.dtype), k.to(v.dtype), v * competition.unsqueeze(-1).to(v.dtype)
        )
        return y * conserved_in.sigmoid().unsqueeze(-1).to(v.dtype)


def _total(t: Tensor, tokens: Tokens) -> Tensor:
    """The sum over the tokens, (B, H, N, p) → (B, H, 1, p)."""
    return tokens.zero_padding(t).sum(2, keepdim=True)


def _flow(ends: Tensor, total: Tensor) -> Tensor:
    return ((ends + EPS) * (total + EPS)).sum(-1)
