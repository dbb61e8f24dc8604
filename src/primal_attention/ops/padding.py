"""Layouts of sequences in a tensor: padded (B, N, …) with a mask, or packed (total, …) with boundaries."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def check_boundaries(cu_seqlens: Tensor, total: int, max_seqlen: int | None = None) -> None:
    """Raise unless the boundaries start at 0, never decrease, end at `total` and differ by at most `max_seqlen`.

    Reading the values synchronises with the device. A tensor that passed is marked and not read again until it
    changes; torch.compile and the meta device skip the check.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be a 1-D int32 tensor of at least two boundaries (got {cu_seqlens.dtype}, "
            f"shape {tuple(cu_seqlens.shape)})"
        )
    if torch.compiler.is_compiling() or cu_seqlens.is_meta:
        return
    if not (max_seqlen is None or hasattr(max_seqlen, "__index__")):
        raise TypeError(f"max_seqlen must be an integer (got {max_seqlen!r})")
    # Inference tensors have no version counter, so a change could not be noticed: read them every time.
    mark = None if cu_seqlens.is_inference() else (cu_seqlens._version, total, max_seqlen)
    if mark is not None and getattr(cu_seqlens, "_primal_checked", None) == mark:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0 (got {bounds[0]})")
    for left, right in pairwise(bounds):
        if right < left:
            raise ValueError(f"cu_seqlens must not decrease (got {right} after {left})")
    if bounds[-1] != total:
        raise ValueError(f"cu_seqlens must end at the number of tokens, {total} (got {bounds[-1]})")
    longest = max(right - left for left, right in pairwise(bounds))
    if max_seqlen is not None and not max(longest, 1) <= max_seqlen:
        raise ValueError(f"max_seqlen must be at least {max(longest, 1)}, the longest of cu_seqlens (got {max_seqlen})")
    cu_seqlens._primal_checked = mark  # type: ignore[attr-defined]


def padded_positions(cu_seqlens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return, for each slot of a padded (sequences, width) layout, its packed row and whether it holds a token."""
    start, length = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    slot = torch.arange(width, device=cu_seqlens.device)
    valid = slot < length[:, None]  # (sequences, width)
    return torch.where(valid, start[:, None] + slot, 0), valid


def packed_positions(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return, for each packed row, its sequence and its position in that sequence."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    return sequence, row - cu_seqlens.long()[sequence]


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


def isolate_non_finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the tokens that are not finite; return also (B, N) NaN from the first of them on, 0 before it."""
    # The largest absolute value is NaN or inf if any element is.
    is_bad = ~x.detach().abs().amax(dim=-1).isfinite()
    nans = torch.where(is_bad.cumsum(dim=1) > 0, torch.nan, 0.0).to(x.dtype)
    return x.masked_fill(is_bad[..., None], 0.0), nans
