"""A pre-LN decoder block with any causal attention, which runs over whole sequences and token by token alike.

    h = LN x;   x = x + gate(h) ⊙ (A(h) + C(h));   x = x + F(LN x)

A is the attention, C a short causal convolution beside it, gate(h) = SiLU(W_g h); C and gate are optional. The
convolution may also stand before the attention, A(h + SiLU(C(h))), so that queries and keys know the last few tokens.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from . import checks
from .conv import CausalConv
from .encoder import EncoderBlock


class BlockState(NamedTuple):
    """What a block remembers: the attention's state and the convolution's last inputs."""

    attention: Any
    conv: Tensor | None


class DecoderBlock(EncoderBlock):
    """`attention`: a causal attention module. Padding has to stand behind the tokens."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module,
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        conv: int = 0,
        conv_place: Literal["beside", "before"] = "beside",
        gate: bool = False,
        activation: Literal["gelu", "relu"] = "gelu",
    ) -> None:
        super().__init__(embed_dim, num_heads, attention, ffn_dim=ffn_dim, dropout=dropout)
        checks.one_of("conv_place", conv_place, ("beside", "before"))
        checks.one_of("activation", activation, ("gelu", "relu"))
        if activation == "relu":
            self.feed_forward[1] = nn.ReLU()
        self.conv = CausalConv(embed_dim, conv) if conv else None
        self.conv_place = conv_place
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False) if gate else None

    @property
    def streams(self) -> bool:
        """Whether the attention has a state to go on from."""
        return hasattr(self.attention, "initial_state")

    def initial_state(self, batch_size: int) -> BlockState:
        """The state before the first token."""
        conv = None if self.conv is None else self.conv.initial_state(batch_size)
        return BlockState(self.attention.initial_state(batch_size), conv)  # type: ignore[operator]

    def mix(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        local = None if self.conv is None else self.conv(x)
        y = self.attention(self._with_local(x, local, "before"), key_padding_mask=key_padding_mask)
        return self._let_through(x, self._with_local(y, local, "beside"))

    def _with_local(self, x: Tensor, local: Tensor | None, place: str) -> Tensor:
        if local is None or place != self.conv_place:
            return x
        return x + (F.silu(local) if place == "before" else local)

    def _let_through(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dropout(y if self.gate is None else y * F.silu(self.gate(x)))

    def resume(
        self, x: Tensor, key_padding_mask: Tensor | None = None, state: BlockState | None = None
    ) -> tuple[Tensor, BlockState]:
        """The block over a stretch of the sequences that goes on from `state`, and the state after it."""
        h = self.norm1(x)
        held = BlockState(None, None) if state is None else state
        local, conv = None, None
        if self.conv is not None:
            local, conv = self.conv(h, key_padding_mask, state=held.conv, return_state=True)
        y, attention = self.attention(
            self._with_local(h, local, "before"), key_padding_mask, state=held.attention, return_state=True
        )
        x = x + self._let_through(h, self._with_local(y, local, "beside"))
        return x + self.feed_forward(self.norm2(x)), BlockState(attention, conv)
