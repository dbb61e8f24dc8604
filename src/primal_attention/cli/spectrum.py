"""The words after `primal spectrum`."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from primal_attention.cli.flags import read_device
from primal_attention.convert.kernel_map import kernel_map
from primal_attention.convert.sources import Source, load
from primal_attention.convert.spectrum import Spectrum, spectrum
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_atomically, write_csv
from primal_attention.utils.progress import Progress

ABOUT = """Singular values of each layer's and head's attention matrix: effective ranks as a table, all values as
NAME.csv, and the paper's four panels as NAME.png and NAME.svg. Several models are drawn into one picture."""
EXAMPLE = "Example: primal spectrum runs/uea/JapaneseVowels/primal-seed0 runs/uea/JapaneseVowels/softmax-seed0"
COLOURS = ("#1d4ed8", "#c2410c", "#0d9488", "#7c3aed", "#64748b", "#be185d")
GROUPS = ("shallow", "middle", "deep")
EXPLAINED = 0.999  # where every curve is above it, nothing is left to see


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
    def curve(layer: Any) -> Curve:
        mean, deviation = layer.curve()
        rank = layer.effective_rank
        return Curve(layer.kind, mean.tolist(), deviation.tolist(), float(rank.mean()), float(rank.std(correction=0)))

    models = {label: [curve(layer) for layer in values.values()] for label, values in found.items()}
    cases = {values.singular_values.shape[0] for s in found.values() for values in s.values()}
    return four_panels(file, models, f"Attention matrices: mean and deviation over heads and {max(cases)} inputs")


def draw_map(out: Path, name: str, label: str, source: Source, place: tuple[int, int]) -> list[Path]:
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


@dataclass(frozen=True)
class Curve:
    """One layer: cumulative explained variance by the number of directions, and its effective rank."""

    kind: str
    mean: Sequence[float]
    deviation: Sequence[float]
    rank: float
    rank_deviation: float


def layer_groups(count: int) -> list[list[int]]:
    """The layers in three runs of about equal length, the later ones longer; fewer layers, fewer runs."""
    parts = min(3, count)
    bounds = [count * i // parts for i in range(parts + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def four_panels(file: Path, models: Mapping[str, Sequence[Curve]], title: str) -> list[Path]:
    """(a)–(c): explained variance of shallow, middle and deep layers, the last one dashed. (d): effective rank."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(17.0, 3.9), layout="constrained")
    curves = [curve for layers in models.values() for curve in layers]
    shown = max(map(needed, curves))
    lowest = min(curve.mean[0] - curve.deviation[0] for curve in curves)
    for colour, (label, layers) in zip(_colours(len(models)), models.items(), strict=True):
        groups = layer_groups(len(layers))
        for panel, group in enumerate(groups):
            for i in group:
                style = {"last": i == len(layers) - 1, "first": i == group[0]}
                _explained(axes[panel], layers[i], shown, i, colour, label, **style)
        index = list(range(len(layers)))
        ranks, spread = [c.rank for c in layers], [c.rank_deviation for c in layers]
        axes[3].errorbar(index, ranks, spread, fmt="-", color=colour, capsize=3, linewidth=1.6, label=label)
        for i, curve in enumerate(layers):
            face = colour if curve.kind == "primal" else "white"
            axes[3].plot(i, curve.rank, "s" if curve.kind == "primal" else "o", color=colour, markerfacecolor=face)
    for panel, (letter, name) in enumerate(zip("abc", GROUPS, strict=True)):
        axis = axes[panel]
        if not axis.lines:
            axis.set_visible(False)
            continue
        _plain(axis, f"({letter}) {name} layers")
        axis.set_xlabel("directions")
        axis.set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1.03)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0].set_ylabel("cumulative explained variance")
    _plain(axes[3], "(d) effective rank (square: Primal-Attention)")
    axes[3].set_xlabel("layer")
    axes[3].set_ylim(bottom=0)
    axes[3].xaxis.get_major_locator().set_params(integer=True)
    axes[3].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return _save(figure, file)


def needed(curve: Curve) -> int:
    """How many directions of a layer are worth drawing, ten at least."""
    return max(sum(share < EXPLAINED for share in curve.mean) + 1, 10)


def _explained(
    axis: Any, curve: Curve, shown: int, number: int, colour: str, label: str, *, last: bool, first: bool
) -> None:
    mean, deviation = curve.mean[:shown], curve.deviation[:shown]
    index = range(1, len(mean) + 1)
    low = [m - d for m, d in zip(mean, deviation, strict=True)]
    high = [min(1.0, m + d) for m, d in zip(mean, deviation, strict=True)]
    axis.fill_between(index, low, high, color=colour, alpha=0.10, linewidth=0)
    style: dict[str, Any] = {"linewidth": 2.6, "linestyle": "--"} if last else {"linewidth": 1.0}
    name = f"{label} L[{number}]" if last else label if first else None
    axis.plot(index, mean, color=colour, label=name, **style)


def head_map(file: Path, matrix: Any, share: Any | None, title: str) -> list[Path]:
    """A head's kernel matrix, and where there are landmarks, their share in each token's output."""
    plt = _pyplot()
    panels = 1 if share is None else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.4 * panels, 4.6), layout="constrained", squeeze=False)
    largest = float(abs(matrix).max()) or 1.0
    signed = float(matrix.min()) < 0
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest} if signed else {"cmap": "magma"}
    left = axes[0, 0]
    figure.colorbar(left.imshow(matrix, interpolation="nearest", **colours), ax=left, shrink=0.85)
    left.set(title="kernel matrix K", xlabel="token j (key)", ylabel="token i (query)")
    if share is not None:
        right = axes[0, 1]
        image = right.imshow(share, interpolation="nearest", aspect="auto", cmap="magma", vmin=0)
        figure.colorbar(image, ax=right, shrink=0.85)
        right.set(title="landmarks' share in each token's output", xlabel="landmark", ylabel="token")
    figure.suptitle(title)
    return _save(figure, file)


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _plain(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, file: Path) -> list[Path]:
    plt = _pyplot()
    files = [file.with_name(file.name + suffix) for suffix in (".png", ".svg")]
    with plt.rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none"}):
        for path, form, metadata in zip(files, ("png", "svg"), (None, {"Date": None}), strict=True):
            write_atomically(path, partial(figure.savefig, format=form, dpi=150, metadata=metadata))
    plt.close(figure)
    return files
