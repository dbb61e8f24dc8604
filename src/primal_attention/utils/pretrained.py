"""Trained weights that the package includes: one folder per name, with a model card in its README.md.

    PrimalForCausalLM.from_pretrained("primal-lm-tiny")
    PrimalClassifier.load("primal-uea-japanesevowels")
    AutoTokenizer.from_pretrained(pretrained_path("primal-lm-tiny"))

`examples/make_pretrained.py` makes the folders again.
"""

from __future__ import annotations

from pathlib import Path

from primal_attention.utils.errors import FileError

FOLDER = Path(__file__).parents[1] / "pretrained"
WEIGHTS = "model.safetensors"


def pretrained_names() -> list[str]:
    """Return the names of the models that the package includes."""
    return sorted(file.parent.name for file in FOLDER.glob(f"*/{WEIGHTS}"))


def pretrained_path(name: str | Path) -> Path:
    """Return the folder of a model that the package includes.

    Args:
        name: A name of `pretrained_names`, or a path. A path that exists is returned as it is, also if it has such a
            name.

    Returns:
        The path.

    Raises:
        FileError: If there is neither such a path nor such a model. It is a ValueError.
    """
    if Path(name).exists():
        return Path(name)
    if str(name) in (names := pretrained_names()):
        return FOLDER / name
    raise FileError(f"{name} does not exist, and the package includes no model of this name: it has {', '.join(names)}")
