"""A layer's weights in the type that autocast asks for: all in one launch, and their gradients back in one.

One by one, eight small casts and eight on the way back take as long as a kernel over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import casting
from ..kernels.config import INTERPRETED
from ..layer import Weights
from ..once import once
from .operator import Operator


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


def cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As an operator, for the compiler, which fuses no casts that read different tensors."""
    if not INTERPRETED and all(t.is_contiguous() for t in tensors):  # the interpreter does not round to bfloat16
        return casting.cast(tensors, dtype)
    return _copies(tensors, [dtype] * len(tensors))


CAST = Operator(cast, lambda tensors, dtype: [torch.empty_like(t, dtype=dtype) for t in tensors])


def _remember(ctx: Any, inputs: tuple[list[Tensor], torch.dtype], output: list[Tensor]) -> None:
    ctx.kind = inputs[0][0].dtype


def _back(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    made = iter(CAST.registered([g for g in grads if g is not None], ctx.kind))
    return [None if g is None else next(made) for g in grads], None


CAST.registered.register_autograd(_back, setup_context=_remember)


def cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights in `dtype`."""
    other = [i for i, w in enumerate(weights) if w is not None and w.dtype != dtype]
    given: list[Any] = [weights[i] for i in other]
    plain = all(w is None or type(w) in (Tensor, torch.nn.Parameter) for w in weights)
    compiling = torch.compiler.is_compiling()
    alike = all(w.dtype == given[0].dtype for w in given)
    if not plain or (compiling and not alike):  # sharded weights know how to cast themselves
        return Weights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
    if not given:
        return weights
    many = torch.ops.primal.cast(given, dtype) if compiling else Cast.apply(dtype, *given)  # type: ignore[no-untyped-call]
    made = dict(zip(other, many, strict=True))
    return Weights(*(made.get(i, w) for i, w in enumerate(weights)))  # type: ignore[arg-type]
