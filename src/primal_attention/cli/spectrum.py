"""The words after `primal spectrum`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from primal_attention.cli.flags import read_device
from primal_attention.convert.kernel_map import kernel_map
from primal_attention.convert.sources import Source, load
from primal_attention.convert.spectrum import Spectrum, spectrum
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_csv
from primal_attention.utils.progress import Progress

ABOUT = """Singular values of each layer's and head's attention matrix: effective ranks as a table, all values as
NAME.csv, and the paper's four panels as NAME.png and NAME.svg. Several models are drawn into one picture."""
EXAMPLE = "Example: primal spectrum runs/uea/JapaneseVowels/primal-seed0 runs/uea/JapaneseVowels/softmax-seed0"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def parser() -> Parser:
    top = Parser(prog="primal spectrum", description=ABOUT, epilog=EXAMPLE)
    top.add_argument("models", nargs="+", type=Path, metavar="MODEL_OR_RUN",
                     help="folder of a run, or of a model that transformers saved")  # fmt: skip
    top.add_argument("--data", type=Path, help="for saved models: a file of text lines, or a folder of images")
    top.add_argument("--strict", action="store_true", help="an image that does not decode is an error, not skipped")
    top.add_argument("--cases", type=positive, default=64, help="inputs to look at (default 64)")
    top.add_argument("--batch", type=positive, default=16, help="inputs at a time (default 16)")
    top.add_argument("--tokens", type=positive, default=128, help="texts are cut to this length (default 128)")
    top.add_argument("--map", nargs="?", const="-1:0", metavar="LAYER:HEAD",
                     help="draw a head's kernel matrix and landmarks on one input (default -1:0)")  # fmt: skip
    top.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    top.add_argument("--out", type=Path, default=Path("results/spectrum"), help="folder (default results/spectrum)")
    top.add_argument("--name", default="spectrum", help="of the files in it (default spectrum)")
    return top


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {number})")
    return number


def main(args: Sequence[str]) -> int:
    options = parser().parse_args(list(args))
    place = read_head(options.map) if options.map else None
    device = read_device(options.device)
    sources = [
        load(
            m, data=options.data, cases=options.cases, batch=options.batch, tokens=options.tokens, strict=options.strict
        )
        for m in options.models
    ]
    found = {label: look(source, device) for label, source in zip(labels(sources), sources, strict=True)}
    for label, values in found.items():
        print(f"{label}\n{values}")
    rows = [{"model": label, **row} for label, values in found.items() for row in values.rows()]
    file = options.out / options.name
    write_csv(file.with_name(file.name + ".csv"), rows)
    files = [file.with_name(file.name + ".csv"), *draw(file, found)]
    if place is not None:
        for label, source in zip(found, sources, strict=True):
            files += draw_map(options.out, options.name, label, source, place)
    print("written: " + ", ".join(map(str, files)))
    return 0


def look(source: Source, device: torch.device) -> Spectrum:
    source.model.to(device)
    with Progress(len(source.batches), source.label) as bar:
        try:
            return spectrum(source.model, source.batches, step=lambda: bar.advance(source.label))
        except (ValueError, RuntimeError, IndexError) as error:  # the last two: weights or inputs that do not fit
            raise RunError(f"{source.label}: {(str(error).splitlines() or ['no reason given'])[0]}") from error


def draw(file: Path, found: dict[str, Spectrum]) -> list[Path]:
    from primal_attention.report.spectrum import Curve, four_panels

    def curve(layer: Any) -> Curve:
        mean, deviation = layer.curve()
        rank = layer.effective_rank
        return Curve(layer.kind, mean.tolist(), deviation.tolist(), float(rank.mean()), float(rank.std(correction=0)))

    models = {label: [curve(layer) for layer in values.values()] for label, values in found.items()}
    cases = {values.singular_values.shape[0] for s in found.values() for values in s.values()}
    return four_panels(file, models, f"Attention matrices: mean and deviation over heads and {max(cases)} inputs")


def draw_map(out: Path, name: str, label: str, source: Source, place: tuple[int, int]) -> list[Path]:
    from primal_attention.report.spectrum import head_map

    layer, head = place
    try:
        shown = kernel_map(source.model, source.batches, layer, head)
    except ValueError as error:
        raise RunError(f"--map {layer}:{head}: {error}") from error
    share = None if shown.share is None else shown.share.float().numpy()
    file = out / f"{name}-map-{label.replace('/', '-')}"
    return head_map(file, shown.matrix.float().numpy(), share, f"{label}: {shown.name}, head {head}")


def labels(sources: list[Source]) -> list[str]:
    """The sources' labels, numbered where two are alike."""
    plain = [source.label for source in sources]
    return [f"{label} ({i + 1})" if plain.count(label) > 1 else label for i, label in enumerate(plain)]


def read_head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(":")
    try:
        return int(layer), int(head or 0)
    except ValueError:
        raise RunError(f"--map takes LAYER:HEAD, two numbers such as -1:0 (got {text!r})") from None
