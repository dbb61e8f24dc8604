"""`primal generate RUN --prompt "…"`: continue a text with a trained language model.

RUN is the folder of a finished run or of `save_pretrained`, or the name of a model that the package includes.
The text goes to stdout as it is generated, its cost to stderr. The end token precedes the prompt, as in training.
Generation stops at the end of a document. Word vocabularies have no such token, only line ends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.flags import DEVICE, Parser, positive, read_device, read_integer
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_text
from primal_attention.utils.pretrained import pretrained_path

if TYPE_CHECKING:
    from primal_attention.data.lm import Vocabulary
    from primal_attention.models.lm import LanguageModel

EXAMPLE = 'primal-lm-tiny --prompt "The river" --top-p 0.95'
INCOMPLETE = "\ufffd"  # decoded from bytes that are not a whole character yet
CONTEXT = 8  # tokens of the prompt that decide about spaces between words


def load_model(run: str | Path) -> tuple[LanguageModel, Vocabulary]:
    """Return the model of a folder or name, in evaluation mode, and its vocabulary."""
    folder = pretrained_path(run)
    if (folder / "config.json").exists():
        logging.disable(logging.WARNING)  # messages of transformers and of the packages that it imports
        try:
            from transformers.utils.logging import disable_progress_bar

            from primal_attention.hf.run import to_language

            disable_progress_bar()
            return to_language(folder)
        finally:
            logging.disable(logging.NOTSET)
    from primal_attention.train.lm import load_language

    return load_language(folder)


def main(args: Sequence[str]) -> int:
    parser = Parser("generate", EXAMPLE)
    source = "folder of a run or of save_pretrained, or the name of an included language model"
    parser.flag("run", source, type=Path, metavar="RUN")
    parser.flag("--prompt", "beginning of the text", default=None)
    parser.flag("--prompt-file", "file with the beginning of the text", type=Path)
    parser.flag("--tokens", "largest number of tokens to add (default 200)", type=positive, default=200)
    parser.flag("--greedy", "take the most likely token: the same as a temperature of 0")
    parser.flag("--temperature", "below 1, likely tokens become more likely (default 0.8)", type=float, default=0.8)
    parser.flag("--top-k", "draw among this many of the most likely tokens", type=positive)
    parser.flag("--top-p", "draw among the most likely tokens that together have this probability", type=float)
    parser.flag("--seed", "seed of the random numbers (default 0)", type=read_integer, default=0)
    parser.flag("--past-end", "do not stop at the end of a document")
    parser.flag("--device", DEVICE, type=str)
    options = parser.parse_args(args)
    text = read_prompt(options.prompt, options.prompt_file)
    from primal_attention.models.lm import Sampling, generate

    device = read_device(options.device)
    try:
        temperature = 0.0 if options.greedy else options.temperature
        sampling = Sampling(temperature, options.top_k, options.top_p, options.seed)
    except ValueError as error:
        raise RunError(f"--{str(error).replace('_', '-')}") from None
    model, vocabulary = load_model(options.run)
    (prompt,) = vocabulary.encode([text])
    if not prompt:
        raise RunError("the prompt has no token of this vocabulary: give at least one word")
    if unknown := vocabulary.unknown([text]):
        print(f"not in the vocabulary, read as <unk>: {' '.join(unknown)}", file=sys.stderr)
    prompt = [vocabulary.end, *prompt]
    stop = None if vocabulary.is_word_level or options.past_end else vocabulary.end
    try:
        steps = generate(model.to(device), [prompt], options.tokens, sampling, stop=stop)
    except ValueError as error:  # for example a prompt that is longer than the model's context
        raise RunError(str(error)) from error
    start, context = time.perf_counter(), prompt[-CONTEXT:]
    tokens: list[int] = []
    shown = len(vocabulary.decode(context))
    print(text, end="", flush=True)
    for (token,) in steps:
        tokens += [token] if token >= 0 else []  # −1 after the end of the text
        decoded = vocabulary.decode(context + tokens)
        if not decoded.endswith(INCOMPLETE):
            print(decoded[shown:], end="", flush=True)
            shown = len(decoded)
    print(vocabulary.decode(context + tokens)[shown:])
    seconds = time.perf_counter() - start
    print(f"{len(tokens)} tokens after {len(prompt)} in {seconds:.2f} s", file=sys.stderr)
    return 0


def read_prompt(text: str | None, file: Path | None) -> str:
    """Return the beginning of the text, which is not empty."""
    if (text is None) == (file is None):
        raise RunError('give the beginning of a text, with --prompt "…" or --prompt-file FILE')
    prompt = text if file is None else read_text(file, pipes=True)
    if not prompt:
        raise RunError(f"{file or '--prompt'} is empty: give the beginning of a text, at least one word")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that are not UTF-8
        raise RunError("--prompt is not UTF-8 text")
    return prompt
