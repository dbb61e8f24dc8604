"""Padding of the baselines and of language models: which slots hold tokens, and moving the tokens to the front."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """The valid tokens of a batch. All fields are None if there is no padding."""

    present: Tensor | None = None  # (B, N), True at tokens
    valid: Tensor | None = None  # as `present`; an empty sequence counts its first, zeroed slot: no softmax is empty
    lengths: Tensor | None = None  # (B,), number of valid tokens, at least 1

    def zero_padding(self, t: Tensor) -> Tensor:
        """Zero the padding of t, (B, H, N, p)."""
        return t if self.valid is None else t.masked_fill(~self.valid[:, None, :, None], 0.0)

    def key_mask(self) -> Tensor | None:
        """Return the mask of scores over keys, (B, 1, 1, N), True at visible keys."""
        return None if self.valid is None else self.valid[:, None, None, :]

    def number(self, t: Tensor) -> Tensor:
        """Return the number of tokens, (B or 1, 1, 1), in the dtype of t (B, H, N, p)."""
        if self.lengths is None:
            return t.new_full((1, 1, 1), t.shape[2])
        return self.lengths.to(t.dtype)[:, None, None]


class Padding:
    """Zero the padding before a layer and after it; with `compact`, move the tokens to the front in their order."""

    def __init__(self, mask: Tensor, compact: bool) -> None:
        self.mask = mask
        present = ~mask
        lengths = present.sum(dim=1)
        slot = torch.arange(mask.shape[1], device=mask.device)
        self.order: Tensor | None = None
        if compact:
            self.order = mask.to(torch.uint8).argsort(dim=1, stable=True)
            present = slot < lengths[:, None]
        valid = present | ((lengths == 0)[:, None] & (slot == 0))
        self.tokens = Tokens(present, valid, lengths.clamp(min=1))

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the layer, (B, N, d)."""
        x = x.masked_fill(self.mask[..., None], 0.0)
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def leave(self, y: Tensor) -> Tensor:
        """Return the output of the layer in the original order, (B, N, d)."""
        if self.order is not None:
            y = y.gather(1, self.order.argsort(dim=1)[..., None].expand_as(y))
        return y.masked_fill(self.mask[..., None], 0.0)
