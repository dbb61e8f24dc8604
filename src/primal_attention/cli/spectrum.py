"""`primal spectrum`: singular values of the attention matrices of runs and saved transformers models."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from primal_attention.cli.flags import read_device
from primal_attention.convert.spectrum import Spectrum, kernel_map, spectrum
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import Number, read_json, write_atomically, write_csv
from primal_attention.utils.progress import Progress

ABOUT = """Singular values of each layer's and head's attention matrix: effective ranks as a table, all values as
NAME.csv, and the paper's four panels as NAME.png and NAME.svg. Several models are drawn into one picture."""
COLOURS = ("#1d4ed8", "#c2410c", "#0d9488", "#7c3aed", "#64748b", "#be185d")
GROUPS = ("shallow", "middle", "deep")
EXPLAINED = 0.999  # directions beyond this share are not drawn
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
    top.add_argument("--samples", "--cases", type=positive, default=64, help="inputs to look at (default 64)")
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
    sources = [load(folder, options) for folder in options.models]
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


CLASSIFIERS = ("uea", "lra", "image")  # whose attention sees the whole input
PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack"}
SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
CONFIG = {
    "architectures": [str],
    "primal_attention?": ({...: dict}, None),
    "num_hidden_layers?": Number(integer=True, least=1, most=10_000),
}


@dataclass(frozen=True)
class Source:
    """A model and batches for it."""

    label: str
    model: nn.Module
    batches: list[Any]


def load(folder: Path, options: argparse.Namespace) -> Source:
    """Load a run folder with its test set, or a saved transformers model with the inputs in `options.data`."""
    if (folder / "config.yaml").exists():
        return load_run(folder, options.samples, options.batch)
    if not (folder / "config.json").exists():
        raise RunError(f"{folder} is neither a run folder (config.yaml) nor a saved transformers model (config.json)")
    if options.data is None:
        raise RunError(f"{folder} needs inputs: --data FILE of text lines, or a FOLDER of images")
    settings = read_json(folder / "config.json", CONFIG)
    model: Any = load_model(folder, settings)
    batches = read_images(folder, model.config, options) if "image_size" in settings else read_texts(folder, options)
    return Source(folder.parent.name if folder.name == "model" else folder.name, model, list(batches))


def load_run(folder: Path, samples: int, batch_size: int) -> Source:
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.config import override

    _, recipe = checkpoint.read_run(folder)
    if recipe.benchmark not in CLASSIFIERS:
        known = ", ".join(CLASSIFIERS)
        raise RunError(f"{folder} is a run of {recipe.benchmark}: primal spectrum looks at classifiers ({known})")
    (_, phase), *_ = recipe.phases()
    experiment = loop.build(override(phase, {"trainer.compile": "off"}))  # compiled blocks do not call hooks
    model = experiment.module.final_model
    loop.load_weights(model, folder / "model.safetensors")
    tests = experiment.test
    tests.batch_size, tests.shuffle_seed = batch_size, 0  # sets are often sorted by class
    batches: list[Any] = []
    for batch in tests:
        count = min(samples, int((batch[-1] >= 0).sum()))  # the last batch may be filled up
        batches.append(experiment.module.inputs(tuple(t[:count] for t in batch)))
        samples -= count
        if samples <= 0:
            break
    return Source(f"{folder.parent.name}/{folder.name}", model, batches)


def load_model(folder: Path, settings: dict[str, Any]) -> nn.Module:
    """Load a saved model from classes of transformers and safetensors files only."""
    import transformers

    from primal_attention.convert.replace import CONFIG_KEY, load_primalized

    name = (settings["architectures"] or [""])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise RunError(f"{folder / 'config.json'} names the model {name!r}, which transformers does not have")
    check_weights(folder)
    options: dict[str, Any] = {**SAFE, "use_safetensors": True, "attn_implementation": "eager"}
    try:
        with quiet_transformers():
            if settings.get(CONFIG_KEY):
                return load_primalized(kind, folder, **options)
            loaded: Any = kind.from_pretrained(folder, **options, output_loading_info=True)
            model, info = loaded
    except Exception as error:  # transformers raises many kinds for a damaged folder
        raise RunError(f"{folder} cannot be loaded as {name} ({first_line(error)})") from error
    wrong = [str(key) for part in ("missing_keys", "mismatched_keys") for key in sorted(info.get(part, ()), key=str)]
    if wrong:
        raise RunError(f"{folder}: the weights do not fit {name}: {len(wrong)} names, first {wrong[0]}")
    return model


def check_weights(folder: Path) -> None:
    """Refuse weights in any form but safetensors: unpickling can run code."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if index.is_file():
        for name in sorted(set(read_json(index, {"weight_map": {...: str}})["weight_map"].values())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise RunError(f"{index}: weight_map must name safetensors files of this folder (got {name!a})")
        return
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLED or f.name.endswith(".bin.index.json"))
    if pickled:
        hint = "save the model again with save_pretrained, which writes safetensors"
        raise RunError(f"{folder / pickled[0]} is pickled and could run code when it is loaded: {hint}")
    raise RunError(f"{folder} holds no weights: it has no model.safetensors")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def read_texts(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Yield tokenised batches of the lines of a file with at least twenty words, which leaves out headings."""
    from transformers import AutoTokenizer

    file = options.data
    if not file.is_file():
        raise DataError(f"{file} is not a file of text lines")
    try:
        with file.open(encoding="utf-8") as lines:
            texts = (line.strip() for line in lines if len(line.split()) >= 20)
            chosen = list(itertools.islice(texts, options.samples))
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text") from None
    if not chosen:
        raise DataError(f"{file} has no line of twenty words or more")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
            names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
            if not any((folder / name).is_file() for name in names):  # transformers would use an empty vocabulary
                raise RunError(f"{folder} holds no tokenizer: it has no {' or '.join(sorted(names))}")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            form = {"padding": True, "truncation": True, "max_length": options.tokens, "return_tensors": "pt"}
            for start in range(0, len(chosen), options.batch):
                yield dict(tokenizer(chosen[start : start + options.batch], **form))
    except RunError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged folder
        raise RunError(f"the tokenizer of {folder} cannot be used ({first_line(error)})") from error


def read_images(folder: Path, config: Any, options: argparse.Namespace) -> Iterator[Any]:
    """Yield batches of square images, normalised as the model's folder says, by default to [−1, 1]."""
    from primal_attention.data import image

    place = options.data
    files = sorted(f for f in place.rglob("*") if f.suffix.lower() in image.PICTURES) if place.is_dir() else []
    if not files:
        raise DataError(f"{place} is not a folder with images ({', '.join(sorted(image.PICTURES))})")
    file, numbers = folder / "preprocessor_config.json", ([Number()], None)
    settings = read_json(file, {"image_mean?": numbers, "image_std?": numbers}) if file.exists() else {}
    mean, std = (settings.get(key) or [0.5] * 3 for key in ("image_mean", "image_std"))
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise RunError(f"{file}: image_mean and image_std must have three values, the latter above 0")
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    chosen = files[:: max(1, len(files) // options.samples)][: options.samples]  # the first files are one class
    images = [image.read(file) for file in chosen]
    broken = [file for file, read in zip(chosen, images, strict=True) if read is None]
    image.complain(broken, len(chosen), strict=options.strict)
    squares = (read.resize((size, size), resample=3) for read in images if read is not None)  # 3: bicubic
    pixels = torch.stack([torch.from_numpy(image.to_array(square)) / 255 for square in squares])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    for batch in ((pixels - mean) / std).split(options.batch):
        yield {"pixel_values": batch}


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
    samples = {values.singular_values.shape[0] for s in found.values() for values in s.values()}
    return four_panels(file, models, f"Attention matrices: mean and deviation over heads and {max(samples)} inputs")


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
