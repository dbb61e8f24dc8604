"""Embeddings of small vocabularies, bytes or pixels: their gradient as a matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 512  # tokens of a vocabulary up to which a one-hot product is cheaper than sorting the batch


class Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient is one product with the one-hot tokens, sequence by sequence.

    dtype: of that product's factors and of its result for a sequence; sums over sequences have the table's.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = len(table), dtype
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        chosen = ids.unsqueeze(-1) == torch.arange(ctx.rows, device=ids.device)  # (B, N, rows)
        with torch.autocast(grad.device.type, enabled=False):
            each = torch.bmm(chosen.to(ctx.dtype).mT, grad.to(ctx.dtype))
        return None, each.sum(dim=0, dtype=grad.dtype), None


class FewTokens(nn.Embedding):
    """An embedding of a small vocabulary.

    On a GPU torch sorts the tokens and adds up the gradients of each one's occurrences in turn, which takes long where
    most of a batch is one token: a black pixel, or padding.
    """

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cuda and self.num_embeddings <= FEW and torch.is_grad_enabled():
            # As autocast multiplies for the gradients of linear maps. Float16's range would need care.
            half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
            return Lookup.apply(ids, self.weight, torch.bfloat16 if half else self.weight.dtype)  # type: ignore[no-any-return]
        return super().forward(ids)
