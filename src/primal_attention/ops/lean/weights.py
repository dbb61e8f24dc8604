"""The projection weights W_{e|X}, W_{r|X} of each sequence from its landmarks, and the way back to them, for CPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import wide
from ..sampling import landmark_indices, ragged_landmark_indices, token_of_rank


@lru_cache(maxsize=64)
def _even_places(length: int, count: int) -> Tensor:
    with torch.inference_mode(False):
        return landmark_indices(length, count)[None]


class Landmarks(NamedTuple):
    """f(X): the landmarks of each sequence among the rows of all tokens."""

    places: Tensor  # (B, n)
    empty: Tensor | None = None  # (B,): sequences that have none; their places mean nothing

    @classmethod
    def of(cls, x: Tensor, valid: Tensor | None, count: int, shift: Tensor | None = None) -> Landmarks:
        batch, length, _ = x.shape
        if shift is None and valid is None and batch == 1 and type(x) is Tensor and x.device.type == "cpu":
            return cls(_even_places(length, count))
        offset = torch.arange(batch, device=x.device)[:, None] * length
        if valid is None:
            return cls(landmark_indices(length, count, x.device, shift) + offset)
        lengths = valid.sum(dim=1)
        return cls(token_of_rank(valid, ragged_landmark_indices(lengths, count, shift)) + offset, lengths == 0)

    def rows(self, x: Tensor, heads: int) -> Tensor:
        """f(X_h) of all sequences side by side: (H, n, B·p), wide."""
        rows = x.view(-1, x.shape[2]).index_select(0, self.places.view(-1)).to(wide(x.dtype))
        rows = rows.view(*self.places.shape, heads, x.shape[2] // heads)
        if self.empty is not None:
            rows.masked_fill_(self.empty[:, None, None, None], 0.0)
        return rows.permute(2, 1, 0, 3).flatten(2)

    def add_into(self, grad_x: Tensor, grad: Tensor) -> None:
        """Bring the gradient of `rows` to x."""
        batch, _, d = grad_x.shape
        heads, count, _ = grad.shape
        rows = grad.view(heads, count, batch, d // heads).permute(2, 1, 0, 3)
        if self.empty is not None:
            rows = rows.masked_fill(self.empty[:, None, None, None], 0.0)
        rows = rows.reshape(batch * count, d).to(grad_x.dtype)
        grad_x.view(-1, d).index_add_(0, self.places.view(-1), rows)


class Projections:
    """W_{e|X} and W_{r|X} of each sequence, or W_e and W_r themselves where they do not depend on the data; wide."""

    def __init__(self, x: Tensor, landmarks: Landmarks | None, w_e: Tensor, w_r: Tensor) -> None:
        self.landmarks, self.sides = landmarks, (w_e.to(wide(x.dtype)), w_r.to(wide(x.dtype)))
        if landmarks is None:
            self.w_x = torch.stack([w.mT for w in self.sides])[None]  # (B or 1, 2, H, s, p)
            return
        heads, p = w_e.shape[0], x.shape[2] // w_e.shape[0]
        self.rows = landmarks.rows(x, heads)
        each = (torch.bmm(w.mT, self.rows).unflatten(2, (x.shape[0], p)) for w in self.sides)  # (H, s, B, p)
        self.w_x = torch.stack([side.permute(2, 0, 1, 3) for side in each], 1)

    def of(self, sequences: slice) -> Tensor:
        return self.w_x if self.landmarks is None else self.w_x[sequences]

    def backward(self, grad: Tensor, grad_x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of W_e and W_r; those of the landmarks are added into grad_x. grad: like w_x."""
        if self.landmarks is None:
            return grad[0, 0].mT, grad[0, 1].mT
        (w_e, w_r), (of_e, of_r) = self.sides, (side.permute(1, 2, 0, 3).flatten(2) for side in grad.unbind(1))
        if grad_x is not None:
            self.landmarks.add_into(grad_x, torch.bmm(w_e, of_e).baddbmm_(w_r, of_r))
        both = torch.bmm(self.rows, torch.cat([of_e, of_r], 1).mT)  # (H, n, 2s)
        return both.split(w_e.shape[2], dim=2)  # type: ignore[return-value]
