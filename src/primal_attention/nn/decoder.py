"""A pre-LN decoder block with any causal attention, which runs over whole sequences and token by token alike.

    h = LN x;   x = x + gate(h) ⊙ (A(h) + C(h));   x = x + F(LN x)

A is the attention, C a short causal convolution beside it, gate(h) = SiLU(W_g h); C and gate are optional.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

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
        gate: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, attention, ffn_dim=ffn_dim, dropout=dropout)
        self.conv = CausalConv(embed_dim, conv) if conv else None
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
        y = self.attention(x, key_padding_mask=key_padding_mask)
        if self.conv is not None:
            y = y + self.conv(x)
        return self._let_through(x, y)

    def _let_through(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dropout(y if self.gate is None else y * F.silu(self.gate(x)))

    def resume(
        self, x: Tensor, key_padding_mask: Tensor | None = None, state: BlockState | None = None
    ) -> tuple[Tensor, BlockState]:
        """The block over a stretch of the sequences that goes on from `state`, and the state after it."""
        h = self.norm1(x)
        held = BlockState(None, None) if state is None else state
        y, attention = self.attention(h, key_padding_mask=key_padding_mask, state=held.attention, return_state=True)
        conv = None
        if self.conv is not None:
            local, conv = self.conv(h, key_padding_mask, state=held.conv, return_state=True)
            y = y + local
        x = x + self._let_through(h, y)
        return x + self.feed_forward(self.norm2(x)), BlockState(attention, conv)
