"""Which of a table's sets are on this disk, and what to say about those that are not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from primal_attention.data import uea
from primal_attention.data.errors import DataError
from primal_attention.engine import language, lra
from primal_attention.engine.errors import RunError
from primal_attention.engine.table_kinds import Kind


def check_sets(family: str, sets: Sequence[str], folder: Path | None) -> None:
    """Stop before the first run if a set is not there."""
    for name in sets:
        if not available(family, name, folder):
            try:
                if family == "lra":
                    lra.load(lra.LRAData(name, folder / name if folder else None))  # type: ignore[arg-type]
                elif family == "lm":
                    language.load(language.LanguageData(name, folder))  # type: ignore[arg-type]
                else:
                    uea.load(name, folder)  # says where the archive is to be had
            except DataError as error:
                raise RunError(str(error).replace("--data.folder", "--data")) from None


def available(family: str, name: str, folder: Path | None) -> bool:
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
        where = folder or (lra.default_folder(gone[0]).parent if kind.family == "lra" else uea.default_folder())
        source = "docs/lra.md says how to get them" if kind.family == "lra" else f"the archive: {uea.ARCHIVE}"
        print(f"not in {where}, left out: {', '.join(gone)} ({source})", file=sys.stderr)
    return here
