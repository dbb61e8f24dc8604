"""The words after `primal bench`, with nothing but argparse: the same command runs where only torch is installed."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from primal_attention.bench.settings import DTYPES, BenchError, read_decay, read_length, read_width
from primal_attention.utils.errors import RunError

ABOUT = "Time attention layers on this machine."
ATTENTION = """Time one attention layer, forward + backward: Primal with every backend that runs here, softmax attention
(SDPA), Primal as published, the baselines (--baselines) and flash-linear-attention where it is installed. A Primal
backend whose results are wrong is not timed. Prints tables, writes NAME.json, NAME.png and NAME.svg."""
DECODE = """Time one more token after N tokens were read, and weigh the state: Primal's running sums against softmax
attention's cache of keys and values."""
GENERATE = """Time one more token of a whole language model after N tokens were read, and weigh its state: all-Primal
models in several modes against softmax with its cache of keys and values."""
MODEL = """Time training steps of whole models, softmax attention (SDPA) and Primal: wall time, GPU-busy time,
first step (compilation) and peak memory; count recompilations over ten lengths. Prints a table, writes NAME.json."""
COMMANDS = ("attention", "decode", "generate", "model")
PLOT = """Draw the picture of an earlier run again, for instance of one from a machine without matplotlib."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message} (see {self.prog} --help)")


def parser(prog: str) -> Parser:
    top = Parser(prog=prog, description=ABOUT, epilog=f"Example: {prog} attention --lengths 256 1024 4096")
    words = " | ".join((*COMMANDS, "plot"))
    commands = top.add_subparsers(dest="what", metavar=words, required=True, parser_class=Parser)

    def command(name: str, about: str, example: str) -> Parser:
        return commands.add_parser(
            name, prog=f"{prog} {name}", description=about, help=about.split(".")[0].split(":")[0].split(",")[0],
            epilog=f"Example: {prog} {name} {example}",
        )  # fmt: skip

    attention = command("attention", ATTENTION, "--lengths 256 1K 4K 16K 64K --widths 512:8 1024:16 --tokens 65536")
    common(attention, name="attention, with -causal, -baselines, -eager", lengths="256 1K 4K, on a GPU 16K 64K too")
    attention.add_argument("--tokens", type=word(read_length), help="per step; the batch follows (65,536 on a GPU)")
    attention.add_argument("--batch", type=int, help="sequences per step, instead of --tokens (1 on a CPU)")
    attention.add_argument("--causal", action="store_true", help="the causal layers; Primal not data-dependent")
    attention.add_argument("--data-independent", action="store_true", help="Primal with W_e, W_r themselves")
    attention.add_argument("--landmarks", type=int, default=300, help="Primal's (default 300)")
    limit = "a layer whose step took longer is not tried at longer lengths (default 2)"
    attention.add_argument("--limit", type=float, default=2.0, metavar="SECONDS", help=limit)
    decode = command("decode", DECODE, "--lengths 1K 16K 1M")
    common(decode, repeats=100, seconds=0.3, name="decode, with -baselines, -eager", lengths="1K … 64K, on a GPU 1M")
    decode.add_argument("--batch", type=int, default=1, help="sequences that decode at once (default 1)")
    generate = command("generate", GENERATE, "--lengths 1K 16K 1M --widths 128:4 --layers 2")
    common(generate, repeats=100, seconds=0.3, layer=False, name="generate", lengths="1K … 1M")
    generate.add_argument("--batch", type=int, default=1, help="sequences that decode at once (default 1)")
    generate.add_argument("--layers", type=int, default=6, help="blocks of the models (default 6)")
    model = command("model", MODEL, "--rows 512x1024 vit-eager-autocast --prepare")
    add: Callable[..., Any] = model.add_argument
    add("--rows", nargs="+", default=[], metavar="ROW", help="a row such as vit-eager-autocast or a model such as vit")
    add("--tokens", type=word(read_length), default=32768, help="per step (default 32K); fewer shorten the sequences")
    add("--layers", type=int, help="of every model, instead of its own")
    add("--repeats", type=int, default=5, help="whose median counts (default 5)")
    add("--steps", type=int, default=10, help="of each repetition (default 10)")
    add("--prepare", action="store_true", help="compile all rows in parallel first, to fill the compiler's cache")
    output(model, "model")
    plot = command("plot", PLOT, "results/bench/attention.json")
    plot.add_argument("file", type=Path, help="NAME.json of a run")
    return top


def common(
    command: Parser, *, name: str, lengths: str, repeats: int = 20, seconds: float = 0.5, layer: bool = True
) -> None:
    add: Callable[..., Any] = command.add_argument
    add("--lengths", nargs="+", type=word(read_length), metavar="N", help=f"tokens: 4096, 4K, 1M (default {lengths})")
    add("--widths", nargs="+", type=word(read_width), metavar="D:H", help="embed_dim:num_heads (default 512:8)")
    add("--dtype", choices=DTYPES, help="default bfloat16 on a GPU, float32 on a CPU")
    add("--rank", type=int, default=30, help="Primal's s (default 30)")
    if layer:
        add("--decay", type=word(read_decay), help="Primal's, causal: 'learned' or a number in (0, 1]")
        add("--baselines", action="store_true", help="all attentions of the paper's tables too")
    else:
        command.set_defaults(decay=None, baselines=False)
    known = "sdpa, sdpa-cudnn, …, published, primal (all backends), primal-fused, …, baseline, linear, …, fla"
    add("--only", nargs="+", default=[], metavar="NAME", help=known if layer else "softmax, primal, primal-mean, …")
    add("--eager", action="store_true", help="on a GPU: no CUDA graph, the host's launches included")
    add("--repeats", type=int, default=repeats, help=f"on a GPU (default {repeats})")
    add("--seconds", type=float, default=seconds, help=f"to measure each for, on a CPU (default {seconds})")
    add("--no-plot", action="store_true", help="tables and JSON only")
    output(command, name)


def output(command: Parser, name: str) -> None:
    """Options of every benchmark: where it runs and what it writes."""
    add: Callable[..., Any] = command.add_argument
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--seed", type=int, default=0, help="of weights and inputs (default 0)")
    add("--out", type=Path, default=Path("results/bench"), help="folder (default results/bench)")
    add("--name", help=f"of the files in it (default {name})")
    add("--commit", help="to write down where git cannot say it")


def word(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose complaint argparse passes on as it is."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except BenchError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def main(args: Sequence[str], prog: str = "primal bench") -> int:
    try:
        if "--rivals" in args:
            raise BenchError("--rivals is now called --baselines")
        found = parser(prog).parse_args(list(args))
        found.command = shlex.join([*prog.split(), *args])
        commands = {"attention": attention, "decode": decode, "generate": generate, "model": model, "plot": plot}
        commands[found.what](found)
    except (BenchError, RunError) as error:
        print(f"primal: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


SHARED = (
    "dtype",
    "device",
    "rank",
    "decay",
    "baselines",
    "eager",
    "repeats",
    "seconds",
    "seed",
    "out",
    "name",
    "batch",
)


def shared(found: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in (*SHARED, "commit", "command")}
    values |= {"plot": not found.no_plot, "only": tuple(found.only)}
    values |= {"lengths": tuple(found.lengths) if found.lengths else None}
    return values | ({"widths": tuple(found.widths)} if found.widths else {})


def attention(found: argparse.Namespace) -> None:
    from primal_attention.bench import run, tables
    from primal_attention.bench.settings import Settings

    if found.decay is not None and not found.causal:
        raise BenchError("--decay needs --causal: only the causal layers fade")
    settings = Settings(
        **shared(found),
        tokens=found.tokens,
        causal=found.causal,
        data_dependent=not (found.data_independent or found.causal),
        landmarks=found.landmarks,
        limit=found.limit,
    )
    report = run.run(settings)
    print(tables.attention(report))
    finish(report, settings.out / settings.file_name, settings.plot)


def decode(found: argparse.Namespace) -> None:
    from primal_attention.bench import decode, tables

    settings = decode.DecodeSettings(**shared(found))
    report = decode.run(settings)
    print(tables.decode(report))
    finish(report, settings.out / settings.file_name, settings.plot)


def generate(found: argparse.Namespace) -> None:
    from primal_attention.bench import generate, tables

    settings = generate.GenerateSettings(**shared(found), layers=found.layers)
    report = generate.run(settings)
    print(tables.decode(report))
    finish(report, settings.out / settings.file_name, settings.plot)


def model(found: argparse.Namespace) -> None:
    from primal_attention.bench import model, tables

    keep = ("tokens", "layers", "device", "repeats", "steps", "prepare", "seed", "out", "name", "commit", "command")
    settings = model.ModelSettings(rows=tuple(found.rows), **{name: getattr(found, name) for name in keep})
    print(tables.model(model.run(settings)))
    print(f"\nwritten: {settings.file}")


def plot(found: argparse.Namespace) -> None:
    from primal_attention.bench import saved, tables

    report = saved.read(found.file)
    if not report["rows"]:
        raise BenchError(f"{found.file}: rows is empty, so nothing can be drawn")
    print(tables.attention(report) if report["kind"] == "attention" else tables.decode(report))
    finish(report, found.file.with_suffix(""), plot=True, rows=False)


def finish(report: dict[str, Any], file: Path, plot: bool, rows: bool = True) -> None:
    written = [file.with_name(f"{file.name}.json")] if rows else []
    if plot:
        from primal_attention.bench.plot import draw

        try:
            written += draw(report, file)
        except ImportError:
            print("no picture: matplotlib is missing (pip install 'primal-attention[report]'); "
                  f"primal bench plot {file}.json draws it later", file=sys.stderr)  # fmt: skip
    if written:
        print("\nwritten: " + ", ".join(map(str, written)))
