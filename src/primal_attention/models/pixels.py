"""Images read row by row as sequences: positions that know rows and columns, and lit pixels without the dark between.

Where black counts as padding, most of a line drawing is padding, and it stands between the tokens. `gather` leaves it
out: every attention here gives the same for tokens that stand together as for tokens with padding between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gather(ids: Tensor, padding: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `room` of each sequence's tokens (B, N), with their places in it and their padding mask, (B, room).

    Tokens keep their order, and padding fills what they leave free: `room` must hold the fullest sequence.
    """
    places = padding.to(torch.uint8).argsort(dim=1, stable=True)[:, :room]
    return ids.gather(1, places), places, padding.gather(1, places)


def grid_positions(length: int, embed_dim: int, std: float) -> Tensor:
    """(length, embed_dim) waves along the rows and along the columns of a square image, `std` in root mean square.

    A quarter of the numbers are sines and a quarter cosines of the row, the others of the column; periods fall from
    twice the side to 3 pixels. Near pixels have like positions, which a model else has to find out from its labels.
    """
    side = math.isqrt(length)
    if side * side != length or embed_dim % 4:
        raise ValueError(
            "positions='grid' needs as many tokens as a square image has pixels and a width that 4 divides "
            f"(got {length} tokens, embed_dim={embed_dim})"
        )
    waves = embed_dim // 4
    periods = 2.0 * side * (1.5 / side) ** torch.linspace(0, 1, waves)
    angle = torch.arange(side)[:, None] * (2 * math.pi / periods)
    line = torch.cat([angle.sin(), angle.cos()], dim=1)  # (side, embed_dim / 2)
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    return math.sqrt(2) * std * torch.cat([rows, columns], dim=-1).reshape(length, embed_dim)
