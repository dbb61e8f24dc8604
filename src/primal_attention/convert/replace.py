"""primalize: Primal-Attention in place of the softmax attention of a model that somebody else has written.

    replaced = primalize(model, layers="last", rank=30)
    print(replaced.report)

q, k and output weights stay; W_e, W_r, Λ and the map of the scores are new and have to be trained (`distill`).
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn

from ..nn.primal import PrimalAttention
from . import hf_layers, saved, timm_layers, torch_layers
from .report import Report, row
from .sites import Refusal, Site, StandIn, build

Layers = Literal["last", "all"] | int | Sequence[int] | Callable[[str, nn.Module], bool]
ADAPTERS = (torch_layers.recognise, hf_layers.recognise, timm_layers.recognise)
FROM_THE_MODULE = ("embed_dim", "num_heads", "bias", "device", "dtype")


class Primalized(list[str]):
    """The names of the replaced modules, with the model that now holds Primal-Attention and a report."""

    def __init__(self, names: Sequence[str], model: nn.Module, report: Report) -> None:
        super().__init__(names)
        self.model = model
        self.report = report


def primalize(model: nn.Module, layers: Layers = "last", *, copy: bool = False, **primal_kwargs: Any) -> Primalized:
    """Replace attention modules of a torch, transformers or timm model by Primal-Attention.

    Args:
        model: changed in place.
        layers: "last", "all", a number or numbers among the replaceable attentions (negative ones count from the end),
            or a predicate of a module's name and the module.
        copy: leave `model` alone and change a copy, found as `.model` of the result.
        primal_kwargs: of `PrimalAttention`. `causal` is read from transformers' modules; torch's and timm's learn it
            from each call, so say it for them. Causal layers are data-dependent only where `max_length` is given.

    Returns:
        The names of the replaced modules: a list, with `.report` (parameters and FLOPs before and after) and `.model`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module (got {type(model).__name__})")
    for name in FROM_THE_MODULE:
        if name in primal_kwargs:
            raise ValueError(f"{name} is the replaced module's own: leave it out of primalize(…)")
    if copy:
        model = copying.deepcopy(model)
    sites, refused = find(model)
    chosen = choose(model, sites, refused, layers)
    before = count(model)
    built = [(site, _build(site, primal_kwargs)) for site in chosen]  # all of them before the model is touched
    rows = []
    for site, (layer, arguments) in built:
        size = count(site.module)
        stand_in = site.wrap(layer)
        stand_in.train(site.module.training)
        put(model, site.module, stand_in)
        saved.record(model, site.name, arguments)
        rows.append(
            row(site.name, type(site.module).__name__, size, count(stand_in), site.projections, layer, site.note)
        )
    torch_layers.prepare(model)
    left = tuple((r.name, r.reason) for r in refused)
    return Primalized([r.name for r in rows], model, Report(tuple(rows), before, count(model), left))


def find(model: nn.Module) -> tuple[list[Site], list[Refusal]]:
    """The attentions of a model in their order: those that can be replaced, and those that cannot."""
    found = list(_walk("", model, None, set()))
    return [f for f in found if isinstance(f, Site)], [f for f in found if isinstance(f, Refusal)]


def _walk(name: str, module: nn.Module, parent: nn.Module | None, seen: set[int]) -> Iterator[Site | Refusal]:
    if id(module) in seen or isinstance(module, (StandIn, PrimalAttention)):
        return
    seen.add(id(module))
    for recognise in ADAPTERS:
        result = recognise(name, module, parent)
        if result is not None:
            yield result
            return
    for key, child in module.named_children():
        yield from _walk(f"{name}.{key}" if name else key, child, module, seen)


def choose(model: nn.Module, sites: list[Site], refused: list[Refusal], layers: Layers) -> list[Site]:
    """The sites that `layers` asks for; asking for what cannot be replaced is an error with the reason."""
    if callable(layers):
        wanted = [r for r in refused if layers(r.name, r.module)]
        if wanted:
            raise ValueError(_cannot(wanted[0]))
        chosen = [s for s in sites if layers(s.name, s.module)]
        if not chosen:
            raise ValueError(f"layers, a predicate, accepts none of {_names(sites)}")
        return _inside(chosen)
    if not sites:
        if refused:
            raise ValueError(_cannot(refused[0]))
        already = sum(isinstance(m, PrimalAttention) for m in model.modules())
        found = f"its {already} attentions are Primal-Attention already" if already else "no attention was found"
        known = "nn.MultiheadAttention, timm's Attention, and of transformers " + ", ".join(sorted(hf_layers.READERS))
        raise ValueError(f"nothing to replace in {type(model).__name__}: {found} (known: {known})")
    if isinstance(layers, str):
        if layers not in ("last", "all"):
            raise ValueError(f"layers must be 'last', 'all', numbers or a predicate (got {layers!r})")
        return _inside(sites if layers == "all" else sites[-1:])
    numbers = [layers] if isinstance(layers, int) else list(layers)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(f"layers must be 'last', 'all', numbers or a predicate (got {layers!r})")
        if not -len(sites) <= number < len(sites):
            raise ValueError(f"layers has {number}, but the model has {len(sites)} replaceable attentions, from 0")
    if not numbers:
        raise ValueError("layers is empty: there is nothing to replace")
    return _inside([sites[i] for i in sorted({n % len(sites) for n in numbers})])


def _inside(sites: list[Site]) -> list[Site]:
    for site in sites:
        if not site.name:
            kind = type(site.module).__name__
            raise ValueError(f"the model is itself an attention ({kind}): a module cannot replace itself in place")
    return sites


def _build(site: Site, primal_kwargs: dict[str, Any]) -> tuple[PrimalAttention, dict[str, Any]]:
    kept, arguments = site.projections, dict(primal_kwargs)
    if kept.causal is not None and arguments.setdefault("causal", kept.causal) != kept.causal:
        raise ValueError(f"causal={arguments['causal']} contradicts {site.name}, which has causal={kept.causal}")
    if arguments.get("causal"):
        arguments.setdefault("data_dependent", arguments.get("max_length") is not None)
    elif arguments.get("decay") is not None or arguments.get("max_length") is not None:
        given = "decay" if arguments.get("decay") is not None else "max_length"
        raise ValueError(f"{given} is for causal attention, and {site.name} is not causal")
    arguments.setdefault("dropout", kept.dropout)
    return build(kept, **arguments), arguments


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands; a module that is shared stands in several places."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _cannot(refusal: Refusal) -> str:
    return f"{refusal.name or 'the model'} ({type(refusal.module).__name__}) cannot be replaced: {refusal.reason}"


def _names(sites: list[Site]) -> str:
    shown = ", ".join(s.name for s in sites[:3])
    return f"the model's {len(sites)} attentions ({shown}{', …' if len(sites) > 3 else ''})"
