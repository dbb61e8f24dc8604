"""Text from a language model, token by token: prompts of different lengths are read together, then every step costs the
same as the one before it, in time and in memory, where all layers keep a constant state.

    for tokens in generate(model, [[3, 1, 4], [1, 5]], 20, Sampling(temperature=0.8, top_p=0.95)):
        ...                                                # [7, 2]: the next token of each sequence

A model with a layer that has no state (Flowformer) runs over the whole text again at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from primal_attention.models.language import LanguageModel, LanguageState
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention

STRETCH = 16_384  # tokens of a prompt that are read at once: a longer one needs no more room
STOPPED = -1


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature 0 takes the likeliest one, otherwise one is drawn, the same for one seed."""

    temperature: float = 1.0
    top_k: int | None = None
    """Draw among this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have at least this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 (got {self.temperature})")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 (got {self.top_k})")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (got {self.top_p})")


GREEDY = Sampling(temperature=0.0)


class Sampler:
    """Draws one token of each sequence after the other, with random numbers of its own."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Tensor:  # (B, vocabulary) → (B,)
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1)
        chances = probabilities(logits, self.sampling)
        return torch.multinomial(chances, 1, generator=self.generator)[:, 0]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from, (B, vocabulary): first top_k, then top_p of what is left."""
    logits = logits.float()
    # The largest becomes 0 first: divided by a small temperature it would be no number otherwise.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = logits.softmax(dim=-1)
    if sampling.top_p is not None:
        falling, order = chances.sort(dim=-1, descending=True)
        enough = (
            falling.cumsum(dim=-1) - falling >= sampling.top_p
        )  # the likelier ones suffice; never true of the first
        chances = chances.masked_fill(enough.gather(-1, order.argsort(dim=-1)), 0.0)
    return chances / chances.sum(dim=-1, keepdim=True)


def pad(prompts: Sequence[Sequence[int]], device: torch.device | None = None) -> tuple[Tensor, Tensor | None]:
    """Prompts as rows of one tensor, padding on the left, and its mask; no mask where all have one length."""
    if not prompts or not all(prompts):
        raise ValueError("every prompt must have at least one token" if prompts else "prompts must not be empty")
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for row, padding, prompt in zip(tokens, mask, prompts, strict=True):
        row[-len(prompt) :] = torch.as_tensor(prompt)
        padding[-len(prompt) :] = False
    return tokens.to(device), mask.to(device) if mask.any() else None


def context_limit(model: LanguageModel) -> int | None:
    """The longest text that the model can read; None where there is no limit."""
    limits = [getattr(block.attention, "max_length", None) for block in model.blocks]
    return min((limit for limit in limits if limit is not None), default=None)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling = GREEDY,
    *,
    stop: int | None = None,
) -> Iterator[list[int]]:
    """The next token of each prompt, up to `count` times; a sequence that came to `stop` has `STOPPED` from then on.

    The model has to be in evaluation mode. Everything is checked here, before the first token.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 (got {count})")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    device = model.embedding.weight.device
    tokens, mask = pad(prompts, device)
    model.check_vocabulary(tokens)
    longest, limit = tokens.shape[1], context_limit(model)
    if limit is not None and longest + count - 1 > limit:
        most = f"at most {limit + 1 - longest}" if longest <= limit else "a shorter prompt"
        raise ValueError(
            f"a prompt of {longest} tokens and {count} new ones are more than max_length={limit} of this model: {most}"
        )
    return _generate(model, tokens, mask, count, Sampler(sampling, device), stop)


@torch.no_grad()
def _generate(
    model: LanguageModel, tokens: Tensor, mask: Tensor | None, count: int, choose: Sampler, stop: int | None
) -> Iterator[list[int]]:
    reader = Stream(model) if model.streams else Window(model)
    logits = reader.read(tokens, mask)
    stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for left in range(count, 0, -1):
        chosen = choose(logits)
        yield chosen.masked_fill(stopped, STOPPED).tolist()
        paused = None
        if stop is not None:
            stopped = stopped | (chosen == stop)
            if stopped.all():
                return
            paused = stopped[:, None] if stopped.any() else None
        if left > 1:
            logits = reader.read(chosen[:, None], paused)


class Stream:
    """Keeps the model's state between stretches of text."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.state: LanguageState | None = None
        # A cache that grows is best filled in one pass: a later stretch would need a mask as wide as all before it.
        grows = any(isinstance(block.attention, CachedSoftmaxAttention) for block in model.blocks)
        self.stretch = None if grows else STRETCH

    def read(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Logits after the last of the tokens, (B, vocabulary). Padding stands on the left."""
        at_once = self.stretch or tokens.shape[1]
        masks = [None] * -(-tokens.shape[1] // at_once) if mask is None else mask.split(at_once, dim=1)
        for part, padding in zip(tokens.split(at_once, dim=1), masks, strict=True):
            logits, self.state = self.model(part, padding, state=self.state, return_state=True, only_last=True)
        return logits


class Window:
    """Keeps the text, and runs over all of it."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.tokens: Tensor | None = None
        self.mask: Tensor | None = None

    def read(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        mask = torch.zeros_like(tokens, dtype=torch.bool) if mask is None else mask
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        return self.model(self.tokens, self.mask, only_last=True)
