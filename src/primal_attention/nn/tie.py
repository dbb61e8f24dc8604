"""Let the objective's gradient pass only after the output's, where parameters are sharded.

FSDP gathers a layer's parameters when the gradient of the layer's *output* arrives. The objective leaves the layer by a
side door, so its gradient could come first and find the parameters gone. One autograd node for both closes that door.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, objective: Tensor) -> tuple[Tensor, Tensor]:
        # Not views: into those of a node with two outputs autograd forbids writing, and `y += x` is common.
        return y.data, objective.data

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_objective: Tensor) -> tuple[Tensor, Tensor]:
        return grad_y, grad_objective


def tie(y: Tensor, objective: Tensor) -> tuple[Tensor, Tensor]:
    """y and the objective, unchanged; in distributed training their gradients wait for each other."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled():
        return _Tie.apply(y, objective)  # type: ignore[no-any-return]
    return y, objective
