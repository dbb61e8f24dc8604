"""f(X): which rows of a sequence become its landmarks.

Evenly spaced rows, deterministic. In double precision, with a = (N − 1) / (n − 1),

    index_i = trunc(a·i)                     for i < n // 2
    index_i = trunc((N − 1) − a·(n − 1 − i)) otherwise,

which is what `torch.linspace(0, N − 1, n, dtype=int)` computes. Rows repeat when N < n.

In training they may be moved at random (`random_shift`): each landmark is then any row of its own stretch of the
sequence, so that a sequence cannot be known again by its landmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def landmark_indices(
    length: int, landmarks: int, device: torch.device | str | None = None, shift: Tensor | None = None
) -> Tensor:
    """The `landmarks` evenly spaced rows of a sequence of `length` tokens."""  # (n,)
    lengths = torch.full((1,), length, dtype=torch.int64, device=device)
    return ragged_landmark_indices(lengths, landmarks, shift)[0]


def random_shift(landmarks: int, device: torch.device | str | None = None) -> Tensor:
    """How far each landmark moves, in steps from one to the next: uniform in [−½, ½); both ends stay. (n,)"""
    i = torch.arange(landmarks, device=device)
    return torch.where((i == 0) | (i == landmarks - 1), 0.0, torch.rand(landmarks, device=device) - 0.5)


def ragged_landmark_indices(lengths: Tensor, landmarks: int, shift: Tensor | None = None) -> Tensor:
    """The same rule for many sequences at once; an empty sequence gets row 0, which its caller must ignore.

    shift: (n,), as `random_shift` draws it, the same for all sequences.
    """
    last = (lengths.double() - 1).clamp(min=0)[:, None]  # (B, 1)
    i = torch.arange(landmarks, dtype=torch.float64, device=lengths.device)[None]  # (1, n)
    # By a tensor: by a number a GPU divides as a product with its reciprocal, and 196 · (1 / 196) is less than 1.
    step = last / i[:, -1:].clamp(min=1)
    if shift is not None:
        return torch.minimum((step * (i + shift)).round(), last).long()
    from_start = (step * i).trunc()
    # The absolute value is the product itself, but keeps a compiler from fusing it, unrounded, into the difference.
    from_end = (last - (step * (landmarks - 1 - i)).abs()).trunc()
    # A single landmark is the first row, as in linspace: there is no spacing to count back from the end.
    first_half = i < max(landmarks // 2, 1)
    return torch.where(first_half, from_start, from_end).long()  # (B, n)


def token_of_rank(valid: Tensor, rank: Tensor) -> Tensor:
    """Where the rank-th valid token stands. valid: (B, N) bool, rank: (B, n) → (B, n) positions in 0…N−1.

    A rank beyond the number of valid tokens gives the last position; callers mask it.
    """
    seen = valid.long().cumsum(dim=1)
    return torch.searchsorted(seen, rank + 1).clamp(max=valid.shape[1] - 1)
