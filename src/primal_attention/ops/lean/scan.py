"""The running sum s_i = f_i·s_{i−1} + z_i in place, forwards or backwards, for CPUs.

The tokens are cut into chunks. Position after position, all chunks at once, each token takes up its predecessor; then
chunk after chunk takes up the end of the one before. That is two passes over the data and a number of calls that grows
with the root of the length. Only earlier terms are ever added to later ones, so that not even a NaN gets from the
future into the past; a triangular matrix product would multiply it by zero and pass it on.
"""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor


def scan_(s: Tensor, factors: Tensor | None, carry: Tensor | None, reverse: bool = False) -> Tensor:
    """Overwrite z by s along dim 1, entered by `carry`, and return the last s. From the end when `reverse`.

    s: (B, N, C, p), factors: (B, N, C, 1) or None for ones, carry: (B, C, p).
    """
    length = s.shape[1]
    chunk = isqrt(length)
    chunks = length // chunk
    whole = slice(length - chunks * chunk, length) if reverse else slice(chunks * chunk)
    places = range(chunk - 1, -1, -1) if reverse else range(chunk)
    if chunks:
        z = s[:, whole].unflatten(1, (chunks, chunk))  # (B, M, K, C, p)
        f = None if factors is None else factors[:, whole].unflatten(1, (chunks, chunk))
        for before, here in pairwise(places):
            _take_up(z[:, :, here], None if f is None else f[:, :, here], z[:, :, before])
        fade = None if f is None else _products(f, reverse)
        for m in range(chunks - 1, -1, -1) if reverse else range(chunks):
            if carry is not None:
                _take_up(z[:, m], None if fade is None else fade[:, m], carry[:, None])
            carry = z[:, m, places[-1]]
    for i in range(whole.start - 1, -1, -1) if reverse else range(whole.stop, length):
        if carry is not None:
            _take_up(s[:, i], None if factors is None else factors[:, i], carry)
        carry = s[:, i]
    assert carry is not None
    return carry.clone()


def _take_up(here: Tensor, factor: Tensor | None, before: Tensor) -> None:
    if factor is None:
        here.add_(before)
    else:
        here.addcmul_(factor, before)


def _products(f: Tensor, reverse: bool) -> Tensor:
    """The products of the factors from the chunk's first token (its last when reversed) to each; f: (B, M, K, C, 1)."""
    return f.flip(2).cumprod(2).flip(2) if reverse else f.cumprod(2)


def decay_factors(decay: Tensor, valid: Tensor | None, batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """γ for q and for k at each token, 1 at padding: a padded token repeats what stood before it. (B, N, 2H, 1)."""
    factors = decay.to(dtype).repeat(2)[None, None, :, None].expand(batch, length, -1, -1)
    return factors if valid is None else torch.where(valid[:, :, None, None], factors, 1.0)


def backward_factors(factors: Tensor) -> Tensor:
    """What reaches token i from token i + 1 on the way back; from beyond the end, the final sums' gradient as it is."""
    return torch.cat([factors[:, 1:], torch.ones_like(factors[:, :1])], dim=1)
