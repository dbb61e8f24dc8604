"""What makes a kernel a PyTorch operator `primal::…`: with shapes that the compiler can follow, and with its gradient.

Eager code calls the same functions without going through the dispatcher, which costs as much host time as a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.sequences import Sequences

Tables = list[Tensor]  # the tensors of `Sequences`, in their order


def sequences_of(tables: Tables, single: bool) -> Sequences:
    return Sequences(*tables, single)  # type: ignore[arg-type, call-arg]


def floats(like: Tensor, *shape: Any) -> Tensor:
    """Unwritten float32."""
    return like.new_empty(shape, dtype=torch.float32)


def traced(tensor: Tensor) -> bool:
    """Whether somebody follows the call without its numbers, such as a compiler."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)


class Operator:
    """A kernel by name: `run` in eager mode, the registered operator where somebody traces."""

    def __init__(self, run: Callable[..., Any], fake: Callable[..., Any], name: str | None = None) -> None:
        self.run = run
        self.registered = torch.library.custom_op(f"primal::{name or run.__name__}", run, mutates_args=())
        self.registered.register_fake(fake)

    def __call__(self, *args: Any, **eager: Any) -> Any:
        """`eager`: what only the eager function may be told, because a registered operator changes no argument."""
        return self.registered(*args) if traced(args[0]) else self.run(*args, **eager)
