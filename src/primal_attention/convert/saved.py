"""Primalized transformers models on disk: `save_pretrained` as ever, and the way back.

The configuration remembers under `primal_attention` which modules were replaced and how, so config.json tells a reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

KEY = "primal_attention"


def record(model: nn.Module, name: str, arguments: dict[str, Any]) -> None:
    """Write into the configuration of the outermost transformers model around `name`, if there is one."""
    parts = name.split(".")
    for depth in range(len(parts)):
        outer = model.get_submodule(".".join(parts[:depth]))
        config = getattr(outer, "config", None)
        if hasattr(outer, "save_pretrained") and hasattr(config, "to_dict"):
            held = dict(getattr(config, KEY, None) or {})
            held[".".join(parts[depth:])] = {key: _plain(value) for key, value in arguments.items()}
            setattr(config, KEY, held)
            return


def _plain(value: Any) -> Any:
    """As JSON can hold it; a feature map that is a function is written by its name and cannot be read back."""
    if isinstance(value, (torch.Tensor, tuple)):
        return list(value.tolist() if isinstance(value, torch.Tensor) else value)
    if callable(value):
        return f"function {getattr(value, '__name__', type(value).__name__)}"
    return value


def load_primalized(model_class: Any, folder: str | Path, **from_pretrained_kwargs: Any) -> Any:
    """`model_class.from_pretrained` for a folder into which a primalized model was saved.

    Args:
        model_class: a model class of transformers, BertModel for example (not AutoModel).
        folder: what `save_pretrained` wrote.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        got = getattr(model_class, "__name__", repr(model_class))
        raise TypeError(f"model_class must be a model's own class such as BertModel (got {got})")
    settings = _settings(Path(folder))

    class Primal(model_class):  # type: ignore[misc]
        """The class with the replacements made before the weights arrive."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            with torch.device("cpu"):  # from_pretrained builds on the meta device, where no value can be checked
                _replace(self, settings)

    # By these transformers finds the names that older checkpoints of the class use, and that it writes again.
    Primal.__name__, Primal.__module__ = model_class.__name__, model_class.__module__
    model, info = Primal.from_pretrained(folder, **from_pretrained_kwargs, output_loading_info=True)
    model.__class__ = model_class
    wrong = {kind: sorted(info.get(kind, ())) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    lost = [n for n in wrong["missing_keys"] if any(part in n for part in ("primal.", "attention", "attn"))]
    if lost or wrong["unexpected_keys"] or wrong["mismatched_keys"]:
        first = str((lost + wrong["unexpected_keys"] + wrong["mismatched_keys"])[0])
        number = len(lost) + len(wrong["unexpected_keys"]) + len(wrong["mismatched_keys"])
        raise ValueError(f"the weights in {folder} do not fit {model_class.__name__}: {number} names, first {first}")
    _refill_fixed_decay(model, settings)
    return model


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "config.json"
    try:
        held = json.loads(file.read_text()).get(KEY)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no saved model: it has no config.json") from None
    if not held:
        raise ValueError(f"{file} names no Primal-Attention layers: load this model with from_pretrained")
    for name, arguments in held.items():
        if str(arguments.get("feature_map", "")).startswith("function "):
            raise ValueError(
                f"{name} has the {arguments['feature_map']} as feature map: code is not saved with weights"
            )
    return held


def _replace(model: Any, settings: dict[str, dict[str, Any]]) -> None:
    from .replace import primalize

    for name, arguments in settings.items():
        place = _place(model, name)
        primalize(model, lambda n, _, wanted=place: n == wanted, **arguments)  # type: ignore[misc]


def _place(model: Any, name: str) -> str:
    """The module of that name; a base model's folder may be read into a model with a head, and the other way round."""
    prefix = f"{model.base_model_prefix}."
    present = {n for n, _ in model.named_modules()}
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in present:
            return candidate
    raise ValueError(f"config.json names the layer {name}, which {type(model).__name__} does not have")


def _refill_fixed_decay(model: Any, settings: dict[str, dict[str, Any]]) -> None:
    """A decay that is given, not learned, is in no file, and from_pretrained leaves such buffers empty."""
    for name, arguments in settings.items():
        decay, layer = arguments.get("decay"), model.get_submodule(_place(model, name)).primal
        if decay is not None and not isinstance(decay, str):
            rates = torch.as_tensor(decay, dtype=torch.float64).expand(layer.num_heads)
            with torch.no_grad():
                layer.decay_logit.copy_(rates.logit())
