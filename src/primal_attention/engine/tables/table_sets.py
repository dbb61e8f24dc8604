"""Which of a table's sets are on this disk, and what to say about those that are not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from primal_attention.data import d4rl, images, uea
from primal_attention.data.errors import DataError
from primal_attention.engine.arena import lra
from primal_attention.engine.errors import RunError
from primal_attention.engine.tables.table_kinds import Kind
from primal_attention.engine.text import language
from primal_attention.engine.vision import image


def check_sets(family: str, sets: Sequence[str], folder: Path | None) -> None:
    """Stop before the first run if a set is not there."""
    for name in sets:
        if not available(family, name, folder):
            try:
                if family == "lra":
                    lra.load(lra.LRAData(name, folder / name if folder else None))  # type: ignore[arg-type]
                elif family == "image":
                    images.load(folder or image.default_folder())
                elif family == "d4rl":
                    d4rl.load(name, folder)
                elif family == "lm":
                    language.load(language.LanguageData(name, folder))  # type: ignore[arg-type]
                else:
                    uea.load(name, folder)  # says where the archive is to be had
            except DataError as error:
                raise RunError(str(error).replace("--data.folder", "--data")) from None


def available(family: str, name: str, folder: Path | None) -> bool:
    if family == "image":
        return (folder or image.default_folder()).is_dir()
    if family == "d4rl":
        return d4rl.find(name, folder) is not None
    if family == "lm":
        return (folder or language.default_folder(name)).is_dir()
    if family == "lra":
        return (folder / name if folder else lra.default_folder(name)).is_dir()
    return uea.available(name, folder)


def default_sets(kind: Kind, folder: Path | None) -> Sequence[str]:
    """The paper's sets that can be run here; those that cannot are named."""
    here = [name for name in kind.sets if available(kind.family, name, folder)]
    gone = [name for name in kind.sets if name not in here]
    if not here:
        check_sets(kind.family, gone, folder)
    if gone:
        where, source = whereabouts(kind.family, gone[0])
        print(f"not in {folder or where}, left out: {', '.join(gone)} ({source})", file=sys.stderr)
    return here


def whereabouts(family: str, name: str) -> tuple[Path, str]:
    """Where a family's sets are looked for, and what tells how to get them."""
    if family == "lra":
        return lra.default_folder(name).parent, "docs/lra.md says how to get them"
    if family == "d4rl":
        return d4rl.default_folder(), "docs/reinforcement-learning.md says how to get them"
    return uea.default_folder(), f"the archive: {uea.ARCHIVE}"
