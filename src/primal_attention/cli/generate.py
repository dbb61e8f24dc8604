"""`primal generate RUN --prompt "…"`: continue a text with a trained language model.

The text goes to stdout as it is generated, its cost to stderr. The end token precedes each prompt, as in training.
Generation stops at the end of a document. Word vocabularies have no such token, only line ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.flags import parse, read_device
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_text

if TYPE_CHECKING:
    from primal_attention.data.lm import Vocabulary

ABOUT = """Continue a text with the language model of a finished run.

Example: primal generate runs/lm/wikipedia/primal-delta-conv4-gate-seed0 --prompt "The river" --top-p 0.95"""
INCOMPLETE = "\ufffd"  # decoded from bytes that are not a whole character yet
MAX_WAITING = 8  # tokens to wait for the rest of a character, which has at most four bytes


@dataclass(frozen=True)
class Arguments:
    run: Path
    """Folder of the run."""
    prompt: tuple[str, ...] = ()
    """The beginning of the text; several are continued as one batch and shown one after the other."""
    prompt_file: Path | None = None
    """File with the beginning of the text."""
    tokens: int = 200
    """Largest number of tokens to add."""
    greedy: bool = False
    """Take the most likely token: the same as a temperature of 0."""
    temperature: float = 0.8
    """Below 1 likely tokens become more likely, above 1 less likely."""
    top_k: int | None = None
    """Draw among this many of the most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together have at least this probability."""
    seed: int = 0
    """Seed of the random draws."""
    past_end: bool = False
    """Do not stop at the end of a document."""
    device: str | None = None
    """cpu, cuda or cuda:N; None is the GPU if there is one."""


def main(args: Sequence[str]) -> int:
    options = parse(Arguments, args, prog="primal generate", about=ABOUT)
    texts = read_prompts(options)
    if options.tokens < 1:
        raise RunError(f"--tokens must be at least 1 (got {options.tokens})")
    from primal_attention.models.lm import Sampling, generate
    from primal_attention.train.lm import load_language

    device = read_device(options.device)
    model, vocabulary = load_language(options.run)
    prompts = encode(vocabulary, texts)
    stop = None if vocabulary.is_word_level or options.past_end else vocabulary.end
    try:
        temperature = 0.0 if options.greedy else options.temperature
        sampling = Sampling(temperature, options.top_k, options.top_p, options.seed)
        steps = generate(model.to(device), prompts, options.tokens, sampling, stop=stop)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch raises the last two for a device
        raise RunError(str(error).splitlines()[0]) from error
    start = time.perf_counter()
    count = show(vocabulary, texts, prompts, steps)
    seconds = time.perf_counter() - start
    print(f"{count} tokens after {sum(map(len, prompts))} in {seconds:.2f} s", file=sys.stderr)
    return 0


def read_prompts(options: Arguments) -> list[str]:
    """Return the texts to continue, none of them empty."""
    texts = list(options.prompt)
    if options.prompt_file is not None:
        texts.append(read_text(options.prompt_file, pipes=True))
    if not texts:
        raise RunError('no prompt: give the beginning of a text with --prompt "…" or --prompt-file FILE')
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):  # bytes that are not UTF-8
        raise RunError("--prompt is not UTF-8 text")
    if not all(texts):
        name = options.prompt_file if all(options.prompt) else "--prompt"
        raise RunError(f"{name} is empty: give the beginning of a text, at least one word")
    return texts


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of the prompts, each after the end token."""
    prompts = vocabulary.encode(texts)
    if not all(prompts):
        raise RunError("the prompt has no token of this vocabulary: give at least one word")
    if unknown := vocabulary.unknown(texts):
        print(f"not in the vocabulary, read as <unk>: {' '.join(unknown)}", file=sys.stderr)
    return [[vocabulary.end, *prompt] for prompt in prompts]


def show(
    vocabulary: Vocabulary, texts: Sequence[str], prompts: Sequence[Sequence[int]], steps: Iterable[Sequence[int]]
) -> int:
    """Print the texts, a single one while it is generated; return the number of new tokens."""
    streams = [TextStream(vocabulary, prompt) for prompt in prompts]
    later = [[text] for text in texts[1:]]
    is_single, count = not later, 0
    print(texts[0], end="", flush=True)
    for tokens in steps:
        for i, token in enumerate(tokens):
            if token >= 0:  # −1 after the end of a text
                count += 1
                piece = streams[i].add(token)
                if i == 0:
                    print(piece, end="", flush=is_single)
                else:
                    later[i - 1].append(piece)
    print(streams[0].rest())
    for pieces, stream in zip(later, streams[1:], strict=True):
        print("---", "".join(pieces) + stream.rest(), sep="\n")
    return count


class TextStream:
    """Turn tokens into pieces of text, holding back incomplete characters."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self.vocabulary = vocabulary
        self.shown = list(before[-MAX_WAITING:])  # context that decides about spaces between words
        self.waiting: list[int] = []

    def add(self, token: int) -> str:
        self.waiting.append(token)
        text = self.rest()
        if text.endswith(INCOMPLETE) and len(self.waiting) < MAX_WAITING:
            return ""
        self.shown, self.waiting = self.waiting, []
        return text

    def rest(self) -> str:
        """Return the text of the tokens that wait."""
        return self.vocabulary.decode(self.shown + self.waiting)[len(self.vocabulary.decode(self.shown)) :]
