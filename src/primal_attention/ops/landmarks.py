"""f(X): the rows of a sequence that serve as its landmarks.

Evenly spaced rows, deterministic. In double precision, with a = (N − 1) / (n − 1),

    index_i = trunc(a·i)                     for i < n // 2
    index_i = trunc((N − 1) − a·(n − 1 − i)) otherwise,

which equals `torch.linspace(0, N − 1, n, dtype=int)`. Rows repeat when N < n. During training the landmarks may be
jittered (`random_shift`) by up to half the landmark spacing.
"""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # types of devices


def landmark_indices(
    length: int, landmarks: int, device: torch.device | str | None = None, shift: Tensor | None = None
) -> Tensor:
    """Return the landmark rows of one sequence of `length` tokens, (n,)."""
    lengths = torch.full((1,), length, dtype=torch.int64, device=device)
    return ragged_landmark_indices(lengths, landmarks, shift)[0]


def random_shift(landmarks: int, device: torch.device | str | None = None) -> Tensor:
    """Draw the jitter of each landmark in units of the spacing: uniform in [−½, ½), zero at both ends, (n,)."""
    i = torch.arange(landmarks, device=device)
    return torch.where((i == 0) | (i == landmarks - 1), 0.0, torch.rand(landmarks, device=device) - 0.5)


def ragged_landmark_indices(lengths: Tensor, landmarks: int, shift: Tensor | None = None) -> Tensor:
    """Return the landmark rows of sequences of different lengths, (B,) → (B, n).

    An empty sequence gets row 0, which the caller must ignore. `shift` (n,) is shared by all sequences.
    """
    device = lengths.device
    if device.type in WITHOUT_FLOAT64:
        lengths, shift = lengths.cpu(), None if shift is None else shift.cpu()
    last = (lengths.double() - 1).clamp(min=0)[:, None]  # (B, 1)
    i = torch.arange(landmarks, dtype=torch.float64, device=lengths.device)[None]  # (1, n)
    # Divide by a tensor: a GPU divides by a Python number through its reciprocal, and 196 · (1 / 196) is less than 1.
    step = last / i[:, -1:].clamp(min=1)
    if shift is not None:
        return torch.minimum((step * (i + shift)).round(), last).long().to(device)
    from_start = (step * i).trunc()
    # abs() does not change the product, but keeps a compiler from fusing it, unrounded, into the difference.
    from_end = (last - (step * (landmarks - 1 - i)).abs()).trunc()
    # A single landmark is the first row, as in linspace.
    is_first_half = i < max(landmarks // 2, 1)
    return torch.where(is_first_half, from_start, from_end).long().to(device)  # (B, n)


def position_of_rank(valid: Tensor, rank: Tensor) -> Tensor:
    """Return the position of the rank-th valid token. valid: (B, N) bool, rank: (B, n) → (B, n) in 0…N−1.

    A rank beyond the number of valid tokens gives the last position; callers mask it.
    """
    count = valid.long().cumsum(dim=1)
    return torch.searchsorted(count, rank + 1).clamp(max=valid.shape[1] - 1)
