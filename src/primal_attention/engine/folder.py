"""The run folder's config.yaml: written at the start, read to resume or evaluate, refused when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import primal_attention
from primal_attention.bench.provenance import git_commit
from primal_attention.engine.config import Recipe, from_plain, to_plain
from primal_attention.engine.errors import RunError
from primal_attention.engine.files import write_text

FORMAT = 1
# What may differ between the two halves of an interrupted run: it changes no number, or, where a cluster gives another
# number of devices, only rounding and what dropout draws.
FREE = {
    "data.folder",
    "evaluation.video",
    "trainer.checkpoint_every",
    "trainer.checkpoint_steps",
    "trainer.context",
    "trainer.devices",
    "trainer.progress",
    "trainer.tensorboard",
}


def default(name: str, recipe: Recipe, root: Path = Path("runs")) -> Path:
    """runs/<recipe>/<variant>-seed<n>."""
    return root / name / f"{recipe.label()}-seed{recipe.seed}"


def fresh(folder: Path) -> Path:
    """The folder itself if no run is in it, else the first free name with a number."""
    number, place = 1, folder
    while (place / "config.yaml").exists():
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    return place


def newest(folder: Path) -> Path:
    """The last of the numbered folders that `fresh` has given out."""
    number, place = 1, folder
    while (following := folder.with_name(f"{folder.name}-{number + 1}")).joinpath("config.yaml").exists():
        number, place = number + 1, following
    return place


def write(folder: Path, recipe: Recipe, *, name: str, command: str, commit: str | None = None) -> None:
    """Put config.yaml into a new run folder; the one of a resumed run stays as it is."""
    file = folder / "config.yaml"
    if not file.exists():
        text = {
            "format": FORMAT,
            "version": primal_attention.__version__,
            "benchmark": recipe.benchmark,
            "recipe": name,
            "command": command,
            "commit": commit or git_commit(),
            "config": to_plain(recipe),
        }
        write_text(file, yaml.safe_dump(text, sort_keys=False, allow_unicode=True))


def origin(folder: Path) -> dict[str, Any]:
    """Command, commit and settings of a run for its summary, which can then stand without the folder."""
    text, recipe = read(folder)
    config = to_plain(recipe)
    config.get("data", {}).pop("folder", None)  # says something about a machine, nothing about a result
    return {"command": text.get("command"), "commit": text.get("commit"), "config": config}


def check(folder: Path, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or the same run without being asked to continue it."""
    if not (folder / "config.yaml").exists():
        return
    if not resume:
        raise RunError(f"{folder} already holds a run: add --resume to continue it, or choose another --out")
    _, before = read(folder)
    for field, old, new in differences(to_plain(before), to_plain(recipe)):
        if field not in FREE:
            flag = field.replace("_", "-")
            raise RunError(f"{folder} was started with --{flag} {old}, not {new}: resume with the same settings")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted names and values of the fields that differ."""
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield prefix + key, a, b


def read(folder: Path) -> tuple[dict[str, Any], Recipe]:
    """What config.yaml says, and the recipe in it."""
    from primal_attention.engine.registry import RECIPES

    file = folder / "config.yaml"
    try:
        text = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{folder} is not a run folder: it has no config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{file} is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(text, dict):
        raise RunError(f"{file} is not a run's configuration")
    check_format(text, file)
    kind = RECIPES.get(str(text.get("benchmark")))
    if kind is None:
        raise RunError(f"{file}: benchmark {text.get('benchmark')!r} is unknown to this version ({_version()})")
    return text, from_plain(kind, text.get("config"), f"{file}: ")


def check_format(content: Mapping[str, Any], file: Path) -> None:
    found = content.get("format")
    if found != FORMAT:
        raise RunError(
            f"{file} was written by version {content.get('version', 'unknown')} in format {found}; "
            f"this is version {_version()} and reads format {FORMAT}: use the version that wrote it"
        )


def _version() -> str:
    return primal_attention.__version__
