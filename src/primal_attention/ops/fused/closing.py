"""The second half of a block as one operator with its way back: `kernels.closing` for modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import backends
from ..dropping import draw_key
from ..kernels import closing
from .nodes import Gradients, Node, through
from .operator import Operator

CLOSE = Operator(closing.close, lambda x, *rest: torch.empty_like(x))
CLOSE_BACKWARD = Operator(
    closing.close_backward, lambda grad, x, a, key, *rest: tuple(torch.empty_like(t) for t in (x, a, *rest[:6]))
)
WIDTHS = (32, 64)  # of a token and of half its hidden numbers: two matrices of sums have to fit a program's registers
MOST = 2**24  # tokens whose places in the hash of dropout 32 bits tell apart


class Close(Node):
    """(x, a, key, the norm's weights, both layers' weights, p, ε, dtype) → y."""

    operator = CLOSE

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.p, ctx.eps, ctx.dtype = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        grads = CLOSE_BACKWARD(grad.contiguous(), *ctx.saved_tensors, ctx.p, ctx.eps, ctx.dtype)
        return *grads[:2], None, *grads[2:], None, None, None


def suits(x: Tensor, hidden: int) -> bool:
    """Whether the kernels are made for these tokens: narrow ones, in training, in autocast to 16 bits."""
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled("cuda")) or backends._old_gpu(x.device.index or 0):
        return False
    width = x.shape[-1]
    return width in WIDTHS and hidden in (2 * w for w in WIDTHS) and x.numel() < MOST * width


def close(x: Tensor, a: Tensor, norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear, p: float) -> Tensor:
    """y (B, N, d) of the residual stream x and of what attention says, a."""
    dtype = torch.get_autocast_dtype("cuda")
    flat, said = (t.reshape(-1, x.shape[-1]).contiguous() for t in (x, a))
    weights = norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias
    with backends.current(x.device), torch.autocast("cuda", enabled=False):
        y = through(Close, "close", flat, said, draw_key(x.device), *weights, p, norm.eps, dtype)
    return y.view(x.shape)  # type: ignore[no-any-return]
