"""`primal bench`: the flags of the benchmarks, read before torch is imported."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.cli.flags import Parser, positive, read_device
from primal_attention.utils.errors import RunError

COMMANDS = {
    "attention": ("Time one attention layer; check results first.", "--lengths 256 4K --widths 512:8 1024:16"),
    "decode": ("Time one more token after N tokens, and measure the state.", "--lengths 1K 16K 1M"),
    "model": ("Time training steps of whole models.", "--rows 512x1024 vit-eager-autocast --prepare"),
    "lra": ("Time training steps on Long-Range Arena.", "--tasks listops text --models softmax primal"),
    "plot": ("Print and plot the report of an earlier run.", "results/bench/attention.json"),
}
RENAMED = {"--rivals": "--baselines", "generate": "decode --layers N"}
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


def make_parser() -> Parser:
    top = Parser(prog="primal bench", epilog="Example: primal bench attention --lengths 256 4K")
    commands = top.add_subparsers(dest="benchmark", metavar=" | ".join(COMMANDS), required=True, parser_class=Parser)
    yes = {"action": "store_true"}
    for name, (about, example) in COMMANDS.items():
        example = f"Example: primal bench {name} {example}"
        add: Any = (parser := commands.add_parser(name, description=about, help=about, epilog=example)).add_argument
        if name == "plot":
            add("file", type=Path, help="NAME.json of a run")
            continue
        add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
        add("--commit", help="to record where git is not available")
        if name == "lra":
            add("--tasks", nargs="+", help="listops, text, retrieval, image, pathfinder (default all)")
            add("--models", nargs="+", help="softmax, nystrom, …, primal+, primal, published (default all)")
            add("--results", type=Path, default=Path("results"), help="folder of lra-efficiency/TASK/MODEL.json")
            add("--repeats", type=positive, default=20, help="runs on a GPU (default 20)")
            add("--batch-size", type=positive, help="default: the paper's")
            continue
        parser.set_defaults(seed=0)
        add("--out", type=Path, default=Path("results/bench"), help="folder (default results/bench)")
        add("--name", help="of the files in it (default: the command and its flags)")
        if name == "model":
            add("--rows", nargs="+", default=[], metavar="ROW", help="vit-eager-autocast, …, or a model such as vit")
            add("--tokens", type=read_length, default=32768, help="per step (default 32K); fewer shorten sequences")
            add("--layers", type=positive, help="of every model, instead of its own")
            add("--repeats", type=positive, default=5, help="whose median counts (default 5)")
            add("--steps", type=positive, default=10, help="of each repetition (default 10)")
            add("--prepare", **yes, help="compile all rows in parallel first, to fill the compiler's cache")
            parser.set_defaults(compiler="inductor", plot=False)
            continue
        decodes = name == "decode"
        add("--lengths", nargs="+", type=read_length, metavar="N", help="tokens: 4096, 4K, 1M")
        add("--widths", nargs="+", type=read_width, default=[(512, 8)], metavar="D:H", help="embed_dim:num_heads")
        add("--batch", type=positive, default=1 if decodes else None, help="sequences per step")
        add("--rank", type=positive, default=30, help="of the Primal layers (default 30)")
        add("--decay", type=read_decay, help="of the causal Primal layers: 'learned' or a number in (0, 1]")
        add("--baselines", **yes, help="all attentions of the paper's tables too")
        add("--only", nargs="+", default=[], metavar="NAME", help="sdpa, sdpa-cudnn, primal, primal-fused, published …")
        add("--eager", **yes, help="on a GPU: no CUDA graph, launches by the host included")
        add("--repeats", type=positive, default=100 if decodes else 20, help="runs on a GPU (default %(default)s)")
        add("--no-plot", dest="plot", action="store_false", help="no PNG and SVG")
        if decodes:
            add("--layers", type=positive, help="time a language model of this many layers instead of one layer")
            parser.set_defaults(tokens=None, causal=True, data_dependent=False, landmarks=300, seconds=0.3, limit=60.0)
            continue
        parser.set_defaults(seconds=0.5, limit=2.0)  # to measure a row on a CPU; of a step that ends a row
        add("--tokens", type=read_length, help="per step, instead of --batch (default 64K on a GPU)")
        add("--landmarks", type=positive, default=300, help="of the Primal layers (default 300)")
        add("--causal", **yes, help="causal layers; Primal is data-independent unless --data-dependent is given")
        add("--data-dependent", **yes, help="build Primal's weights from landmarks, the default without --causal")
        add("--inference", **yes, help="forward only, without gradients")
    return top


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """Parse and check the words after `primal bench`; resolve defaults that depend on the device or other flags."""
    for word in words:
        if word in RENAMED and (word.startswith("--") or word == words[0]):
            raise RunError(f"{word} is now called {RENAMED[word]}")
    args = make_parser().parse_args(list(words))
    if args.benchmark == "plot":
        return args
    if args.benchmark == "attention":
        if args.tokens and args.batch:
            raise RunError("--tokens and --batch exclude each other: the batch is tokens / length")
        if args.decay and not args.causal:
            raise RunError("--decay needs --causal")
        args.data_dependent |= not args.causal
    if "torch" not in sys.modules:
        print(f"primal bench {args.benchmark}: starting", file=sys.stderr, flush=True)
    args.device, args.command = read_device(args.device), shlex.join(["primal", "bench", *words])
    if args.benchmark in ("attention", "decode"):
        args.dtype = "bfloat16" if args.device.type == "cuda" else "float32"
    if args.benchmark != "lra":
        flags = [flag.removeprefix("--") for flag in NAMING if flag in words]
        args.file = args.out / f"{args.name or '-'.join([args.benchmark, *flags])}.json"
        try:  # now, not after the measurements
            args.file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.file.parent).close()
        except OSError as error:
            raise RunError(f"--out {args.out} cannot be written to ({error.strerror})") from None
    return args


def main(words: Sequence[str]) -> int:
    args = read_flags(words)
    if args.benchmark == "lra":
        from primal_attention.bench import lra

        lra.run(args)
        return 0
    from primal_attention.bench import attention, measurement, model
    from primal_attention.utils.files import read_json

    if args.benchmark == "plot":
        report, written = measurement.check_report(read_json(args.file), args.file), []
    else:
        report, written = (model if args.benchmark == "model" else attention).run(args), [args.file]
    print(measurement.format_report(report))
    if getattr(args, "plot", True):
        try:
            written += measurement.plot_report(report, args.file.with_suffix(""))
        except ImportError:
            hint = f"pip install 'primal-attention[report]', then primal bench plot {args.file}"
            print(f"no plot: matplotlib is not installed ({hint})", file=sys.stderr)
    print("\nwritten: " + ", ".join(map(str, written)))
    return 0
