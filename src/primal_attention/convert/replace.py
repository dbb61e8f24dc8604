"""primalize: replace the softmax attention of a model by Primal-Attention.

    replaced = primalize(model, layers="last", rank=30)
    print(replaced.report)

The q, k and output weights are kept. W_e, W_r, Λ and the map of the scores are new and have to be trained (`distill`).
"""

from __future__ import annotations

import copy as copying
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..nn.objective import primal_layers
from ..nn.primal import PrimalAttention
from .adapters import PrimalHF, Projections, Refusal, Replacement, Site, find_site, known_names

Layers = Literal["last", "all"] | int | Sequence[int] | Callable[[str, nn.Module], bool]
READ_FROM_MODULE = ("embed_dim", "num_heads", "bias", "device", "dtype")
CONFIG_KEY = "primal_attention"


@dataclass(frozen=True)
class Row:
    """One replaced attention module."""

    name: str
    kind: str
    width: int
    key_width: int
    parameters_before: int
    parameters_after: int
    layer: PrimalAttention = field(repr=False)

    def flops(self, tokens: int) -> tuple[int, int]:
        """Return the operations before and after on one sequence; a multiply-add counts as two."""
        d, layer = self.width, self.layer
        softmax = 2 * tokens * d * (2 * d + 2 * self.key_width) + 4 * tokens * tokens * d  # maps; QKᵀ and its use
        maps = 2 * tokens * d * 3 * d  # q, k and the output
        weights = 4 * layer.landmarks * d * layer.rank if layer.data_dependent else 0  # W_{e|X}, W_{r|X}
        scores = 4 * tokens * d * layer.rank
        return softmax, maps + weights + scores + 4 * tokens * layer.rank * d  # the last: scores to heads


@dataclass(frozen=True)
class Report:
    """The replaced modules and their cost; str() is a table.

    Attributes:
        rows: one per replaced attention module.
        parameters_before: number of parameters of the model.
        parameters_after: number of parameters of the changed model.
        left: names of the attention modules that cannot be replaced, with the reasons.
    """

    rows: tuple[Row, ...]
    parameters_before: int
    parameters_after: int
    left: tuple[tuple[str, str], ...] = ()

    def flops(self, tokens: int) -> tuple[int, int]:
        """Return the operations of the replaced attention modules together, before and after."""
        before, after = zip(*(row.flops(tokens) for row in self.rows), strict=True)
        return sum(before), sum(after)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [5])
        lines = [
            f"{row.name:<{width}}  {row.kind}: {row.parameters_before:,} → {row.parameters_after:,} parameters"
            for row in self.rows
        ]
        lines.append(f"{'model':<{width}}  {self.parameters_before:,} → {self.parameters_after:,} parameters")
        for tokens in (512, 4096):
            before, after = (flops / 1e6 for flops in self.flops(tokens))
            lines.append(f"replaced attention modules at {tokens:,} tokens: {before:,.1f} → {after:,.1f} MFLOP")
        lines += [f"not replaced: {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)


class Primalized(list[str]):
    """The names of the replaced modules.

    Args:
        names: names of the replaced modules.
        model: the changed model.
        report: parameters and FLOPs before and after.
    """

    def __init__(self, names: Sequence[str], model: nn.Module, report: Report) -> None:
        super().__init__(names)
        self.model = model
        self.report = report


def primalize(model: nn.Module, layers: Layers = "last", *, copy: bool = False, **primal_kwargs: Any) -> Primalized:
    """Replace attention modules of a torch, transformers or timm model by Primal-Attention.

    Args:
        model: changed in place.
        layers: "last", "all", one or several indices among the replaceable attention modules (negative ones
            count from the end), or a predicate of a module's name and the module.
        copy: change a copy instead, which is `.model` of the result.
        primal_kwargs: arguments of `PrimalAttention`. `causal` is read from modules of transformers; pass it for those
            of torch and timm, which have no such attribute. Causal layers are data-dependent only with `max_length`.

    Returns:
        The names of the replaced modules: a list with `.report` (parameters and FLOPs before and after) and `.model`.

    Examples:
        >>> from torch import nn
        >>> from primal_attention import primalize
        >>> layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> list(primalize(encoder, layers="last", rank=8, landmarks=16))
        ['layers.2.self_attn']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module (got {type(model).__name__})")
    for name in READ_FROM_MODULE:
        if name in primal_kwargs:
            raise ValueError(f"{name} is read from the replaced module: leave it out of primalize(…)")
    if copy:
        model = copying.deepcopy(model)
    sites = list(_find_sites("", model, None, set()))
    refusals = [site for site in sites if isinstance(site, Refusal)]
    chosen = _choose(model, [site for site in sites if isinstance(site, Site)], refusals, layers)
    before = _count(model)
    built = [(site, *_build(site, primal_kwargs)) for site in chosen]  # all of them before the model is changed
    rows = []
    for site, layer, arguments in built:
        size, projections = _count(site.module), site.projections
        replacement = site.wrap(layer)
        replacement.train(site.module.training)
        if isinstance(replacement, PrimalHF):
            replacement.plain_name = next(name for name, p in site.module.named_parameters() if p.ndim == 2)
        _replace_module(model, site.module, replacement)
        _record(model, site.name, arguments)
        key_width = projections.embed_dim // projections.num_heads * projections.key_heads
        kind, width = type(site.module).__name__, projections.embed_dim
        rows.append(Row(site.name, kind, width, key_width, size, _count(replacement), layer))
    for module in model.modules():  # nested tensors have no mask, which the new layers need
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor &= not any(isinstance(m, Replacement) for m in module.modules())
    left = tuple((refusal.name, refusal.reason) for refusal in refusals)
    return Primalized([row.name for row in rows], model, Report(tuple(rows), before, _count(model), left))


def _find_sites(name: str, module: nn.Module, parent: nn.Module | None, seen: set[int]) -> Iterator[Site | Refusal]:
    """Yield the attention modules of a model in their order."""
    if id(module) in seen or isinstance(module, (Replacement, PrimalAttention)):
        return
    seen.add(id(module))
    site = find_site(name, module, parent)
    if site is not None:
        yield site
        return
    for key, child in module.named_children():
        yield from _find_sites(f"{name}.{key}" if name else key, child, module, seen)


def _choose(model: nn.Module, sites: list[Site], refusals: list[Refusal], layers: Layers) -> list[Site]:
    """Return the sites that `layers` selects; selecting what cannot be replaced is an error with the reason."""
    if callable(layers):
        for refusal in refusals:
            if layers(refusal.name, refusal.module):
                raise ValueError(str(refusal))
        chosen = [site for site in sites if layers(site.name, site.module)]
        if not chosen:
            names = ", ".join(site.name for site in sites)
            raise ValueError(f"the predicate layers accepts none of the model's attention modules ({names})")
    elif not sites:
        if refusals:
            raise ValueError(str(refusals[0]))
        count = len(primal_layers(model))
        reason = f"its {count} attention modules are Primal-Attention already" if count else "no attention was found"
        known = f"nn.MultiheadAttention, timm's Attention, and of transformers {known_names()}"
        raise ValueError(f"nothing to replace in {type(model).__name__}: {reason} (known: {known})")
    elif layers in ("last", "all"):
        chosen = sites if layers == "all" else sites[-1:]
    else:
        indices: list[Any] = list(layers) if isinstance(layers, Iterable) else [layers]
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise ValueError(f"layers must be 'last', 'all', indices or a predicate (got {layers!r})")
            if not -len(sites) <= index < len(sites):
                raise ValueError(f"layers has {index}, and the model has {len(sites)} replaceable attention modules")
        if not indices:
            raise ValueError("layers is empty: nothing to replace")
        chosen = [sites[i] for i in sorted({index % len(sites) for index in indices})]
    if chosen[0].name == "":
        kind = type(model).__name__
        raise ValueError(f"the model is itself an attention ({kind}): a module cannot be replaced in itself")
    return chosen


def _build(site: Site, primal_kwargs: dict[str, Any]) -> tuple[PrimalAttention, dict[str, Any]]:
    """Return the new layer and its arguments."""
    projections: Projections = site.projections
    arguments = dict(primal_kwargs)
    if projections.causal is not None and arguments.setdefault("causal", projections.causal) != projections.causal:
        raise ValueError(f"causal={arguments['causal']} contradicts {site.name}, which has causal={projections.causal}")
    if arguments.get("causal"):
        arguments.setdefault("data_dependent", arguments.get("max_length") is not None)
    arguments.setdefault("dropout", projections.dropout)
    try:
        return projections.build(**arguments), arguments
    except ValueError as error:
        raise ValueError(f"{site.name}: {error}") from None


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is; a shared module is in several places."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Saving: `save_pretrained` writes the replaced modules and their arguments into config.json. The weights do not fit the
# plain model, so that only `load_primalized` can read them.


def _record(model: nn.Module, name: str, arguments: dict[str, Any]) -> None:
    """Write the arguments into the configuration of the outermost transformers model around a module."""
    parts = name.split(".")
    for depth in range(len(parts)):
        outer = model.get_submodule(".".join(parts[:depth]))
        config = getattr(outer, "config", None)
        if hasattr(outer, "save_pretrained") and hasattr(config, "to_dict"):
            recorded = dict(getattr(config, CONFIG_KEY, None) or {})
            recorded[".".join(parts[depth:])] = {key: _to_json(value) for key, value in arguments.items()}
            setattr(config, CONFIG_KEY, recorded)
            return


def _to_json(value: Any) -> Any:
    """Convert an argument; a function is written by its name and cannot be read again."""
    if isinstance(value, (torch.Tensor, tuple)):
        return list(value.tolist() if isinstance(value, torch.Tensor) else value)
    return f"function {getattr(value, '__name__', type(value).__name__)}" if callable(value) else value


def load_primalized(model_class: Any, folder: str | Path, **from_pretrained_kwargs: Any) -> Any:
    """Load a primalized transformers model that `save_pretrained` wrote.

    Args:
        model_class: a model class of transformers such as BertModel, not AutoModel.
        folder: the folder that `save_pretrained` wrote.
        from_pretrained_kwargs: arguments of `model_class.from_pretrained`.

    Returns:
        The model.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        got = getattr(model_class, "__name__", repr(model_class))
        raise TypeError(f"model_class must be a model's own class such as BertModel (got {got})")
    settings = _read_settings(Path(folder))

    class Primal(model_class):  # type: ignore[misc]
        """The class with its attention modules replaced before the weights are loaded."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            setattr(self.config, CONFIG_KEY, None)  # primalize records the names in this class
            with torch.device("cpu"):  # from_pretrained builds on the meta device, where values cannot be checked
                for name, arguments in settings.items():
                    place = _find_module(self, name)
                    primalize(self, lambda n, _, place=place: n == place, **arguments)  # type: ignore[misc]
            ignored = set(getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ())
            for name, module in self.named_modules():
                if isinstance(module, PrimalHF):
                    module.is_loading = True
                    plain = f"{name.removeprefix(f'{self.base_model_prefix}.')}.{module.plain_name}"
                    ignored.add(f"{re.escape(plain)}$")
            self._keys_to_ignore_on_load_unexpected = ignored

    # transformers looks up renamed weights of older checkpoints by these.
    Primal.__name__, Primal.__module__ = model_class.__name__, model_class.__module__
    model, info = Primal.from_pretrained(folder, **from_pretrained_kwargs, output_loading_info=True)
    model.__class__ = model_class
    for module in model.modules():
        if isinstance(module, PrimalHF):
            module.is_loading = False
    # Only of attentions: a head may be new, and the head of another task is ignored, as by from_pretrained.
    names = [*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])]
    wrong = sorted(name for name in names if any(part in name for part in ("primal.", "attention", "attn")))
    if wrong:
        raise ValueError(
            f"the weights in {folder} do not fit {model_class.__name__}: {len(wrong)} names, first {wrong[0]}"
        )
    for layer in primal_layers(model).values():
        layer.restore_decay()
    return model


def _read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text()).get(CONFIG_KEY)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no saved model: it has no config.json") from None
    if not settings:
        raise ValueError(f"{file} names no Primal-Attention layers: load this model with from_pretrained")
    for name, arguments in settings.items():
        feature_map = str(arguments.get("feature_map", ""))
        if feature_map.startswith("function "):
            raise ValueError(f"{name} has the {feature_map} as feature map: code is not saved with weights")
    return settings


def _find_module(model: Any, name: str) -> str:
    """Return the name in this model: a base model may be loaded into one with a head, and the other way round."""
    prefix = f"{model.base_model_prefix}."
    present = {n for n, _ in model.named_modules()}
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in present:
            return candidate
    raise ValueError(f"config.json names the layer {name}, which {type(model).__name__} does not have")
