"""Transformer blocks that take any attention by name, and short convolutions.

    post-LN (the original Transformer):  x = LN(x + A(x));  x = LN(x + F(x))
    pre-LN:                              x = x + A(LN x);   x = x + F(LN x)
    decoder, h = LN x:                   x = x + gate(h) ⊙ (A(h) + C(h));  x = x + F(LN x)

F is a network of two linear maps, A is `make_attention(name, …)`, C a short convolution and gate(h) = SiLU(W_g h) or
σ(W_g h); A, C and gate are optional. Layers that mix tokens and have an attribute `context` work on shards of the
sequences, too: `primal_attention.context_parallel` sets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import checks
from .baselines import make_attention
from .primal import has_hooks


def attention_names(attention: str | Sequence[str], layers: int) -> tuple[str, ...]:
    """Return one attention name per layer.

    A single name fills all layers: "primal" is the PrimalFormer. A name with a plus is used in the last layer only,
    after softmax attention: "primal+" is the paper's Primal.+. A sequence of several names is returned as it is.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1 (layers={layers})")
    if isinstance(attention, str):
        if attention.endswith("+"):
            return ("softmax",) * (layers - 1) + (attention[:-1],)
        return (attention,) * layers
    names = tuple(attention)
    if len(names) == 1:
        return attention_names(names[0], layers)
    if len(names) != layers:
        raise ValueError(f"attention must name one kind or one per layer (got {len(names)} names for layers={layers})")
    return names


# Convolutions


def convolve(conv: nn.Conv1d, x: Tensor, context: Any = None) -> Tensor:
    """Apply a convolution over time that keeps the length, (B, N, C) → (B, N, d).

    On a shard, tokens of the neighbouring shards replace the zero padding.
    """
    if context is None and x.device.type == "cpu" and conv.groups == x.shape[2] > 1 and not has_hooks(conv):
        # The two-dimensional kernel reads tokens as they lie in memory and is several times faster.
        rows = conv.weight.unsqueeze(2), conv.bias, 1, (0, conv.kernel_size[0] // 2)
        return F.conv2d(x.transpose(1, 2).unsqueeze(2), *rows, groups=conv.groups).squeeze(2).transpose(1, 2)
    if context is None:
        return conv(x.transpose(1, 2)).transpose(1, 2)
    margin = conv.kernel_size[0] // 2
    padded = context.halo(x, margin, margin).transpose(1, 2)
    return F.conv1d(padded, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2)


class LocalMixing(nn.Module):
    """Depthwise convolution over time; padding is read as zeros.

    Args:
        embed_dim: width of the tokens.
        kernel_size: odd number of tokens that an output depends on.
    """

    context: Any = None

    def __init__(self, embed_dim: int, kernel_size: int) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"the convolution's kernel must be a positive odd number (kernel_size={kernel_size})")
        self.conv = nn.Conv1d(embed_dim, embed_dim, kernel_size, padding=kernel_size // 2, groups=embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        return convolve(self.conv, x, self.context)


class CausalConv(nn.Module):
    """Short causal depthwise convolution. Padding must be after the tokens; the state is the last inputs.

    Args:
        embed_dim: width of the tokens.
        kernel_size: number of tokens that an output depends on.
    """

    context: Any = None

    def __init__(self, embed_dim: int, kernel_size: int) -> None:
        super().__init__()
        checks.positive("kernel_size", kernel_size)
        self.embed_dim, self.kernel_size = embed_dim, kernel_size
        self.weight = nn.Parameter(torch.empty(kernel_size, embed_dim))  # row j multiplies the input j tokens ago
        self.bias = nn.Parameter(torch.zeros(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.kernel_size**-0.5), self.kernel_size**-0.5)
        nn.init.zeros_(self.bias)

    def initial_state(self, batch_size: int) -> Tensor:
        """Return the state before the first token: zeros, (B, kernel − 1, d)."""
        return self.weight.new_zeros(batch_size, self.kernel_size - 1, self.embed_dim)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, N, d)
        halo = self._with_past(x, state) if self.context is None else self.context.halo(x, self.kernel_size - 1, 0)
        # One pass per row: a grouped convolution would transpose x and is slow for groups of one channel.
        y = self.bias.to(x.dtype)
        for age, row in enumerate(self.weight.to(x.dtype)):
            start = self.kernel_size - 1 - age
            y = torch.addcmul(y, halo[:, start : start + x.shape[1]], row)
        return y

    def _with_past(self, x: Tensor, state: Tensor | None) -> Tensor:
        past = x.new_zeros(len(x), self.kernel_size - 1, self.embed_dim) if state is None else state
        return torch.cat([past.to(x.dtype), x], dim=1)

    def last_inputs(self, x: Tensor, state: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return the state after x (B, N, d), or after the first `lengths` (B,) tokens of each sequence."""
        padded, past = self._with_past(x, state), self.kernel_size - 1
        if lengths is None:
            return padded[:, x.shape[1] :].clone()
        rows = lengths[:, None] + torch.arange(past, device=x.device)  # (B, kernel − 1)
        return padded.gather(1, rows[..., None].expand(-1, -1, self.embed_dim))


# Encoder

Activation = Literal["gelu", "relu", "glu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "glu": nn.GLU}


class EncoderBlock(nn.Module):
    """One Transformer block.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads.
        attention: a name for `make_attention`, "none" for no attention, or a module with the same call.
        ffn_dim: hidden width of the feed-forward network, 4 · embed_dim if None.
        dropout: rate after attention and after each linear map.
        norm_first: pre-LN, else post-LN.
        local_kernel: width of a depthwise convolution beside the attention; None for none.
        activation: "gelu", "relu" or "glu" (a gated network with a third linear map), in the feed-forward network.
        attention_kwargs: keywords of `make_attention`.
    """

    attention: Any  # a module, or None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: str | nn.Module | None = "primal",
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        local_kernel: int | None = None,
        activation: Activation = "gelu",
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("activation", activation, tuple(ACTIVATIONS))
        if attention == "none" and not local_kernel:
            raise ValueError("a block without attention needs local_kernel, or it mixes no tokens")
        if isinstance(attention, str) and attention != "none":
            attention = make_attention(attention, embed_dim, num_heads, **(attention_kwargs or {}))
        self.attention = None if isinstance(attention, str) else attention
        self.local = LocalMixing(embed_dim, local_kernel) if local_kernel else None
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        hidden, halves = ffn_dim or 4 * embed_dim, 2 if activation == "glu" else 1
        up, down = nn.Linear(embed_dim, halves * hidden), nn.Linear(hidden, embed_dim)
        self.feed_forward = nn.Sequential(up, ACTIVATIONS[activation](), nn.Dropout(dropout), down, nn.Dropout(dropout))
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def mix(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Mix the tokens: the sum of the attention and the local convolution, either of which may be absent."""
        mixed = 0.0 if self.attention is None else self.attention(x, key_padding_mask=key_padding_mask)
        if self.local is not None:
            mixed = mixed + self.local(x, key_padding_mask)
        return self.dropout(mixed)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, N, d)
        if self.norm_first:
            x = x + self.mix(self.norm1(x), key_padding_mask)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.mix(x, key_padding_mask))
        return self.norm2(x + self.feed_forward(x))


class Encoder(nn.Module):
    """A stack of blocks and a final LayerNorm.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads.
        layers: number of blocks.
        attention: a name, a name with a plus (last layer only), or one name per layer; see `attention_names`. "none"
            leaves the attention out.
        attention_kwargs: keywords by attention name, for example `{"primal": {"rank": 30, "landmarks": 150}}`.
        block: class of the blocks.
        settings: further arguments of the blocks.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layers: int,
        attention: str | Sequence[str] = "primal",
        *,
        attention_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        block: type[EncoderBlock] = EncoderBlock,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.attention_names = attention_names(attention, layers)
        keywords = attention_kwargs or {}
        self.blocks = nn.ModuleList(
            block(embed_dim, num_heads, name, attention_kwargs=keywords.get(name), **settings)
            for name in self.attention_names
        )
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # (B, N, d) → (B, N, d)
        for block in self.blocks:
            x = block(x, key_padding_mask)
        return self.norm(x)


# Decoder


class BlockState(NamedTuple):
    """Streaming state of a block.

    Args:
        attention: the state of its attention.
        conv: the last inputs of its convolution, or None without one.
    """

    attention: Any
    conv: Tensor | None


class DecoderBlock(EncoderBlock):
    """A pre-LN block with a causal attention, for full sequences and token by token.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads.
        attention: a causal attention module, or None for the convolution alone. Padding must be after the tokens.
        ffn_dim: hidden width of the feed-forward network, 4 · embed_dim if None.
        dropout: rate after attention and after each linear map.
        conv: kernel of a causal convolution that is added to the output of the attention; 0 for none.
        gate: multiply the result by SiLU(W_g h) (True or "silu") or by σ(W_g h) ("sigmoid").
        activation: activation of the feed-forward network, as in `EncoderBlock`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module | None,
        *,
        ffn_dim: int | None = None,
        dropout: float = 0.0,
        conv: int = 0,
        gate: bool | Literal["silu", "sigmoid"] = False,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__(embed_dim, num_heads, attention, ffn_dim=ffn_dim, dropout=dropout, activation=activation)
        checks.one_of("gate", gate, (True, False, "silu", "sigmoid"))
        if attention is None and not conv:
            raise ValueError("a block without attention needs conv, or it mixes no tokens")
        self.conv = CausalConv(embed_dim, conv) if conv else None
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False) if gate else None
        self.gate_activation = F.sigmoid if gate == "sigmoid" else F.silu

    @property
    def streams(self) -> bool:
        """Whether the block has a state to continue from."""
        return self.attention is None or hasattr(self.attention, "initial_state")

    def initial_state(self, batch_size: int) -> BlockState:
        """Return the state before the first token."""
        attention = None if self.attention is None else self.attention.initial_state(batch_size)
        return BlockState(attention, None if self.conv is None else self.conv.initial_state(batch_size))

    def mix(
        self, x: Tensor, key_padding_mask: Tensor | None, state: BlockState | None = None, return_state: bool = False
    ) -> Any:
        """As in `EncoderBlock`; with `return_state`, continue from `state` and also return the state after x."""
        past = BlockState(None, None) if state is None else state
        local: Any = None if self.conv is None else self.conv(x, past.conv)
        y, attention = local, None
        if self.attention is not None:
            streaming = {"state": past.attention, "return_state": True} if return_state else {}
            y = self.attention(x, key_padding_mask=key_padding_mask, **streaming)
            y, attention = y if return_state else (y, None)
            y = y if local is None else y + local
        y = self.dropout(y if self.gate is None else y * self.gate_activation(self.gate(x)))
        if not return_state:
            return y
        lengths = None if key_padding_mask is None else (~key_padding_mask).sum(dim=1)
        conv = None if self.conv is None else self.conv.last_inputs(x, past.conv, lengths)
        return y, BlockState(attention, conv)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, state: Any = None, return_state: bool = False
    ) -> Any:
        """Return the output; with `return_state`, for the tokens that follow `state`, and the state after them."""
        if not return_state:
            return super().forward(x, key_padding_mask)
        mixed, state = self.mix(self.norm1(x), key_padding_mask, state, return_state=True)
        x = x + mixed
        return x + self.feed_forward(self.norm2(x)), state
