"""`primal generate RUN --prompt "…"`: text from a finished language run, shown as it comes.

The text goes to stdout, what it cost to stderr. Training put the vocabulary's end token before every beginning, and so
does this. Generation stops at the end of a document; words between spaces have no such token, only ends of lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.flags import parse, read_device
from primal_attention.data.lm import UNKNOWN
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_text

if TYPE_CHECKING:
    from primal_attention.data.lm import Vocabulary


ABOUT = """Text from a finished language run.

Example: primal generate runs/lm/wikipedia/primal-delta-conv4-gate-seed0 --prompt "The river" --top-p 0.95"""
UNCERTAIN = "\ufffd"  # what stands for bytes that are no whole character (yet)
PATIENCE = 8  # tokens to wait for the rest of a character; the longest has four bytes


@dataclass(frozen=True)
class Arguments:
    run: Path
    """Folder of the run."""
    prompt: tuple[str, ...] = ()
    """The beginning of the text; several are continued together and shown one after the other."""
    prompt_file: Path | None = None
    """A file that holds the beginning instead, however long."""
    tokens: int = 200
    """How many to add at most."""
    greedy: bool = False
    """Always the likeliest token: the same as a temperature of 0."""
    temperature: float = 0.8
    """Below 1 the likely tokens become likelier, above 1 the unlikely ones."""
    top_k: int | None = None
    """Draw among this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have at least this probability."""
    seed: int = 0
    """Of what is drawn."""
    past_end: bool = False
    """Do not stop where a document ends."""
    device: str | None = None
    """cpu, cuda or cuda:N; None is the GPU if there is one."""


def main(args: Sequence[str]) -> int:
    found = parse(Arguments, args, prog="primal generate", about=ABOUT)
    texts = read_prompts(found)
    if found.tokens < 1:
        raise RunError(f"--tokens must be at least 1 (got {found.tokens})")
    from primal_attention.models.lm import Sampling, generate
    from primal_attention.train.lm import load_language

    device = read_device(found.device)
    model, vocabulary = load_language(found.run)
    prompts = encode(vocabulary, texts)
    ends_documents = not vocabulary.is_word_level
    try:
        model = model.to(device)
        sampling = Sampling(0.0 if found.greedy else found.temperature, found.top_k, found.top_p, found.seed)
        stop = vocabulary.end if ends_documents and not found.past_end else None
        steps = generate(model, prompts, found.tokens, sampling, stop=stop)
    except (ValueError, RuntimeError, AssertionError) as error:  # the last two: what torch says of a device
        raise RunError(str(error).splitlines()[0]) from error
    start = time.perf_counter()
    count = show(vocabulary, texts, prompts, steps)
    seconds = time.perf_counter() - start
    print(f"{count} tokens after {sum(map(len, prompts))} in {seconds:.2f} s", file=sys.stderr)
    return 0


def read_prompts(found: Arguments) -> list[str]:
    """The texts to continue, none of them empty."""
    texts = list(found.prompt)
    if found.prompt_file is not None:
        texts.append(read_text(found.prompt_file, pipes=True))
        if not texts[-1]:
            raise RunError(f"{found.prompt_file} is empty: it needs the beginning of a text, a word at least")
    if not texts:
        raise RunError('no prompt: give the beginning of a text with --prompt "…" or --prompt-file FILE')
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):  # how Python holds foreign bytes
        raise RunError("--prompt is not UTF-8 text")
    if not all(texts):
        raise RunError("the prompt is empty: give the beginning of a text, a word at least")
    return texts


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """The prompts' tokens behind the token that is before every beginning."""
    prompts = vocabulary.encode(texts)
    if not all(prompts):
        raise RunError("the prompt has no token of this vocabulary: give a word at least")
    unknown = vocabulary.unknown(texts)
    if unknown:
        print(f"not in the vocabulary, read as {UNKNOWN}: {' '.join(unknown)}", file=sys.stderr)
    return [[vocabulary.end, *prompt] for prompt in prompts]


def show(
    vocabulary: Vocabulary, texts: Sequence[str], prompts: Sequence[Sequence[int]], steps: Iterable[Sequence[int]]
) -> int:
    """Print the texts, a single one as it comes; the number of tokens that were added."""
    streams = [TextStream(vocabulary, prompt) for prompt in prompts]
    pieces = list(texts)
    live = len(texts) == 1
    if live:
        print(texts[0], end="", flush=True)
    count = 0
    for tokens in steps:
        for i, token in enumerate(tokens):
            if token < 0:
                continue
            count += 1
            piece = streams[i].add(token)
            if live:
                print(piece, end="", flush=True)
            else:
                pieces[i] += piece
    rest = [stream.rest() for stream in streams]
    if live:
        print(rest[0])
    else:
        print("\n---\n".join(piece + end for piece, end in zip(pieces, rest, strict=True)))
    return count


class TextStream:
    """Tokens one by one to pieces of text that add up to the whole: a character of several tokens comes when it is
    whole, and a space between words with the second of them."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self.vocabulary = vocabulary
        self.shown = list(before[-PATIENCE:])  # the last tokens that are text already: what the next ones follow on
        self.waiting: list[int] = []

    def add(self, token: int) -> str:
        self.waiting.append(token)
        text = self._new_text()
        if text.endswith(UNCERTAIN) and len(self.waiting) < PATIENCE:
            return ""
        self.shown, self.waiting = self.waiting, []
        return text

    def rest(self) -> str:
        """What is left at the end, whole or not."""
        return self._new_text() if self.waiting else ""

    def _new_text(self) -> str:
        before = self.vocabulary.decode(self.shown)
        return self.vocabulary.decode(self.shown + self.waiting)[len(before) :]
