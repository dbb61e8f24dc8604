"""When the loss is no number: where it shows first, and what to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from primal_attention.nn.objective import primal_layers
from primal_attention.train.config import Recipe

if TYPE_CHECKING:
    from primal_attention.train.module import Batch


def remedies(recipe: Recipe, has_primal: bool) -> list[str]:
    """Flags that may help, with what they are now."""
    clip = recipe.optim.clip
    tries = [f"a smaller --optim.lr (now {recipe.optim.lr:g})"]
    if not clip or clip > 1:
        tries.append(f"--optim.clip 1 (now {clip:g})")
    if recipe.trainer.precision != "32-true":
        tries.append("--trainer.precision 32-true")
    if has_primal and recipe.eta:
        tries.append(f"a smaller --eta (now {recipe.eta:g})")
    return tries


def first_bad_layer(model: nn.Module, batch: Batch | None, forward: Callable[[Batch], object]) -> str:
    """Where the first number that is not finite stands: an input, a weight, a layer's output or a layer's J.

    forward: the pass over a batch.
    """
    if batch is not None and not all(torch.isfinite(t).all() for t in batch if t.is_floating_point()):
        return "the batch itself has values that are not finite"
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return f"weight {name!r} is not finite"
    for name, layer in primal_layers(model).items():
        if layer.objective is not None and not torch.isfinite(layer.objective).all():
            return f"the KSVD objective of layer {name!r} is not finite"
    if batch is None:
        return "the weights are finite"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    hooks = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return f"layer {found[0]!r} gives values that are not finite" if found else "only the loss itself is not finite"
