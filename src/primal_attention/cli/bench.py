"""`primal bench`: the flags of the benchmarks, read before torch is imported."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.cli.flags import DEVICE, Parser, positive, read_device, split_command
from primal_attention.utils.errors import RunError

COMMANDS = {
    "attention": "Check and time one attention layer.",
    "generate": "Time one more token of a language model after N tokens; report the size of its state.",
    "model": "Time training steps of whole models.",
    "lra": "Time training steps on Long-Range Arena; one result file per task and model.",
    "plot": "Print a report of primal bench and draw it as FILE.png and FILE.svg.",
}
EXAMPLES = {
    "attention": "--lengths 256 4K --widths 512:8 1024:16",
    "generate": "--lengths 1K 16K 1M --batches 1 64",
    "model": "--rows 512x1024 vit-eager-autocast",
    "lra": "--tasks listops text --models softmax primal",
    "plot": "results/bench/attention.json",
}
# Values without a flag: `seconds` to measure a row on a CPU, `limit` in seconds of a step that ends a row.
DEFAULTS: dict[str, dict[str, Any]] = {
    "attention": {"seconds": 0.5, "limit": 2.0, "repeats": 20},
    "generate": {"seconds": 0.3, "limit": 60.0, "repeats": 100, "batch": 1, "tokens": None, "decay": None}
    | {"causal": True, "data_dependent": False, "landmarks": 300, "layers": 6},
    "model": {"seconds": 1.0, "limit": 600.0, "repeats": 50, "tokens": 32768, "compiler": "inductor"},
    "lra": {"seconds": 0.5, "limit": 600.0, "repeats": 20, "out": Path("results/lra-efficiency"), "name": None},
    "plot": {},
}
LENGTHS = {"attention": [256 * 4**k for k in range(5)], "generate": [1024 * 4**k for k in range(6)]}  # on a GPU
RENAMED = {"--rivals": "--baselines", "decode": "generate"}
NAMING = ("--causal", "--baselines", "--inference", "--eager")  # flags in the default file name


def read_length(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KkMm]?)", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 4096, 4K or 1M (got {text!r})")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def read_width(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be embed_dim:num_heads such as 512:8 (got {text!r})")
    return int(match[1]), int(match[2])


def read_decay(text: str) -> str | float:
    try:
        return text if text == "learned" else float(text)
    except ValueError:
        raise RunError(f"--decay must be 'learned' or a number (got {text!r})") from None


def make_parser(name: str) -> Parser:
    parser = Parser(f"bench {name}", EXAMPLES[name], COMMANDS[name])

    def add(commands: str, flag: str, help: str, **options: Any) -> None:
        if name in commands.split():
            parser.flag(flag, help, **options)

    some: dict[str, Any] = {"nargs": "+", "default": []}
    add("plot", "file", "JSON file that primal bench wrote", type=Path, metavar="FILE")
    lengths = "tokens, for example 4096, 4K or 1M (default: five or six lengths, on a CPU the shorter ones)"
    add("attention generate", "--lengths", lengths, type=read_length, metavar="N", **some)
    widths = {"nargs": "+", "type": read_width, "default": [(512, 8)], "metavar": "D:H"}
    add("attention generate", "--widths", "embed_dim:num_heads (default 512:8)", **widths)
    add("attention", "--batch", "sequences of a step (default: as --tokens gives)", type=positive)
    add("generate", "--batches", "sequences of a step (default 1, on a GPU 1 and 64)", type=positive, **some)
    tokens = "tokens of a step: the batch is tokens / length (default on a GPU 64K, on a CPU one sequence)"
    add("attention", "--tokens", tokens, type=read_length)
    add("model", "--tokens", "tokens of a step (default 32K); few tokens shorten the sequences", type=read_length)
    add("attention generate", "--rank", "rank of the Primal layers (default 30)", type=positive, default=30)
    add("attention", "--landmarks", "landmarks of the Primal layers (default 300)", type=positive, default=300)
    add("attention", "--causal", "causal layers; Primal is data-independent unless --data-dependent is given")
    add("attention", "--data-dependent", "build Primal's weights from landmarks, the default without --causal")
    add("attention", "--decay", "decay of the causal Primal layers: 'learned' or a number in (0, 1]", type=read_decay)
    add("attention", "--baselines", "also time the other attentions of the paper's tables")
    add("attention generate", "--only", "time these only, for example sdpa primal", metavar="NAME", **some)
    add("attention", "--inference", "forward only, without gradients")
    add("attention generate", "--eager", "on a GPU: time eager steps, including launches, instead of CUDA graphs")
    add("model", "--rows", "rows to time: vit-eager-autocast, …, or a model such as vit", metavar="ROW", **some)
    add("generate model", "--layers", "layers of every model (default 6, or those of the row)", type=positive)
    add("lra", "--tasks", "listops, text, retrieval, image, pathfinder (default all)", **some)
    add("lra", "--models", "softmax, nystrom, …, primal+, primal, published (default all)", **some)
    add("lra", "--batch-size", "samples of a step (default: the paper's)", type=positive)
    timed = "attention generate model lra"
    add(timed, "--repeats", "on a GPU: timed runs of a row (default %(default)s)", type=positive)
    add(timed, "--device", DEVICE, type=str)
    add(timed, "--commit", "commit to record if git is not available", type=str)
    add(timed, "--out", "folder (default %(default)s)", type=Path, default=Path("results/bench"))
    add("attention generate model", "--name", "name of the file (default: the command and its flags)", type=str)
    parser.set_defaults(benchmark=name, seed=0, **DEFAULTS[name])
    return parser


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """Parse and check the words after `primal bench`; resolve defaults that depend on the device or other flags."""
    for word in words:
        if word in RENAMED and (word.startswith("--") or word == words[0]):
            raise RunError(f"{word} is now called {RENAMED[word]}")
    name, others = split_command("primal bench", COMMANDS, words, "attention --lengths 256 4K")
    args = make_parser(name).parse_args(others)
    if name == "plot":
        return args
    if name == "attention":
        if args.tokens and args.batch:
            raise RunError("--tokens and --batch exclude each other: the batch is tokens / length")
        if args.decay and not args.causal:
            raise RunError("--decay needs --causal")
        args.data_dependent |= not args.causal
    if "torch" not in sys.modules:
        print(f"primal bench {name}: starting", file=sys.stderr, flush=True)
    args.device, args.command = read_device(args.device), shlex.join(["primal", "bench", *words])
    if name in LENGTHS:
        is_gpu = args.device.type == "cuda"
        args.dtype = "bfloat16" if is_gpu else "float32"
        args.lengths = args.lengths or LENGTHS[name][: None if is_gpu else -2]
    if name == "generate":
        args.batches = args.batches or ([1, 64] if is_gpu else [1])
    flags = [flag.removeprefix("--") for flag in NAMING if flag in words]
    args.file = None if name == "lra" else args.out / f"{args.name or '-'.join([name, *flags])}.json"
    try:  # now, not after the measurements
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        raise RunError(f"--out {args.out} cannot be written to ({error.strerror})") from None
    return args


def main(words: Sequence[str]) -> int:
    args = read_flags(words)
    from primal_attention.bench import measurement

    if args.benchmark == "plot":
        from primal_attention.report.results import read_benchmark

        report = read_benchmark(args.file)
        files = measurement.plot_report(report, args.file.with_suffix(""))
    else:
        module = "attention" if args.benchmark == "attention" else "model"
        report = getattr(importlib.import_module(f"primal_attention.bench.{module}"), f"run_{args.benchmark}")(args)
        files = [args.file or args.out]
    print(measurement.format_report(report))
    print("written:", *files) if files else print("no plot, which shows rows of attention and generate only")
    return 0
