"""`primal spectrum`: singular values of the attention matrices of runs and saved transformers models."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from primal_attention.bench.measurement import first_line, new_figure
from primal_attention.cli.flags import Parser, positive, read_device
from primal_attention.convert.spectrum import Spectrum, spectrum
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import COUNT, read_json, read_text, write_csv
from primal_attention.utils.progress import Progress

ABOUT = """Singular values of each layer's and head's attention matrix: effective ranks as a table, all values as
NAME.csv, and the paper's four panels as NAME.png and NAME.svg. Several models are drawn into one picture."""
EXAMPLE = "Example: primal spectrum runs/uea/JapaneseVowels/primal-seed0 runs/uea/JapaneseVowels/softmax-seed0"
CLASSIFIERS = ("uea", "lra", "image")  # whose attention sees the whole input
BATCH_SIZE = 16
MIN_WORDS, MAX_TOKENS = 20, 128  # of a line of text; shorter lines are headings
SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
CONFIG = {"architectures": [str], "primal_attention?": ({...: dict}, None), "num_hidden_layers?": COUNT}
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
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--out", type=Path, default=Path("results/spectrum"), help="folder (default results/spectrum)")
    add("--name", default="spectrum", help="of the files in it (default spectrum)")
    options = parser.parse_args(list(args))
    device = read_device(options.device)
    sources = [load(folder, options) for folder in options.models]
    names = [source.label for source in sources]
    spectra: dict[str, Spectrum] = {}
    for i, source in enumerate(sources):
        label = f"{source.label} ({i + 1})" if names.count(source.label) > 1 else source.label
        with Progress(len(source.batches), label) as bar:
            try:
                model = source.model.to(device)
                spectra[label] = spectrum(model, source.batches, step=lambda: bar.advance(label))  # noqa: B023
            except (ValueError, RuntimeError, IndexError) as error:  # weights or inputs that do not fit
                raise RunError(f"{label}: {first_line(error)}") from error
        print(f"{label}\n{spectra[label]}")
    file = options.out / options.name
    rows = [{"model": label, **row} for label, layers in spectra.items() for row in layers.rows()]
    write_csv(file.with_name(f"{file.name}.csv"), rows)
    draw_panels(file, spectra)
    print(f"written: {file}.csv, {file}.png, {file}.svg")
    return 0


def load(folder: Path, options: argparse.Namespace) -> Source:
    """Load a run folder with its test set, or a saved transformers model with the lines in `options.data`."""
    if (folder / "config.yaml").exists():
        return load_run(folder, options.samples, BATCH_SIZE)
    if not (folder / "config.json").exists():
        raise RunError(f"{folder} is neither a run folder (config.yaml) nor a saved transformers model (config.json)")
    if options.data is None:
        raise RunError(f"{folder} needs inputs: --data FILE of text lines")
    settings = read_json(folder / "config.json", CONFIG)
    if "image_size" in settings:
        raise RunError(f"{folder} reads images: call primal_attention.spectrum(model, inputs) on pixels in Python")
    lines = [line.strip() for line in read_text(options.data).splitlines() if len(line.split()) >= MIN_WORDS]
    if not lines:
        raise DataError(f"{options.data} has no line of {MIN_WORDS} words or more")
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, batches = load_model(folder, settings), tokenize(folder, lines[: options.samples])
    except RunError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged folder
        raise RunError(f"{folder} cannot be loaded by transformers ({first_line(error)[:200]})") from error
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
    """Load a saved model from a class of transformers and a safetensors file only."""
    import transformers

    from primal_attention.convert.replace import CONFIG_KEY, load_primalized

    name = (settings["architectures"] or [""])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise RunError(f"{folder / 'config.json'} names the model {name!r}, which transformers does not have")
    if not (folder / "model.safetensors").is_file():
        hint = "save the model again with save_pretrained; pickled weights could run code and are not loaded"
        raise RunError(f"{folder} has no model.safetensors: {hint}")
    options: dict[str, Any] = {**SAFE, "use_safetensors": True, "attn_implementation": "eager"}
    if settings.get(CONFIG_KEY):
        return load_primalized(kind, folder, **options)
    loaded: Any = kind.from_pretrained(folder, **options, output_loading_info=True)
    model, info = loaded
    wrong = [str(key) for part in ("missing_keys", "mismatched_keys") for key in sorted(info.get(part, ()), key=str)]
    if wrong:
        raise RunError(f"{folder}: the weights do not fit {name}: {len(wrong)} names, first {wrong[0]}")
    return model


def tokenize(folder: Path, lines: Sequence[str]) -> list[Any]:
    """Return batches of lines, tokenised as the model in the folder needs them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **SAFE)
    names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((folder / name).is_file() for name in names):  # transformers would use an empty vocabulary
        raise RunError(f"{folder} holds no tokenizer: it has no {' or '.join(sorted(names))}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    form = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    return [dict(tokenizer(lines[i : i + BATCH_SIZE], **form)) for i in range(0, len(lines), BATCH_SIZE)]


def draw_panels(file: Path, models: Mapping[str, Spectrum]) -> None:
    """(a)–(c): explained variance of shallow, middle and deep layers, the last one dashed. (d): effective rank."""
    curves = {label: [layer.curve()[0] for layer in layers.values()] for label, layers in models.items()}
    shown = max(10, *(int((curve < EXPLAINED).sum()) + 1 for layers in curves.values() for curve in layers))
    titles = ("(a) shallow layers", "(b) middle layers", "(c) deep layers", "(d) effective rank")
    with new_figure(file, 1, len(titles)) as (figure, (axes,)):
        figure.suptitle("Attention matrices: mean over heads and inputs")
        for number, (label, layers) in enumerate(models.items()):
            for i, curve in enumerate(curves[label]):
                mean, style = curve[:shown].numpy(), "--" if i == len(layers) - 1 else "-"
                axes[3 * i // len(layers)].plot(range(1, len(mean) + 1), mean, f"C{number}{style}")
            ranks = [float(layer.effective_rank.mean()) for layer in layers.values()]
            axes[3].plot(range(len(ranks)), ranks, f"C{number}o-", label=label)
        for axis, title in zip(axes, titles, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("layer" if axis is axes[3] else "directions")
        axes[0].set_ylabel("cumulative explained variance")
        axes[3].set_ylim(bottom=0)
        axes[3].xaxis.get_major_locator().set_params(integer=True)
        axes[3].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
