"""Models from disk with inputs to look at them on: run folders of this library, saved transformers models."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primal_attention.data import image as images
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import Number, read_json

CLASSIFIERS = ("uea", "lra", "image")  # whose attention sees the whole input
PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack"}
CONFIG = {
    "architectures": [str],
    "primal_attention?": ({...: dict}, None),
    "num_hidden_layers?": Number(integer=True, least=1, most=10_000),
}
SAFELY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


@dataclass(frozen=True)
class Source:
    """A model and batches for it."""

    label: str
    model: nn.Module
    batches: list[Any]


def load(folder: Path, *, data: Path | None, cases: int, batch: int, tokens: int, strict: bool = False) -> Source:
    """Whatever the folder holds; at most `cases` inputs in batches, texts cut to `tokens`."""
    if (folder / "config.yaml").exists():
        return _run(folder, cases, batch)
    if (folder / "config.json").exists():
        return _saved(folder, data, cases, batch, tokens, strict)
    raise RunError(f"{folder} is neither a run folder (config.yaml) nor a saved transformers model (config.json)")


def _run(folder: Path, cases: int, batch: int) -> Source:
    """A finished run, on its test set."""
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.config import override

    _, recipe = checkpoint.read_run(folder)
    if recipe.benchmark not in CLASSIFIERS:
        kinds = ", ".join(CLASSIFIERS)
        raise RunError(f"{folder} is a run of {recipe.benchmark}: primal spectrum looks at classifiers ({kinds})")
    (_, phase), *_ = recipe.phases()
    # Hooks into compiled blocks would not be called.
    experiment = loop.build(override(phase, {"trainer.compile": "off"}))
    model = experiment.module.final_model
    loop.load_weights(model, folder / "model.safetensors")
    tests = experiment.test
    tests.batch_size, tests.shuffle_seed = batch, 0  # sets are often sorted by class
    parts: list[Any] = []
    for batch_of_tests in tests:
        left = min(cases, int((batch_of_tests[-1] >= 0).sum()))  # it may be filled up with rows that nobody counts
        parts.append(experiment.module.inputs(tuple(t[:left] for t in batch_of_tests)))
        cases -= left
        if cases <= 0:
            break
    return Source(f"{folder.parent.name}/{folder.name}", model, parts)


def _saved(folder: Path, data: Path | None, cases: int, batch: int, tokens: int, strict: bool) -> Source:
    settings = read_json(folder / "config.json", CONFIG)
    if data is None:
        raise RunError(f"what shall {folder} look at? --data FILE of text lines, or a FOLDER of images")
    model = _model(folder, settings)
    parts = (
        _images(data, folder, model.config, cases, batch, strict)
        if "image_size" in settings
        else _texts(data, folder, cases, batch, tokens)
    )
    return Source(folder.parent.name if folder.name == "model" else folder.name, model, list(parts))


def _model(folder: Path, settings: dict[str, Any]) -> nn.Module:
    """The saved model, built from transformers' own classes and safetensors files only."""
    import transformers

    from primal_attention.convert.saved import KEY, load_primalized

    name = (settings["architectures"] or [""])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise RunError(f"{folder / 'config.json'} names the model {name!r}, which transformers does not have")
    check_weights(folder)
    options: dict[str, Any] = {**SAFELY, "use_safetensors": True, "attn_implementation": "eager"}
    try:
        with _quiet():
            if settings.get(KEY):
                return load_primalized(kind, folder, **options)
            loaded: Any = kind.from_pretrained(folder, **options, output_loading_info=True)
            model, info = loaded
    except Exception as error:  # transformers raises a dozen kinds for a damaged folder
        raise RunError(f"{folder} cannot be loaded as {name} ({_first_line(error)})") from error
    lost = [str(key) for part in ("missing_keys", "mismatched_keys") for key in sorted(info.get(part, ()), key=str)]
    if lost:
        raise RunError(f"{folder}: the weights do not fit {name}: {len(lost)} names, first {lost[0]}")
    return model


def check_weights(folder: Path) -> None:
    """Refuse weights in any form but safetensors: unpickling can run code."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if index.is_file():
        names = set(read_json(index, {"weight_map": {...: str}})["weight_map"].values())
        for name in sorted(names):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise RunError(f"{index}: weight_map must name safetensors files of this folder (got {name!a})")
        return
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLED or f.name.endswith(".bin.index.json"))
    if pickled:
        hint = "save the model again with save_pretrained, which writes safetensors"
        raise RunError(f"{folder / pickled[0]} is pickled and could run code when it is loaded: {hint}")
    raise RunError(f"{folder} holds no weights: it has no model.safetensors")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal."""
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


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _texts(file: Path, folder: Path, cases: int, batch: int, tokens: int) -> Iterator[Any]:
    from transformers import AutoTokenizer

    if not file.is_file():
        raise DataError(f"{file} is not a file of text lines")
    try:
        with file.open(encoding="utf-8") as lines:
            # Headings and other scraps would make sequences of three tokens.
            long = (line.strip() for line in lines if len(line.split()) >= 20)
            texts = list(itertools.islice(long, cases))
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text") from None
    if not texts:
        raise DataError(f"{file} has no line of twenty words or more")
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **SAFELY)
            names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
            if not any((folder / name).is_file() for name in names):  # transformers would start an empty vocabulary
                raise RunError(f"{folder} holds no tokenizer: it has no {' or '.join(sorted(names))}")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            for start in range(0, len(texts), batch):
                part = texts[start : start + batch]
                yield dict(tokenizer(part, padding=True, truncation=True, max_length=tokens, return_tensors="pt"))
    except RunError:
        raise
    except Exception as error:  # as above
        raise RunError(f"the tokenizer of {folder} cannot be used ({_first_line(error)})") from error


def _images(place: Path, folder: Path, config: Any, cases: int, batch: int, strict: bool) -> Iterator[Any]:
    """Square pictures in [−1, 1], or with the folder's own mean and deviation."""
    files = sorted(f for f in place.rglob("*") if f.suffix.lower() in images.PICTURES) if place.is_dir() else []
    if not files:
        raise DataError(f"{place} is not a folder with images ({', '.join(sorted(images.PICTURES))})")
    said = folder / "preprocessor_config.json"
    triple = ([Number()], None)
    normal = read_json(said, {"image_mean?": triple, "image_std?": triple}) if said.exists() else {}
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    stride = max(1, len(files) // cases)  # spread over the folder: its first files are one class
    pictures = read_images(files[::stride][:cases], size, strict)
    mean, std = (normal.get(key) or [0.5] * 3 for key in ("image_mean", "image_std"))
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise RunError(f"{said}: image_mean and image_std must have three values, the latter above 0")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    stack = torch.stack(pictures)
    for part in ((stack - mean) / std).split(batch):
        yield {"pixel_values": part}


def read_images(files: list[Path], size: int, strict: bool) -> list[torch.Tensor]:
    """(3, size, size) in [0, 1]; a file that does not decode is named and skipped, or an error if `strict`."""
    found = [images.read(file) for file in files]
    images.complain(
        [file for file, image in zip(files, found, strict=True) if image is None], len(files), strict=strict
    )
    squares = (image.resize((size, size), resample=3) for image in found if image is not None)  # 3: bicubic
    return [torch.from_numpy(images.to_array(square)) / 255 for square in squares]
