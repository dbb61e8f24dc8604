"""`primal generate RUN --prompt "…"`: continue a text with a trained language model.

The text goes to stdout as it is generated, its cost to stderr. The end token precedes each prompt, as in training.
Generation stops at the end of a document. Word vocabularies have no such token, only line ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.cli.flags import Parser, positive, read_device
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_text

EXAMPLE = 'primal generate runs/lm/wikipedia/primal-delta-conv4-gate-seed0 --prompt "The river" --top-p 0.95'
INCOMPLETE = "\ufffd"  # decoded from bytes that are not a whole character yet
CONTEXT = 8  # tokens of the prompt that decide about spaces between words


def make_parser() -> Parser:
    about = "Continue a text with the language model of a finished run."
    parser = Parser(prog="primal generate", description=about, epilog=f"Example: {EXAMPLE}")
    add: Any = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("--prompt", nargs="+", default=[], help="beginning of the text; several are continued as one batch")
    add("--prompt-file", type=Path, help="file with the beginning of the text")
    add("--tokens", type=positive, default=200, help="largest number of tokens to add (default 200)")
    add("--greedy", action="store_true", help="take the most likely token: the same as a temperature of 0")
    add("--temperature", type=float, default=0.8, help="below 1 likely tokens become more likely (default 0.8)")
    add("--top-k", type=int, help="draw among this many of the most likely tokens")
    add("--top-p", type=float, help="draw among the most likely tokens that together have this probability")
    add("--seed", type=int, default=0, help="of the random draws (default 0)")
    add("--past-end", action="store_true", help="do not stop at the end of a document")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    return parser


def main(args: Sequence[str]) -> int:
    options = make_parser().parse_args(list(args))
    texts = read_prompts(options)
    from primal_attention.models.lm import Sampling, generate
    from primal_attention.train.lm import load_language

    device = read_device(options.device)
    model, vocabulary = load_language(options.run)
    prompts = vocabulary.encode(texts)
    if not all(prompts):
        raise RunError("the prompt has no token of this vocabulary: give at least one word")
    if unknown := vocabulary.unknown(texts):
        print(f"not in the vocabulary, read as <unk>: {' '.join(unknown)}", file=sys.stderr)
    prompts = [[vocabulary.end, *prompt] for prompt in prompts]
    stop = None if vocabulary.is_word_level or options.past_end else vocabulary.end
    try:
        temperature = 0.0 if options.greedy else options.temperature
        sampling = Sampling(temperature, options.top_k, options.top_p, options.seed)
        steps = generate(model.to(device), prompts, options.tokens, sampling, stop=stop)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch raises the last two for a device
        raise RunError(str(error).splitlines()[0]) from error
    start, shown = time.perf_counter(), 0
    new: list[list[int]] = [[] for _ in prompts]

    def new_text(i: int) -> str:
        before = prompts[i][-CONTEXT:]
        return vocabulary.decode(before + new[i])[len(vocabulary.decode(before)) :]

    print(texts[0], end="", flush=True)
    for tokens in steps:
        for own, token in zip(new, tokens, strict=True):
            own += [token] if token >= 0 else []  # −1 after the end of a text
        text = new_text(0)
        if not text.endswith(INCOMPLETE):
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(new_text(0)[shown:])
    for i in range(1, len(texts)):
        print(f"---\n{texts[i]}{new_text(i)}")
    count, seconds = sum(map(len, new)), time.perf_counter() - start
    print(f"{count} tokens after {sum(map(len, prompts))} in {seconds:.2f} s", file=sys.stderr)
    return 0


def read_prompts(options: argparse.Namespace) -> list[str]:
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
