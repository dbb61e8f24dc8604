"""Which extra brings which package, for the hints of import errors."""

from __future__ import annotations

# By the name that is imported. A package of several extras is listed under the smallest one.
EXTRAS = {
    "PIL": "vision",
    "accelerate": "hf",
    "aeon": "timeseries",
    "gymnasium": "rl",
    "h5py": "rl",
    "imageio": "rl",
    "lightning": "train",
    "matplotlib": "report",
    "minari": "rl",
    "mujoco": "rl",
    "ray": "ray",
    "rich": "train",
    "safetensors": "train",
    "scipy": "ksvd",
    "sklearn": "ksvd",
    "tensorboard": "train",
    "timm": "vision",
    "tokenizers": "language",
    "torchvision": "vision",
    "transformers": "hf",
    "tyro": "train",
    "yaml": "train",
}


def install_hint(module: str | None, extra: str | None = None) -> str:
    """The command that installs a missing package.

    Args:
        module: The name whose import failed.
        extra: The extra of the command that needs it, preferred where it brings the package.
    """
    package = (module or "").partition(".")[0]
    own = EXTRAS.get(package)
    if own is None:
        return f"pip install {package}"
    known = {"train": {"train"}, "timeseries": {"timeseries", "ksvd", "train"}, "language": {"language", "train"}}
    brought = {name for part in (extra or "").split(",") for name in known.get(part, {part})}
    return f"pip install 'primal-attention[{extra if own in brought else own}]'"
