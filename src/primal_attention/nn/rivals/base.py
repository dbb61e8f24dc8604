"""What the rivals share: projections, heads, padding and argument checks. A rival only says how tokens mix.

Padding may stand anywhere. Where a mechanism depends on the order of the tokens, the valid ones are moved to the front
(in their order) and back again, so that each rival has to handle right padding only.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.reference import split_heads
from .. import checks


class Tokens(NamedTuple):
    """Which tokens of a batch are real. All None: there is no padding.

    present: (B, N), True at tokens. valid: the same, but a sequence without any token counts its first (zeroed) slot,
    so that no softmax is over nothing; its output is zeroed in the end. lengths: (B,), valid tokens, at least 1.
    """

    present: Tensor | None = None
    valid: Tensor | None = None
    lengths: Tensor | None = None

    def zero_padding(self, t: Tensor) -> Tensor:
        """t, (B, H, N, p), with zeros at padding."""
        return t if self.valid is None else t.masked_fill(~self.valid[:, None, :, None], 0.0)

    def key_mask(self) -> Tensor | None:
        """(B, 1, 1, N) for scores over keys, True where a key may be seen."""
        return None if self.valid is None else self.valid[:, None, None, :]

    def number(self, t: Tensor) -> Tensor:
        """The number of tokens, (B or 1, 1, 1), in the dtype of t (B, H, N, p)."""
        if self.lengths is None:
            return t.new_full((1, 1, 1), t.shape[2])
        return self.lengths.to(t.dtype)[:, None, None]


class Padding:
    """The way into a mechanism (padding zeroed, valid tokens in front if `compact`) and out of it."""

    def __init__(self, mask: Tensor, compact: bool) -> None:
        self.mask = mask
        present = ~mask
        lengths = present.sum(dim=1)
        slot = torch.arange(mask.shape[1], device=mask.device)
        self.order: Tensor | None = None
        if compact:
            self.order = mask.to(torch.uint8).argsort(dim=1, stable=True)
            present = slot < lengths[:, None]
        valid = present | ((lengths == 0)[:, None] & (slot == 0))
        self.tokens = Tokens(present, valid, lengths.clamp(min=1))

    def enter(self, x: Tensor) -> Tensor:
        x = x.masked_fill(self.mask[..., None], 0.0)
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def leave(self, y: Tensor) -> Tensor:
        if self.order is not None:
            y = y.gather(1, self.order.argsort(dim=1)[..., None].expand_as(y))
        return y.masked_fill(self.mask[..., None], 0.0)


class Common(TypedDict, total=False):
    """The arguments that every attention takes; see `RivalAttention`."""

    causal: bool
    bias: bool
    dropout: float
    device: torch.device | str | None
    dtype: torch.dtype | None


class RivalAttention(nn.Module):
    """Self-attention by name: y = attn(x, key_padding_mask), x and y (B, N, embed_dim).

    Args:
        causal: position i sees positions ≤ i only.
        bias: of the projections.
        dropout: on the attention weights where the mechanism has them, else on the layer's output; training only.
    """

    name: ClassVar[str]
    complexity: ClassVar[str] = "O(N)"  # time, in the number of tokens
    linear_memory: ClassVar[bool] = True  # what is kept for the backward pass grows with N, not with N²
    supports_causal: ClassVar[bool] = False
    streams: ClassVar[bool] = False  # causal=True has initial_state and step, with a state of constant size
    stochastic: ClassVar[bool] = False  # draws random numbers from `seed`; the same in every eval forward
    exact_gradient: ClassVar[bool] = True  # the backward pass is the derivative of the forward pass
    order_matters: ClassVar[bool] = True  # permuting the tokens does more than permute the outputs, causal or not
    drops_weights: ClassVar[bool] = False
    projections: ClassVar[int] = 3  # rows of in_proj: [W_q; W_k; W_v], or [W_qk; W_v] where q and k are shared

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
        if causal and not self.supports_causal:
            raise ValueError(f"causal=True is not defined for attention {self.name!r}: use causal=False")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.causal, self.dropout = causal, dropout
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(embed_dim, self.projections * embed_dim, bias=bias, **where)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        padding = self.read_mask(x, key_padding_mask)
        if padding is None:
            return self.project_out(self.mix(x, Tokens()))
        return padding.leave(self.project_out(self.mix(padding.enter(x), padding.tokens)))

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mechanism: x (B, N, embed_dim) → heads' outputs (B, H, N, p). What it leaves at padding is zeroed."""
        raise NotImplementedError

    def read_mask(self, x: Tensor, mask: Tensor | None) -> Padding | None:
        checks.tokens(x, self.embed_dim, packed=False)
        if mask is None:
            return None
        checks.padding_mask(mask, x)
        return Padding(mask, compact=self.causal or self.order_matters)

    def project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (or qk, v), each (B, H, N, p)."""
        return tuple(split_heads(t, self.num_heads) for t in self.in_proj(x).chunk(self.projections, dim=-1))

    def project_out(self, heads: Tensor) -> Tensor:
        y = self.out_proj(heads.transpose(1, 2).flatten(-2))  # (B, N, embed_dim)
        return y if self.drops_weights else F.dropout(y, self.dropout, self.training)

    @property
    def weight_dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}" + (", causal" if self.causal else "")
