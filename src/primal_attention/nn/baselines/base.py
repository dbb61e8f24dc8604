"""Base classes of the baselines: projections, heads, padding, streaming and argument checks.

Padding may be anywhere. Where a mechanism depends on the order of the tokens, they are moved to the front and back
again, so that a mechanism only handles padding at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.padding import Padding, Tokens, isolate_non_finite
from ...ops.reference import split_heads
from .. import checks


@dataclass(frozen=True)
class AttentionTraits:
    """Properties of an attention, for code that iterates over all of them.

    Args:
        complexity: time, in the number of tokens.
        linear_memory: memory saved for backward grows with N, not with N².
        supports_causal: `causal=True` is available.
        streams: `causal=True` has `initial_state` and `step`, with a state of constant size.
        stochastic: draws random numbers from `seed`; the same in every eval forward.
        exact_gradient: the backward pass is the derivative of the forward pass.
    """

    complexity: str = "O(N)"
    linear_memory: bool = True
    supports_causal: bool = False
    streams: bool = False
    stochastic: bool = False
    exact_gradient: bool = True


class BaselineAttention(nn.Module):
    """Self-attention by name: y = attn(x, key_padding_mask), x and y (B, N, embed_dim).

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads.
        causal: position i depends on positions ≤ i only.
        bias: add a bias in the projections.
        dropout: rate on the attention weights where the mechanism has them, else on the output; training only.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    traits: ClassVar[AttentionTraits] = AttentionTraits()
    order_matters: ClassVar[bool] = True  # permuting the tokens does more than permute the outputs, causal or not
    drops_weights: ClassVar[bool] = False
    projections: ClassVar[int] = 3  # rows of in_proj: [W_q; W_k; W_v], or [W_qk; W_v] where q and k are shared

    isolates_non_finite = True
    """Causal: a NaN or inf in a token makes its output and later ones NaN, and does not change earlier ones. The
    products of the mechanisms would (0·NaN). Benchmarks of the mechanism switch it off."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.widths(embed_dim, num_heads)
        checks.probability("dropout", dropout)
        checks.boolean("causal", causal)
        checks.boolean("bias", bias)
        if causal and not self.traits.supports_causal:
            name = type(self).__name__.removesuffix("Attention").lower()
            raise ValueError(f"causal=True is not defined for attention {name!r}: use causal=False")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.causal, self.dropout = causal, dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(embed_dim, self.projections * embed_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self._attend(x, key_padding_mask, None)[0]

    def _attend(self, x: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """The output, and the state after the last token of layers that stream."""
        checks.tokens(x, self.embed_dim, packed=False)
        padding, tokens, nans = None, Tokens(), None
        if mask is not None:
            padding = Padding(checks.padding_mask(mask, x), compact=self.causal or self.order_matters)
            x, tokens = padding.enter(x), padding.tokens
        if self.causal and self.isolates_non_finite:
            x, nans = isolate_non_finite(x)
        heads, new_state = self._resume(x, tokens, state, nans)
        y = self.project_out(heads)
        y = y if nans is None else y + nans[..., None].to(y.dtype)
        return y if padding is None else padding.leave(y), new_state

    def _resume(self, x: Tensor, tokens: Tokens, state: Any, nans: Tensor | None) -> tuple[Tensor, Any]:
        """As `mix`, continuing from a state. `nans` (B, N) is NaN from the first non-finite token on, else 0."""
        return self.mix(x, tokens), None

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mechanism: x (B, N, embed_dim) → outputs of the heads (B, H, N, p). The caller zeroes the padding."""
        raise NotImplementedError

    def project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (or qk, v), each (B, H, N, p)."""
        return tuple(split_heads(t, self.num_heads) for t in self.in_proj(x).chunk(self.projections, dim=-1))

    def project_out(self, heads: Tensor) -> Tensor:
        y = self.out_proj(heads.transpose(1, 2).flatten(-2))  # (B, N, embed_dim)
        return y if self.drops_weights else F.dropout(y, self.dropout, self.training)

    @property
    def weight_dropout(self) -> float:
        return self.dropout if self.training else 0.0


class StreamingAttention(BaselineAttention):
    """A baseline whose causal form continues from a state; subclasses define `initial_state` and `_resume`."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        """Return y, or (y, state) with `return_state`; `state` is the state after earlier tokens of the sequences."""
        if (state is not None or return_state) and not self.causal:
            raise ValueError("state needs a causal layer (causal=False): only a causal layer streams")
        y, new_state = self._attend(x, key_padding_mask, state)
        return (y, new_state) if return_state else y

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        return self._resume(x, tokens, None, None)[0]

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process one token of each sequence.

        Args:
            x_t: (B, embed_dim).
            state: the state after the earlier tokens.

        Returns:
            y_t, which is row t of the full pass, and the next state.
        """
        y, state = self(x_t.unsqueeze(1), state=state, return_state=True)
        return y[:, 0], state
