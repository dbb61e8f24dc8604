"""`primal spectrum`: singular values of the attention matrices of runs and saved transformers models."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primal_attention.cli.flags import Parser, positive, read_device
from primal_attention.convert.spectrum import Spectrum, kernel_map, spectrum
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import Number, read_json, write_atomically, write_csv
from primal_attention.utils.progress import Progress

ABOUT = """Singular values of each layer's and head's attention matrix: effective ranks as a table, all values as
NAME.csv, and the paper's four panels as NAME.png and NAME.svg. Several models are drawn into one picture."""
EXAMPLE = "Example: primal spectrum runs/uea/JapaneseVowels/primal-seed0 runs/uea/JapaneseVowels/softmax-seed0"
CLASSIFIERS = ("uea", "lra", "image")  # whose attention sees the whole input
SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
CONFIG = {
    "architectures": [str],
    "primal_attention?": ({...: dict}, None),
    "num_hidden_layers?": Number(integer=True, least=1, most=10_000),
}
COLOURS = ("#1d4ed8", "#c2410c", "#0d9488", "#7c3aed", "#64748b", "#be185d")
EXPLAINED = 0.999  # directions beyond this share are not drawn


@dataclass(frozen=True)
class Source:
    """A model and batches for it."""

    label: str
    model: nn.Module
    batches: list[Any]


def main(args: Sequence[str]) -> int:
    options = parse_options(args)
    place = read_head(options.map) if options.map else None
    device = read_device(options.device)
    sources = [load(folder, options) for folder in options.models]
    names = [source.label for source in sources]
    labels = [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    spectra = {label: compute(source, device) for label, source in zip(labels, sources, strict=True)}
    for label, layers in spectra.items():
        print(f"{label}\n{layers}")
    file = options.out / options.name
    table = file.with_name(f"{file.name}.csv")
    write_csv(table, [{"model": label, **row} for label, layers in spectra.items() for row in layers.rows()])
    files = [table, *draw_panels(file, spectra)]
    if place is not None:
        for label, source in zip(labels, sources, strict=True):
            name = f"{options.name}-map-{label.replace('/', '-')}"
            files += draw_map(options.out / name, label, source, *place)
    print("written: " + ", ".join(map(str, files)))
    return 0


def parse_options(args: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="primal spectrum", description=ABOUT, epilog=EXAMPLE)
    add: Any = parser.add_argument
    models = "folder of a run, or of a model that transformers saved"
    add("models", nargs="+", type=Path, metavar="MODEL_OR_RUN", help=models)
    add("--data", type=Path, help="for saved models: a file of text lines, or a folder of images")
    add("--samples", "--cases", type=positive, default=64, help="inputs to look at (default 64)")
    add("--batch", type=positive, default=16, help="inputs at a time (default 16)")
    add("--tokens", type=positive, default=128, help="texts are cut to this length (default 128)")
    head = "draw a head's kernel matrix and landmarks on one input (default -1:0)"
    add("--map", nargs="?", const="-1:0", metavar="LAYER:HEAD", help=head)
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--out", type=Path, default=Path("results/spectrum"), help="folder (default results/spectrum)")
    add("--name", default="spectrum", help="of the files in it (default spectrum)")
    return parser.parse_args(list(args))


def read_head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(":")
    try:
        return int(layer), int(head or 0)
    except ValueError:
        raise RunError(f"--map takes LAYER:HEAD, two numbers such as -1:0 (got {text!r})") from None


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
    return Source(folder.parent.name if folder.name == "model" else folder.name, model, batches)


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
    with quiet_transformers(f"{folder} cannot be loaded as {name}"):
        if settings.get(CONFIG_KEY):
            return load_primalized(kind, folder, **options)
        loaded: Any = kind.from_pretrained(folder, **options, output_loading_info=True)
    model, info = loaded
    wrong = [str(key) for part in ("missing_keys", "mismatched_keys") for key in sorted(info.get(part, ()), key=str)]
    if wrong:
        raise RunError(f"{folder}: the weights do not fit {name}: {len(wrong)} names, first {wrong[0]}")
    return model


def check_weights(folder: Path) -> None:
    """Refuse weights in any form but safetensors: unpickling can run code."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if not index.is_file():
        hint = "save the model again with save_pretrained; pickled weights could run code and are not loaded"
        raise RunError(f"{folder} has no model.safetensors: {hint}")
    for name in sorted(set(read_json(index, {"weight_map": {...: str}})["weight_map"].values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise RunError(f"{index}: weight_map must name safetensors files of this folder (got {name!a})")


@contextlib.contextmanager
def quiet_transformers(problem: str) -> Iterator[None]:
    """Suppress messages of transformers; turn its errors into one line that begins with the problem."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except RunError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged folder
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RunError(f"{problem} ({(lines or [type(error).__name__])[0][:200]})") from error


def read_texts(folder: Path, options: argparse.Namespace) -> list[Any]:
    """Return tokenised batches of the lines of a file with at least twenty words, which leaves out headings."""
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
    with quiet_transformers(f"the tokenizer of {folder} cannot be used"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
        names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
        if not any((folder / name).is_file() for name in names):  # transformers would use an empty vocabulary
            raise RunError(f"{folder} holds no tokenizer: it has no {' or '.join(sorted(names))}")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        form = {"padding": True, "truncation": True, "max_length": options.tokens, "return_tensors": "pt"}
        starts = range(0, len(chosen), options.batch)
        return [dict(tokenizer(chosen[start : start + options.batch], **form)) for start in starts]


def read_images(folder: Path, config: Any, options: argparse.Namespace) -> list[Any]:
    """Return batches of square images, normalised as the model's folder says, by default to [−1, 1]."""
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
    image.complain(broken, len(chosen), strict=False)
    squares = (read.resize((size, size), resample=3) for read in images if read is not None)  # 3: bicubic
    pixels = torch.stack([torch.from_numpy(image.to_array(square)) / 255 for square in squares])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return [{"pixel_values": batch} for batch in ((pixels - mean) / std).split(options.batch)]


def compute(source: Source, device: torch.device) -> Spectrum:
    source.model.to(device)
    with Progress(len(source.batches), source.label) as bar:
        try:
            return spectrum(source.model, source.batches, step=lambda: bar.advance(source.label))
        except (ValueError, RuntimeError, IndexError) as error:  # the last two: weights or inputs that do not fit
            raise RunError(f"{source.label}: {(str(error).splitlines() or ['no reason given'])[0]}") from error


def layer_groups(count: int) -> list[list[int]]:
    """Return the layers in three groups of about equal size, the later ones larger; fewer layers, fewer groups."""
    parts = min(3, count)
    bounds = [count * i // parts for i in range(parts + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def draw_panels(file: Path, models: Mapping[str, Spectrum]) -> list[Path]:
    """(a)–(c): explained variance of shallow, middle and deep layers, the last one dashed. (d): effective rank."""
    all_layers = [layer for layers in models.values() for layer in layers.values()]
    samples = max(layer.singular_values.shape[0] for layer in all_layers)
    shown = max(10, *(int((layer.curve()[0] < EXPLAINED).sum()) + 1 for layer in all_layers))
    figure, axes = pyplot().subplots(1, 4, figsize=(17.0, 3.9), layout="constrained")
    for colour, (label, named) in zip(itertools.cycle(COLOURS), models.items(), strict=False):
        layers = list(named.values())
        for axis, group in zip(axes, layer_groups(len(layers)), strict=False):
            for i in group:
                is_last = i == len(layers) - 1
                mean, deviation = (values[:shown].numpy() for values in layers[i].curve())
                index, high = range(1, len(mean) + 1), (mean + deviation).clip(max=1)
                axis.fill_between(index, mean - deviation, high, color=colour, alpha=0.10, linewidth=0)
                style: dict[str, Any] = {"linewidth": 2.6, "linestyle": "--"} if is_last else {"linewidth": 1.0}
                name = f"{label} L[{i}]" if is_last else label if i == group[0] else None
                axis.plot(index, mean, color=colour, label=name, **style)
        ranks = [layer.effective_rank for layer in layers]
        means, spread = [float(rank.mean()) for rank in ranks], [float(rank.std(correction=0)) for rank in ranks]
        axes[3].errorbar(range(len(layers)), means, spread, color=colour, capsize=3, linewidth=1.6, label=label)
        for i, layer in enumerate(layers):
            marker, face = ("s", colour) if layer.kind == "primal" else ("o", "white")
            axes[3].plot(i, means[i], marker, color=colour, markerfacecolor=face)
    titles = ["(a) shallow layers", "(b) middle layers", "(c) deep layers"]
    titles.append("(d) effective rank (square: Primal-Attention)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_visible(bool(axis.lines))
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xlabel("directions")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("cumulative explained variance")
    axes[3].set_xlabel("layer")
    axes[3].set_ylim(bottom=0)
    axes[3].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"Attention matrices: mean and deviation over heads and {samples} inputs")
    return save(figure, file)


def draw_map(file: Path, label: str, source: Source, layer: int, head: int) -> list[Path]:
    """Draw a head's kernel matrix, and where there are landmarks, their share in each token's output."""
    try:
        shown = kernel_map(source.model, source.batches, layer, head)
    except ValueError as error:
        raise RunError(f"--map {layer}:{head}: {error}") from error
    matrix, panels = shown.matrix.float().numpy(), 1 if shown.share is None else 2
    figure, axes = pyplot().subplots(1, panels, figsize=(5.4 * panels, 4.6), layout="constrained", squeeze=False)
    largest = float(abs(matrix).max()) or 1.0
    signed: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
    left = axes[0, 0]
    image = left.imshow(matrix, interpolation="nearest", **(signed if matrix.min() < 0 else {"cmap": "magma"}))
    figure.colorbar(image, ax=left, shrink=0.85)
    left.set(title="kernel matrix K", xlabel="token j (key)", ylabel="token i (query)")
    if shown.share is not None:
        right, share = axes[0, 1], shown.share.float().numpy()
        image = right.imshow(share, interpolation="nearest", aspect="auto", cmap="magma", vmin=0)
        figure.colorbar(image, ax=right, shrink=0.85)
        right.set(title="landmarks' share in each token's output", xlabel="landmark", ylabel="token")
    figure.suptitle(f"{label}: {shown.name}, head {head}")
    return save(figure, file)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, file: Path) -> list[Path]:
    """Write a figure as PNG and SVG."""
    files = [file.with_name(f"{file.name}.{form}") for form in ("png", "svg")]
    with pyplot().rc_context({"svg.hashsalt": "primal", "svg.fonttype": "none"}):
        for path, metadata in zip(files, (None, {"Date": None}), strict=True):
            write_atomically(path, partial(figure.savefig, format=path.suffix[1:], dpi=150, metadata=metadata))
    pyplot().close(figure)
    return files
