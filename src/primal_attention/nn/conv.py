"""Short causal convolution, each channel on its own: y_i = b + Σ_j c_j ⊙ x_{i−j}, j = 0 … kernel − 1.

Attention with a state of constant size is good at the distant and blunt about the last few tokens; this is the reverse.
It streams: the last kernel − 1 inputs are its whole state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import checks

if TYPE_CHECKING:
    from ..parallel.context import Context


class ShiftedProducts(torch.autograd.Function):
    """y (B, N, d) of seen (B, past + N, d), weight (past + 1, d) and bias (d): one pass over y per row of the weight.

    A grouped convolution would want the channels first, and its gradient is slow for groups of one channel.
    """

    @staticmethod
    def forward(ctx: Any, seen: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(seen, weight)
        now, *before = _shifts(seen, len(weight))
        y = torch.addcmul(bias, now, weight[0])
        for row, then in zip(weight[1:], before, strict=True):
            y.addcmul_(then, row)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        seen, weight = ctx.saved_tensors
        of_seen = F.pad(grad * weight[0], (0, 0, len(weight) - 1, 0))
        for row, then in zip(weight[1:], _shifts(of_seen, len(weight))[1:], strict=True):
            then.addcmul_(grad, row)
        wide = torch.promote_types(grad.dtype, torch.float32)
        sums = [(grad * then).sum(dim=(0, 1), dtype=wide) for then in _shifts(seen, len(weight))]
        return of_seen, torch.stack(sums).to(weight.dtype), grad.sum(dim=(0, 1), dtype=wide).to(weight.dtype)


def _shifts(seen: Tensor, kernel: int) -> list[Tensor]:
    """What stood 0, 1, … kernel − 1 tokens ago, views of (B, N, d)."""
    n = seen.shape[1] - kernel + 1
    return [seen[:, start : start + n] for start in range(kernel - 1, -1, -1)]


class CausalConv(nn.Module):
    """Depthwise convolution over the past. Padding has to stand behind the tokens."""

    context: Context | None = None

    def __init__(self, embed_dim: int, kernel_size: int) -> None:
        super().__init__()
        checks.positive("kernel_size", kernel_size)
        self.embed_dim, self.kernel_size = embed_dim, kernel_size
        self.weight = nn.Parameter(torch.empty(kernel_size, embed_dim))  # row j weighs the input j tokens ago
        self.bias = nn.Parameter(torch.zeros(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.kernel_size**-0.5), self.kernel_size**-0.5)
        nn.init.zeros_(self.bias)

    def initial_state(self, batch_size: int) -> Tensor:
        """Nothing came before the first token: zeros, (B, kernel − 1, d)."""
        return self.weight.new_zeros(batch_size, self.kernel_size - 1, self.embed_dim)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:  # (B, N, d) → (B, N, d), or a pair with the state after the last token
        past, n = self.kernel_size - 1, x.shape[1]
        if self.context is not None:
            seen = self.context.halo(x, past, 0)  # the last tokens of the rank before this one
        else:
            seen = F.pad(x, (0, 0, past, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
        y = ShiftedProducts.apply(seen, self.weight.to(x.dtype), self.bias.to(x.dtype))
        if not return_state:
            return y
        if key_padding_mask is None:
            return y, seen[:, n:].clone()
        lengths = (~key_padding_mask).sum(dim=1, keepdim=True)
        rows = lengths + torch.arange(past, device=x.device)  # (B, kernel − 1): the last inputs of each sequence
        return y, seen.gather(1, rows[..., None].expand(-1, -1, self.embed_dim))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, kernel_size={self.kernel_size}"
