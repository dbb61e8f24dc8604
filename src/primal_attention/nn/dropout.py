"""Dropout that a compiler fuses into its neighbours for next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.dropping import draw_key, drop

MOST = 2**31  # numbers of a tensor whose places 32 bits tell apart


class Dropout(nn.Dropout):
    """As `nn.Dropout`. Compiled for a GPU it takes its masks from `ops.dropping`, else torch draws them."""

    def forward(self, x: Tensor) -> Tensor:
        hashed = torch.compiler.is_compiling() and x.is_cuda and self.training and not self.inplace
        if not hashed or not 0 < self.p < 1 or x.numel() >= MOST:
            return super().forward(x)
        return drop(x, self.p, draw_key(x.device))
