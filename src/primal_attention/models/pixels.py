"""Images read pixel by pixel as sequences: the lit pixels without the dark between.

Where black counts as padding, most of a line drawing is padding, and it stands between the tokens. `gather` leaves it
out: every attention here gives the same for tokens that stand together as for tokens with padding between them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather(ids: Tensor, padding: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `room` of each sequence's tokens (B, N), with their places in it and their padding mask, (B, room).

    Tokens keep their order, and padding fills what they leave free: `room` must hold the fullest sequence.
    """
    places = padding.to(torch.uint8).argsort(dim=1, stable=True)[:, :room]
    return ids.gather(1, places), places, padding.gather(1, places)
