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


class Padding:
    """Zero the padding before a layer and after it; with `compact`, move the tokens to the front in their order."""

    def __init__(self, mask: Tensor, compact: bool) -> None:
        self.mask = mask
        present = ~mask
        self.lengths = present.sum(dim=1)
        slot = torch.arange(mask.shape[1], device=mask.device)
        self.order: Tensor | None = None
        if compact:
            self.order = mask.to(torch.uint8).argsort(dim=1, stable=True)
            present = slot < self.lengths[:, None]
        valid = present | ((self.lengths == 0)[:, None] & (slot == 0))
        self.tokens = Tokens(present, valid, self.lengths.clamp(min=1))

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the layer, (B, N, …), with zeros at padding, NaNs included."""
        x = _zero(x, self.mask)
        return x if self.order is None else _gather(x, self.order)

    def zero(self, t: Tensor) -> Tensor:
        """Zero the padding inside the layer, (B, N, …)."""
        assert self.tokens.present is not None
        return _zero(t, ~self.tokens.present)

    def leave(self, y: Tensor) -> Tensor:
        """Return the output of the layer in the original order, (B, N, …)."""
        return _zero(y if self.order is None else _gather(y, self.order.argsort(dim=1)), self.mask)


def _gather(t: Tensor, rows: Tensor) -> Tensor:
    return t.gather(1, rows.view(*rows.shape, *(1,) * (t.ndim - 2)).expand_as(t))


def _zero(t: Tensor, where: Tensor) -> Tensor:
    return t.masked_fill(where.view(*where.shape, *(1,) * (t.ndim - 2)), 0.0)
