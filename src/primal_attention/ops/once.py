"""The fast paths have gradients, but their gradients have none: asking for them must raise, not come out as zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward function that refuses `create_graph=True`.

    torch's own `once_differentiable` lets it pass where the incoming gradient is a constant, as that of a plain sum is.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("a fast path cannot differentiate twice: build the layer with backend='reference'")
        return backward(ctx, *grads)

    return guarded
