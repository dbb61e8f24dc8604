"""A decoder-only language model with any causal attention in each layer, softmax and Primal alike.

    model = LanguageModel(LanguageConfig(8192))                 # the best setting without softmax attention
    model = LanguageModel(LanguageConfig(8192, ("primal", "softmax") * 3, primal_mode="decay", conv=4))
    logits = model(tokens)                                      # (B, N) → (B, N, vocabulary)
    logits, state = model(prompt, mask, return_state=True)      # prompts of different lengths, padded anywhere
    logits, state = model.step(token, state)                    # (B,) → (B, vocabulary), row t of the full pass

    for tokens in generate(model, [[3, 1, 4], [1, 5]], 20, Sampling(temperature=0.8, top_p=0.95)):
        ...                                                     # [7, 2]: the next token of each sequence

The default sizes are the paper's for WikiText-103: 6 layers, width 512, 8 heads, 2048 hidden, tied embeddings.
Generation costs the same time and memory at every step where all layers have a state of constant size. A model with a
layer without a state (Flowformer) reads the whole text again at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention
from primal_attention.nn.blocks import Activation, BlockState, DecoderBlock, attention_names
from primal_attention.nn.checks import one_of, positive
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.ops.padding import Padding

if TYPE_CHECKING:
    from primal_attention.parallel.context import Context


MAX_LOGITS = 2**29  # logits in memory at once
IGNORED = -100
PROMPT_CHUNK = 16_384  # tokens of a prompt that are read at once: a longer prompt needs no more memory
STOPPED = -1

PrimalMode = Literal["mean", "landmarks", "decay", "delta"]
Positions = Literal["rotary", "sinusoidal", "none"]


@dataclass(frozen=True)
class LanguageConfig:
    """The hyperparameters of a `LanguageModel`, in plain values that a file can hold.

    Without `primal_mode` the Primal layers use the delta rule with convolution 4, a gate, half of `num_heads` and a
    rank of half the head width: the only current setting without softmax attention that was trained on 204 MB of text.
    It has 1.4348 bits per byte, softmax attention 1.3746 (`results/lm-unit-variance`). After 51 MB it has 1.9331, the
    mode "decay" with convolution 1.9279, "mean" 2.0974 (`results/lm-short`). Those have `initializer_range=None`.

    Args:
        vocabulary: number of tokens.
        attention: one name for all layers, a name with a plus for the last layer only, or one name per layer. "none"
            is a layer without attention, whose convolution mixes the tokens.
        embed_dim: width of the tokens.
        num_heads: heads of each layer.
        layers: number of layers.
        ffn_dim: hidden width of the MLPs.
        activation: activation of the MLPs: "gelu", "relu" or "glu" (a gated MLP with a third linear layer).
        dropout: rate on attention, MLP and embeddings.
        primal_mode: "mean" is the paper's running mean; "landmarks" is causal and data-dependent; "decay" has a
            learned decay per head; "delta" has projection weights that follow the delta rule. None is the setting
            above, except for the values that are set.
        primal_heads: heads of the Primal layers; None is `num_heads` if `primal_mode` is set.
        rank: directions of the Primal layers; None is 30 if `primal_mode` is set.
        landmarks: landmarks of the mode "landmarks".
        max_length: the longest context of the mode "landmarks"; the other modes have no limit.
        conv: kernel size of a short causal convolution that is added to the output of each Primal layer, in "delta"
            layers of convolutions of q, k and h; 0 for none, which is the default if `primal_mode` is set.
        gate: gate each Primal layer's output, in "delta" layers the scores; None is False if `primal_mode` is set.
        gate_activation: activation of the gate, "silu" or "sigmoid".
        conv_layers: "primal" adds convolution and gate to the Primal layers only, "all" to all layers. Layers without
            attention ("none") always have them.
        positions: "rotary" in the softmax layers, "sinusoidal" added to the embeddings, or "none". None is "rotary"
            with softmax layers, "none" if decay, the delta rule or a convolution encodes the order of the tokens, and
            "sinusoidal" otherwise.
        initializer_range: standard deviation of the embeddings of a new model; position embeddings are multiplied by
            it. Its loss starts near ln(vocabulary). None is embed_dim**-0.5, with embeddings that the model scales to
            unit variance, and the loss starts far above ln(vocabulary); the paper's recipe `lm/wikitext-103` and the
            included weights have it.
    """

    vocabulary: int = 8192
    attention: tuple[str, ...] = ("primal",)
    embed_dim: int = 512
    num_heads: int = 8
    layers: int = 6
    ffn_dim: int = 2048
    activation: Activation = "gelu"
    dropout: float = 0.0
    primal_mode: PrimalMode | None = None
    primal_heads: int | None = None
    rank: int | None = None
    landmarks: int = 300
    max_length: int = 512
    conv: int | None = None
    gate: bool | None = None
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    conv_layers: Literal["primal", "all"] = "primal"
    positions: Positions | None = None
    initializer_range: float | None = 0.02

    def __post_init__(self) -> None:
        if self.primal_mode in ("selective", "dual"):
            raise ValueError(f"attention {self.primal_mode!r} was removed; use 'decay' or 'delta'")
        one_of("primal_mode", self.primal_mode, (*get_args(PrimalMode), None))
        one_of("gate_activation", self.gate_activation, ("silu", "sigmoid"))
        one_of("conv_layers", self.conv_layers, ("primal", "all"))
        one_of("positions", self.positions, (*get_args(Positions), None))
        for name in ("vocabulary", "embed_dim", "num_heads", "ffn_dim"):
            positive(name, getattr(self, name))
        names = attention_names(self.attention, self.layers)
        if self.positions == "rotary" and "softmax" not in names:
            raise ValueError(
                "positions='rotary' needs a softmax layer: no other layer rotates its inputs "
                f"(attention={', '.join(self.attention)}); use 'sinusoidal', 'none' or None"
            )
        if self.initializer_range is not None and not 0 < self.initializer_range < float("inf"):
            raise ValueError(f"initializer_range must be positive or None (got {self.initializer_range})")

    def resolved(self) -> LanguageConfig:
        """Return a copy in which all settings with a default by mode have values."""
        unset = {name: value for name, value in primal_defaults(self).items() if getattr(self, name) is None}
        config = replace(self, **unset)
        if config.positions is not None:
            return config
        names = attention_names(config.attention, config.layers)
        if "softmax" in names:
            return replace(config, positions="rotary")
        has_conv = bool(config.conv) and ("primal" in names or config.conv_layers == "all" or "none" in names)
        encodes_order = has_conv or ("primal" in names and config.primal_mode in ("decay", "delta"))
        return replace(config, positions="none" if encodes_order else "sinusoidal")


def primal_defaults(settings: Any) -> dict[str, Any]:
    """Return the values of the settings of Primal layers that are None: those of the mode, or the best ones measured.

    Args:
        settings: has `primal_mode`, `primal_heads`, `embed_dim` and `num_heads`.
    """
    if settings.primal_mode is not None:
        return {"rank": 30, "conv": 0, "gate": False}
    half = settings.num_heads // 2 if settings.num_heads % 2 == 0 else settings.num_heads
    heads = settings.primal_heads or half
    rank = max(1, settings.embed_dim // heads // 2)
    return {"primal_mode": "delta", "primal_heads": heads, "rank": rank, "conv": 4, "gate": True}


class LanguageState(NamedTuple):
    """State of the sequences of a batch after some tokens."""

    blocks: tuple[BlockState, ...]
    position: Tensor  # (B,): tokens read


def causal_attention(name: str, config: LanguageConfig) -> nn.Module | None:
    """Return the causal attention of one layer."""
    if name == "none":
        return None
    if name == "softmax":
        return CachedSoftmaxAttention(
            config.embed_dim, config.num_heads, rotary=config.positions == "rotary", dropout=config.dropout
        )
    if name != "primal":
        return make_attention(name, config.embed_dim, config.num_heads, causal=True)
    heads = config.primal_heads or config.num_heads
    keywords: dict[str, Any] = {"rank": config.rank}
    if config.primal_mode == "delta":
        gate = config.gate_activation if config.gate else False
        keywords |= {"conv": config.conv, "gate": gate, "dropout": config.dropout}
        return DeltaPrimalAttention(config.embed_dim, heads, **keywords)
    keywords |= {"causal": True, "data_dependent": False}
    if config.primal_mode == "landmarks":
        keywords |= {"data_dependent": True, "landmarks": config.landmarks, "max_length": config.max_length}
    elif config.primal_mode == "decay":
        keywords["decay"] = "learned"
    return make_attention(name, config.embed_dim, heads, **keywords)


class LanguageModel(nn.Module):
    """Tokens (B, N) to the logits of the next token (B, N, vocabulary). Input and output embeddings are shared.

    Args:
        config: Sizes, attention and mode.
    """

    context: Context | None = None
    gradient_checkpointing = False
    """Recompute each block in the backward pass, in training; the name is that of transformers."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config = config.resolved()
        self.attention_names = attention_names(config.attention, config.layers)
        self.embedding = nn.Embedding(config.vocabulary, config.embed_dim)
        nn.init.normal_(self.embedding.weight, std=config.initializer_range or config.embed_dim**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self._block(name) for name in self.attention_names)
        self.norm = nn.LayerNorm(config.embed_dim)

    def _block(self, name: str) -> DecoderBlock:
        config = self.config
        is_delta = name == "primal" and config.primal_mode == "delta"  # it has its own convolution and gate
        has_conv = not is_delta and (name in ("primal", "none") or config.conv_layers == "all")
        return DecoderBlock(
            config.embed_dim,
            config.num_heads,
            causal_attention(name, config),
            ffn_dim=config.ffn_dim,
            dropout=config.dropout,
            conv=config.conv or 0 if has_conv else 0,
            gate=config.gate_activation if config.gate and has_conv else False,
            activation=config.activation,
        )

    @property
    def streams(self) -> bool:
        """Whether every layer has a state to continue from."""
        return all(block.streams for block in self.blocks)  # type: ignore[union-attr]

    def initial_state(self, batch_size: int) -> LanguageState:
        """Return the state before the first token.

        Args:
            batch_size: number of sequences.
        """
        self._check_streams()
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.embedding.weight.device)
        return LanguageState(tuple(b.initial_state(batch_size) for b in self.blocks), position)  # type: ignore[operator]

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: LanguageState | None = None,
        return_state: bool = False,
        only_last: bool = False,
        targets: Tensor | None = None,
    ) -> Any:
        """Return logits (B, N, vocabulary); with `return_state` also the state after the last token.

        Args:
            tokens: (B, N).
            key_padding_mask: (B, N) bool, True at padding, which may be anywhere and changes nothing.
            state: The state after the tokens before these.
            return_state: Return (logits, state).
            only_last: Return only the logits of each sequence's last token, (B, vocabulary).
            targets: (B, N), each token's successor, negative where there is none. Returns the mean loss in nats
                instead of logits, with far less memory than the logits of a large vocabulary.
        """
        x, padding, new_state = self._read(tokens, key_padding_mask, state, return_state)
        if targets is not None:
            return self._loss(x if padding is None else padding.leave(x), targets)
        logits = self._logits(x, padding, only_last)
        return (logits, new_state) if return_state else logits

    def hidden(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: LanguageState | None = None,
        return_state: bool = False,
        every_layer: bool = False,
    ) -> tuple[tuple[Tensor, ...], LanguageState | None]:
        """Return hidden states, (B, N, embed_dim) each, and with `return_state` the state after the last token.

        The last hidden state is the normalised output of the last block. With `every_layer` the input of each block
        comes before it.

        Args:
            tokens: (B, N), or (B, N, embed_dim): rows of `embedding`, not yet scaled.
            key_padding_mask: as in `forward`.
            state: as in `forward`.
            return_state: as in `forward`.
            every_layer: return the inputs of the blocks, too.
        """
        inputs: list[Tensor] | None = [] if every_layer else None
        x, padding, new_state = self._read(tokens, key_padding_mask, state, return_state, inputs)
        *inputs_of_blocks, x = (h if padding is None else padding.leave(h) for h in (*(inputs or ()), x))
        return (*inputs_of_blocks, self.norm(x)), new_state

    def step(
        self, tokens: Tensor, state: LanguageState, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, LanguageState]:
        """Read one token of each sequence; return logits (B, vocabulary) and the state after it.

        Args:
            tokens: (B,), one token of each sequence.
            state: The state after the tokens before.
            key_padding_mask: (B,) bool, True where a sequence has no token at this step; its state does not change.
        """
        if tokens.ndim != 1:
            raise ValueError(f"tokens must have shape (batch,), one for each sequence (got {tuple(tokens.shape)})")
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        logits, state = self(tokens[:, None], mask, state=state, return_state=True)
        return logits[:, 0], state

    def check_vocabulary(self, tokens: Tensor) -> None:
        """Refuse tokens that the embedding does not have; a CUDA device would fail with an unclear error."""
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocabulary:
            raise ValueError(
                f"tokens must lie in 0 … {self.config.vocabulary - 1}, the model's vocabulary "
                f"(got {int(tokens.min())} … {int(tokens.max())}): were they made with its own vocabulary?"
            )

    def _check(self, tokens: Tensor, mask: Tensor | None, state: LanguageState | None) -> None:
        width = self.config.embed_dim
        if tokens.is_floating_point():
            if tokens.ndim != 3 or tokens.shape[1] == 0 or tokens.shape[2] != width:
                raise ValueError(
                    f"embeddings must have shape (batch, at least one token, {width}) (got {tuple(tokens.shape)})"
                )
        elif tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must have shape (batch, at least one token) (got {tuple(tokens.shape)})")
        elif tokens.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it synchronises
            self.check_vocabulary(tokens)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
            raise ValueError(
                f"key_padding_mask must be a bool tensor of shape {tuple(tokens.shape[:2])}, True at padding "
                f"(got {mask.dtype}, {tuple(mask.shape)})"
            )
        if self.context is not None and mask is not None:
            raise ValueError(
                "key_padding_mask needs complete sequences: under context parallelism pass windows without it"
            )
        if state is not None and len(state.position) != len(tokens):
            raise ValueError(f"state holds {len(state.position)} sequences and tokens {len(tokens)}")

    def _check_streams(self) -> None:
        if not self.streams:
            names = sorted({n for n, b in zip(self.attention_names, self.blocks, strict=True) if not b.streams})
            raise ValueError(f"attention {', '.join(names)} has no streaming state: pass the whole window again")

    def _read(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        state: LanguageState | None,
        return_state: bool,
        inputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, Padding | None, LanguageState | None]:
        """The last block's outputs with tokens before padding, the padding, and the state after the tokens.

        The input of each block is appended to the list `inputs`.
        """
        self._check(tokens, mask, state)
        padding = None if mask is None else Padding(mask, compact=True)
        if padding is None:
            padding_mask = None
        else:  # with tokens before padding, causal layers cannot see padding, and only states need the mask
            assert padding.tokens.present is not None
            tokens, padding_mask = padding.enter(tokens), ~padding.tokens.present
        x = self._embed(tokens, state)
        is_streaming = state is not None or return_state
        if is_streaming:
            self._check_streams()
        states, new_states = [None] * len(self.blocks) if state is None else state.blocks, []
        for block, past in zip(self.blocks, states, strict=True):
            if inputs is not None:
                inputs.append(x)
            if is_streaming:
                x, block_state = block(x, padding_mask, past, return_state=True)
                new_states.append(block_state)
            elif self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, padding_mask, use_reentrant=False)
            else:
                x = block(x, padding_mask)
        if not is_streaming:
            return x, padding, None
        count = torch.full((len(x),), x.shape[1], device=x.device)
        if padding_mask is not None:
            count = (~padding_mask).sum(dim=1)
        return x, padding, LanguageState(tuple(new_states), count if state is None else state.position + count)

    def _embed(self, tokens: Tensor, state: LanguageState | None) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        if self.config.initializer_range is None:
            x = x * self.config.embed_dim**0.5  # unit variance, as the positions have
        if self.config.positions == "sinusoidal":
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            positions = positions if state is None else positions + state.position[:, None]
            positions = positions if self.context is None else positions + self.context.locate(tokens).offset[:, None]
            x = x + (self.config.initializer_range or 1.0) * sinusoids(positions, self.config.embed_dim).to(x.dtype)
        return self.dropout(x)

    def _logits(self, x: Tensor, padding: Padding | None, only_last: bool) -> Tensor:
        if only_last and padding is not None:
            assert padding.tokens.lengths is not None
            x = x[torch.arange(len(x), device=x.device), padding.tokens.lengths - 1]
        elif only_last:
            x = x[:, -1]
        elif padding is not None:
            x = padding.leave(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        pieces = -(-len(targets) * self.config.vocabulary // MAX_LOGITS)
        if pieces == 1:
            total = _nats(x, self.embedding.weight, targets)
        else:  # the logits of one piece at a time, recomputed in the backward pass
            total = torch.stack(
                [
                    checkpoint(_nats, part, self.embedding.weight, labels, use_reentrant=False)
                    for part, labels in zip(x.chunk(pieces), targets.chunk(pieces), strict=True)
                ]
            ).sum()
        count = (targets >= 0).sum()
        if self.context is not None:  # the mean over the tokens of all ranks, the same on each of them
            total, count = self.context.sum(total), self.context.sum(count)
        return total / count.clamp(min=1)


def sinusoids(positions: Tensor, embed_dim: int) -> Tensor:
    """Position embeddings of the original Transformer: (B or 1, N) → (B or 1, N, embed_dim).

    The layout is that of fairseq: all sines, then all cosines, wave lengths from 2π to 2π·10⁴, first position 2.
    """
    half = max(embed_dim // 2, 1)
    speed = 10_000.0 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / max(half - 1, 1))
    angle = (positions[..., None] + 2).float() * speed
    return torch.cat([angle.sin(), angle.cos(), torch.zeros_like(angle[..., : embed_dim % 2])], dim=-1)


def _nats(x: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the loss summed over the tokens that have a successor."""
    labels = targets.masked_fill(targets < 0, IGNORED)
    return F.cross_entropy(F.linear(x, embedding), labels, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the most likely token with temperature 0, otherwise a random one.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: draw among this many of the most likely tokens; None is all.
        top_p: draw among the most likely tokens that together have at least this probability; None is all.
        seed: seed of the random numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 (got {self.temperature})")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 (got {self.top_k})")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (got {self.top_p})")


GREEDY = Sampling(temperature=0.0)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose one token of each sequence, (B, vocabulary) → (B,)."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator)[:, 0]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution of the next token, (B, vocabulary): first top_k, then top_p of the rest."""
    logits = logits.float()
    # Subtract the maximum first: dividing by a small temperature would overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    distribution = logits.softmax(dim=-1)
    if sampling.top_p is not None:
        descending, order = distribution.sort(dim=-1, descending=True)
        is_excess = descending.cumsum(dim=-1) - descending >= sampling.top_p  # never true of the first
        distribution = distribution.masked_fill(is_excess.gather(-1, order.argsort(dim=-1)), 0.0)
    return distribution / distribution.sum(dim=-1, keepdim=True)


def pad(prompts: Sequence[Sequence[int]], device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
    """Return prompts as rows of one tensor, padded on the left, and the mask; None if all have the same length."""
    if not prompts or not all(prompts):
        raise ValueError("every prompt must have at least one token" if prompts else "prompts must not be empty")
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = torch.arange(tokens.shape[1], 0, -1, device=device) > lengths[:, None]
    return tokens, mask if mask.any() else None


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling = GREEDY,
    *,
    stop: int | None = None,
) -> Iterator[list[int]]:
    """Yield the next token of each prompt, up to `count` times; `STOPPED` for a sequence after its token `stop`.

    Arguments are checked before the first token.

    Args:
        model: The model, in evaluation mode.
        prompts: Tokens of each prompt; lengths may differ.
        count: The largest number of new tokens.
        sampling: How a token is chosen.
        stop: The token that ends a sequence.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 (got {count})")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    device = model.embedding.weight.device
    tokens, mask = pad(prompts, device)
    model.check_vocabulary(tokens)
    limits = [getattr(block.attention, "max_length", None) or float("inf") for block in model.blocks]
    longest, limit = tokens.shape[1], min(limits)
    if longest + count - 1 > limit:
        most = f"at most {limit + 1 - longest}" if longest <= limit else "a shorter prompt"
        raise ValueError(
            f"a prompt of {longest} tokens and {count} new ones are more than max_length={limit} of this model: {most}"
        )
    return _generate(model, tokens, mask, count, sampling, stop)


@torch.no_grad()
def _generate(
    model: LanguageModel, tokens: Tensor, mask: Tensor | None, count: int, sampling: Sampling, stop: int | None
) -> Iterator[list[int]]:
    generator = torch.Generator(tokens.device).manual_seed(sampling.seed)
    stream = Stream(model)
    logits = stream.read(tokens, mask)
    stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for remaining in range(count, 0, -1):
        chosen = choose(logits, sampling, generator)
        yield chosen.masked_fill(stopped, STOPPED).tolist()
        paused = None
        if stop is not None:
            stopped = stopped | (chosen == stop)
            if stopped.all():
                return
            paused = stopped[:, None] if stopped.any() else None
        if remaining > 1:
            logits = stream.read(chosen[:, None], paused)


class Stream:
    """Reads text piece by piece from the model's state; a model without one reads the whole text every time."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.state: LanguageState | None = None
        self.text: list[tuple[Tensor, Tensor]] = []  # tokens and padding, where there is no state
        # A key-value cache is filled in one pass: a later chunk would need a mask over all tokens before it.
        grows = any(isinstance(block.attention, CachedSoftmaxAttention) for block in model.blocks)
        self.chunk = None if grows else PROMPT_CHUNK

    def read(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Logits after the last of the tokens, (B, vocabulary). Padding is on the left."""
        if not self.model.streams:
            self.text.append((tokens, torch.zeros_like(tokens, dtype=torch.bool) if mask is None else mask))
            return self.model(*(torch.cat(parts, dim=1) for parts in zip(*self.text, strict=True)), only_last=True)
        chunk = self.chunk or tokens.shape[1]
        masks = [None] * -(-tokens.shape[1] // chunk) if mask is None else mask.split(chunk, dim=1)
        for part, padding in zip(tokens.split(chunk, dim=1), masks, strict=True):
            logits, self.state = self.model(part, padding, state=self.state, return_state=True, only_last=True)
        return logits
