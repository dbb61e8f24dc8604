"""A layer's weights in the type that autocast asks for: all in one launch, and their gradients back in one.

One by one, eight small casts and eight on the way back take as long as a kernel over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layer import Weights
from ..once import once


def _copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    made = [torch.empty_like(t, dtype=kind) for t, kind in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(made, list(tensors))
    return made


class Cast(torch.autograd.Function):
    """Tensors of any types → all of one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kinds = [t.dtype for t in tensors]
        return tuple(_copies(tensors, [dtype] * len(tensors)))

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [i for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[i + 1]]
        made = _copies([grads[i] for i in there], [ctx.kinds[i] for i in there])  # type: ignore[misc]
        back = dict(zip(there, made, strict=True))
        return None, *(back.get(i) for i in range(len(grads)))


def cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights in `dtype`."""
    plain = all(w is None or type(w) in (Tensor, torch.nn.Parameter) for w in weights)
    if not plain or torch.compiler.is_compiling():  # sharded weights know how to cast themselves; a compiler fuses
        return Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
    other = [i for i, w in enumerate(weights) if w is not None and w.dtype != dtype]
    made = dict(zip(other, Cast.apply(dtype, *(weights[i] for i in other)), strict=True)) if other else {}  # type: ignore[no-untyped-call]
    return Weights(*(made.get(i, w) for i, w in enumerate(weights)))  # type: ignore[arg-type]
