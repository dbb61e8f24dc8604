"""`primal spectrum`: singular values of the attention matrices of runs and saved transformers models."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primal_attention.bench.measurement import first_line, new_figure
from primal_attention.cli.flags import Parser, positive, read_device
from primal_attention.convert.spectrum import Spectrum, spectrum
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import Number, read_json, write_csv
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
EXPLAINED = 0.999  # directions beyond this share are not drawn


@dataclass(frozen=True)
class Source:
    """A model and batches for it."""

    label: str
    model: nn.Module
    batches: list[Any]


def main(args: Sequence[str]) -> int:
    parser = Parser(prog="primal spectrum", description=ABOUT, epilog=EXAMPLE)
    add: Any = parser.add_argument
    models = "folder of a run, or of a model that transformers saved"
    add("models", nargs="+", type=Path, metavar="MODEL_OR_RUN", help=models)
    add("--data", type=Path, help="for saved models: a file of text lines")
    add("--samples", "--cases", type=positive, default=64, help="inputs to look at (default 64)")
    add("--batch", type=positive, default=16, help="inputs at a time (default 16)")
    add("--tokens", type=positive, default=128, help="texts are cut to this length (default 128)")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--out", type=Path, default=Path("results/spectrum"), help="folder (default results/spectrum)")
    add("--name", default="spectrum", help="of the files in it (default spectrum)")
    options = parser.parse_args(list(args))
    device = read_device(options.device)
    sources = [load(folder, options) for folder in options.models]
    names = [source.label for source in sources]
    labels = [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    spectra = {label: compute(source, device) for label, source in zip(labels, sources, strict=True)}
    for label, layers in spectra.items():
        print(f"{label}\n{layers}")
    file = options.out / options.name
    rows = [{"model": label, **row} for label, layers in spectra.items() for row in layers.rows()]
    write_csv(file.with_name(f"{file.name}.csv"), rows)
    draw_panels(file, spectra)
    print(f"written: {file}.csv, {file}.png, {file}.svg")
    return 0


def load(folder: Path, options: argparse.Namespace) -> Source:
    """Load a run folder with its test set, or a saved transformers model with the inputs in `options.data`."""
    if (folder / "config.yaml").exists():
        return load_run(folder, options.samples, options.batch)
    if not (folder / "config.json").exists():
        raise RunError(f"{folder} is neither a run folder (config.yaml) nor a saved transformers model (config.json)")
    if options.data is None:
        raise RunError(f"{folder} needs inputs: --data FILE of text lines")
    settings = read_json(folder / "config.json", CONFIG)
    if "image_size" in settings:
        raise RunError(f"{folder} reads images: call primal_attention.spectrum(model, inputs) on pixels in Python")
    model = load_model(folder, settings)
    label = folder.parent.name if folder.name == "model" else folder.name
    return Source(label, model, read_texts(folder, options))


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
        raise RunError(f"{problem} ({first_line(error)[:200]})") from error


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


def compute(source: Source, device: torch.device) -> Spectrum:
    source.model.to(device)
    with Progress(len(source.batches), source.label) as bar:
        try:
            return spectrum(source.model, source.batches, step=lambda: bar.advance(source.label))
        except (ValueError, RuntimeError, IndexError) as error:  # the last two: weights or inputs that do not fit
            raise RunError(f"{source.label}: {first_line(error)}") from error


def draw_panels(file: Path, models: Mapping[str, Spectrum]) -> None:
    """(a)–(c): explained variance of shallow, middle and deep layers, the last one dashed. (d): effective rank."""
    all_layers = [layer for layers in models.values() for layer in layers.values()]
    samples = max(layer.singular_values.shape[0] for layer in all_layers)
    shown = max(10, *(int((layer.curve()[0] < EXPLAINED).sum()) + 1 for layer in all_layers))
    titles = ("(a) shallow layers", "(b) middle layers", "(c) deep layers", "(d) effective rank")
    with new_figure(file, 1, len(titles)) as (figure, (axes,)):
        figure.suptitle(f"Attention matrices: mean and deviation over heads and {samples} inputs")
        for number, (label, named) in enumerate(models.items()):
            layers, colour = list(named.values()), f"C{number}"
            for i, layer in enumerate(layers):
                is_last = i == len(layers) - 1
                mean, deviation = (values[:shown].numpy() for values in layer.curve())
                axis, index = axes[3 * i // len(layers)], range(1, len(mean) + 1)
                high = (mean + deviation).clip(max=1)
                axis.fill_between(index, mean - deviation, high, color=colour, alpha=0.10, linewidth=0)
                axis.plot(index, mean, color=colour, linestyle="--" if is_last else "-")
            ranks = [layer.effective_rank for layer in layers]
            means, spread = [float(rank.mean()) for rank in ranks], [float(rank.std(correction=0)) for rank in ranks]
            axes[3].errorbar(range(len(layers)), means, spread, color=colour, capsize=3, marker="o", label=label)
        for axis, title in zip(axes, titles, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("directions")
            axis.set_visible(axis.has_data())  # one or two layers leave panels empty
        axes[0].set_ylabel("cumulative explained variance")
        axes[3].set_xlabel("layer")
        axes[3].set_ylim(bottom=0)
        axes[3].xaxis.get_major_locator().set_params(integer=True)
        axes[3].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
