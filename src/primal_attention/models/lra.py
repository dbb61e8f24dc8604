"""Classifiers of token sequences for Long-Range Arena, in the small setting that Nyströmformer introduced.

Token and position embeddings, a pre-LN encoder (2 layers, width 64, 2 heads, 128 hidden), the mean over the tokens, and
a network with one hidden layer. Pairs of sequences go through the same encoder, and the head reads [a; b; a·b; a − b].

    model = LRAClassifier(16, 10, 2000, attention="primal+", attention_kwargs={"primal": {"rank": 30}})
    logits = model(tokens, tokens == 0)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.models.uea import local_rows, masked_mean
from primal_attention.nn.baselines.softmax import SoftmaxAttention
from primal_attention.nn.blocks import Encoder, EncoderBlock
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.padding import Tokens

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context


Positions = Literal["random", "line", "grid"]
STD = 0.02  # of embeddings, before training
MAX_ONE_HOT = 512  # largest vocabulary for which a one-hot product is cheaper than sorting the batch
SHORTEST_PERIOD = 3.0  # of initial position waves, in tokens


class TokenStem(nn.Module):
    """Embeddings of tokens and of positions, added. See `initial_positions` for `positions`."""

    context: Context | None = None

    def __init__(
        self,
        vocabulary: int,
        embed_dim: int,
        max_length: int,
        dropout: float = 0.0,
        positions: Positions = "random",
    ) -> None:
        super().__init__()
        self.tokens = SmallVocabularyEmbedding(vocabulary, embed_dim)
        self.positions = nn.Embedding(max_length, embed_dim)
        nn.init.normal_(self.tokens.weight, std=STD)
        self.positions.weight.data.copy_(initial_positions(positions, max_length, embed_dim, STD))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:  # (B, N) → (B, N, d)
        if places is not None:
            return self.dropout(self.tokens(ids) + self.positions(places))
        return self.dropout(self.tokens(ids) + local_rows(self.positions.weight, ids, self.context))


class LRABlock(EncoderBlock):
    """A Transformer block that can treat padding as the authors' implementation does; see `LRAClassifier`."""

    published_padding = False

    def mix(self, x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if key_padding_mask is None or not self.published_padding:
            return super().mix(x, key_padding_mask)
        attention = self.attention
        if isinstance(attention, PrimalAttention):
            # Padding is part of f(X) and of the objective; the attention output there is zero before the output map.
            y, bias = attention(x), attention.out_proj.bias
            y = torch.where(key_padding_mask.unsqueeze(-1), y.new_zeros(()) if bias is None else bias.to(y.dtype), y)
        else:
            assert isinstance(attention, SoftmaxAttention)
            valid = ~key_padding_mask  # padded keys are masked, padded queries are not
            y = attention.project_out(attention.mix(x, Tokens(valid, valid, valid.sum(dim=1))))
        return self.dropout(y)


class TokenMean(nn.Module):
    """The mean of the normalised tokens, (B, N, d) → (B, d); a module so that it can be compiled."""

    def forward(
        self, x: Tensor, norm: nn.Module, key_padding_mask: Tensor | None, context: Context | None, count_padding: bool
    ) -> Tensor:
        x = norm(x)
        if key_padding_mask is not None and count_padding:
            x, key_padding_mask = x.masked_fill(key_padding_mask.unsqueeze(-1), 0.0), None
        return masked_mean(x, key_padding_mask, context)


class LRAClassifier(nn.Module):
    """Tokens (B, N) and their padding mask to logits (B, classes); two of each where `pairs` is on.

    Args:
        vocabulary: Number of tokens.
        classes: Number of classes.
        max_length: The longest sequence.
        embed_dim: Width of the tokens.
        ffn_dim: Width of the feed-forward layers.
        dropout: Dropout rate.
        pairs: Classify pairs of sequences with one encoder.
        published_padding: Include padding in f(X), in the objective and in the mean, as the authors' implementation
            does; only to reproduce it. The attribute may be changed at any time.
        positions: Initial values of the learned positions: noise, or waves along the sequence ("line") or along the
            rows and columns of an image ("grid").
        encoder: Further arguments of `Encoder` and its blocks; by default num_heads=2, layers=2.

    Attributes:
        max_tokens: Upper bound of a sequence's valid tokens. Padding beyond it is dropped before the encoder, wherever
            it is, which changes the time and not the result.
    """

    context: Context | None = None
    max_tokens: int | None = None

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        max_length: int,
        *,
        embed_dim: int = 64,
        ffn_dim: int = 128,
        dropout: float = 0.1,
        pairs: bool = False,
        published_padding: bool = False,
        positions: Positions = "random",
        **encoder: Any,
    ) -> None:
        super().__init__()
        self.stem = TokenStem(vocabulary, embed_dim, max_length, dropout, positions)
        settings = {"num_heads": 2, "layers": 2, **encoder}
        self.encoder = Encoder(embed_dim, ffn_dim=ffn_dim, dropout=dropout, block=LRABlock, **settings)
        self.mean = TokenMean()
        head_dim = 4 * embed_dim if pairs else embed_dim
        self.head = nn.Sequential(nn.Linear(head_dim, ffn_dim), nn.ReLU(), nn.Linear(ffn_dim, classes))
        self.pairs, self.has_convolution = pairs, bool(encoder.get("local_kernel"))
        self._any_length = False
        self.published_padding = published_padding

    @property
    def published_padding(self) -> bool:
        return self._published_padding

    @published_padding.setter
    def published_padding(self, on: bool) -> None:
        for block in self.encoder.blocks:
            has_equivalent = isinstance(block.attention, (PrimalAttention, SoftmaxAttention)) and block.local is None
            if on and not has_equivalent:
                kind = type(block.attention).__name__ if block.local is None else "a layer with local_kernel"
                raise ValueError(
                    f"published_padding is known for primal and softmax layers only (got {kind}): "
                    "leave it off, or choose attention primal, primal+ or softmax"
                )
        self._published_padding = on
        for block in self.encoder.blocks:
            block.published_padding = on  # type: ignore[assignment]

    def forward(
        self,
        ids: Tensor,
        key_padding_mask: Tensor | None = None,
        second: Tensor | None = None,
        second_padding_mask: Tensor | None = None,
    ) -> Tensor:
        if (second is not None) != self.pairs:
            raise ValueError(f"pairs={self.pairs}: the model takes {'two sequences' if self.pairs else 'one sequence'}")
        if second is None:
            return self.head(self.encode(ids, key_padding_mask))
        # One pass for both, so that the objective of a Primal layer includes both.
        mask = None
        if key_padding_mask is not None and second_padding_mask is not None:
            mask = torch.cat([key_padding_mask, second_padding_mask])
        elif key_padding_mask is not None or second_padding_mask is not None:
            raise ValueError("key_padding_mask and second_padding_mask come together or not at all")
        a, b = self.encode(torch.cat([ids, second]), mask).chunk(2)
        return self.head(torch.cat([a, b, a * b, a - b], dim=-1))

    def encode(self, ids: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the mean of the encoded tokens, (B, N) → (B, d)."""
        places, max_tokens = None, self.max_tokens
        if max_tokens is None and self.has_convolution and self.context is None:
            max_tokens = ids.shape[1]  # a convolution reads neighbouring slots: move all padding to the end
        if key_padding_mask is not None and max_tokens is not None:
            ids, places, key_padding_mask = gather(ids, key_padding_mask, max_tokens)
        self._mark(ids, key_padding_mask, places)
        x = self.stem(ids, places)
        for block in self.encoder.blocks:
            self._mark(x)
            x = block(x, key_padding_mask)
        self._mark(x)
        return self.mean(x, self.encoder.norm, key_padding_mask, self.context, self.published_padding)

    def compile(self, *args: Any, any_length: bool = False, **kwargs: Any) -> None:
        """torch.compile everything before the head, part by part: equal blocks are compiled once.

        any_length: Compile for all lengths at once.
        """
        self._any_length = any_length
        for part in (self.stem, *self.encoder.blocks, self.mean):
            part.compile(*args, **kwargs)

    def _mark(self, *tensors: Tensor | None) -> None:
        """Mark the length as dynamic for torch.compile."""
        if self._any_length:
            for t in tensors:
                if t is not None:
                    torch._dynamo.maybe_mark_dynamic(t, 1)


class Lookup(torch.autograd.Function):
    """Rows of a table; the gradient is one product with the one-hot tokens per sequence.

    dtype: Dtype of the product; sums over sequences have the table's dtype.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = len(table), dtype
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        one_hot = ids.unsqueeze(-1) == torch.arange(ctx.rows, device=ids.device)  # (B, N, rows)
        with torch.autocast(grad.device.type, enabled=False):
            gradients = torch.bmm(one_hot.to(ctx.dtype).mT, grad.to(ctx.dtype))
        return None, gradients.sum(dim=0, dtype=grad.dtype), None


class SmallVocabularyEmbedding(nn.Embedding):
    """An embedding of a small vocabulary, whose gradient on a GPU is a matrix product.

    torch sorts the tokens and adds the gradients of equal ones serially, which is slow where most of a batch is one
    token: a black pixel, or padding.
    """

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cuda and self.num_embeddings <= MAX_ONE_HOT and torch.is_grad_enabled():
            # As autocast does for linear layers; float16 would overflow.
            half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
            return Lookup.apply(ids, self.weight, torch.bfloat16 if half else self.weight.dtype)  # type: ignore[no-any-return]
        return super().forward(ids)


def gather(ids: Tensor, padding: Tensor, max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Move each sequence's valid tokens (B, N) to the front; return tokens, positions and padding mask, (B, n).

    Tokens keep their order. n = max_tokens must be at least the largest number of valid tokens.
    """
    places = padding.to(torch.uint8).argsort(dim=1, stable=True)[:, :max_tokens]
    return ids.gather(1, places), places, padding.gather(1, places)


def initial_positions(kind: Positions, length: int, embed_dim: int, std: float) -> Tensor:
    """Position embeddings before training, (length, embed_dim) with root mean square `std`.

    random: Noise. line: Waves along the sequence. grid: Waves along the rows of a square image in one half of the
    numbers, along its columns in the other. With waves, near positions have similar embeddings from the start.
    """
    if kind == "random":
        return torch.empty(length, embed_dim).normal_(std=std)
    if kind == "line":
        if embed_dim % 2:
            raise ValueError(f"positions='line' needs an even width (got embed_dim={embed_dim})")
        return math.sqrt(2) * std * _waves(length, embed_dim // 2)
    side = math.isqrt(length)
    if side * side != length or embed_dim % 4:
        raise ValueError(
            "positions='grid' needs as many tokens as a square image has pixels and a width that 4 divides "
            f"(got {length} tokens, embed_dim={embed_dim})"
        )
    line = _waves(side, embed_dim // 4)
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    return math.sqrt(2) * std * torch.cat([rows, columns], dim=-1).reshape(length, embed_dim)


def _waves(length: int, waves: int) -> Tensor:
    """(length, 2 waves) sines and cosines with periods from twice the length down to `SHORTEST_PERIOD`."""
    periods = 2.0 * length * (SHORTEST_PERIOD / (2.0 * length)) ** torch.linspace(0, 1, waves)
    angle = torch.arange(length)[:, None] * (2 * math.pi / periods)
    return torch.cat([angle.sin(), angle.cos()], dim=1)
