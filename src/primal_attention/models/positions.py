"""What learned positions are before training: noise, or waves in which near places are alike.

Which places are near is the same in every case of a task. From noise a model has to find it out by its labels; from
waves it starts with it, along a line for text and along rows and columns for an image read pixel by pixel.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Positions = Literal["random", "line", "grid"]
SHORTEST = 3.0  # places in a period


def starting_positions(kind: Positions, length: int, embed_dim: int, std: float) -> Tensor:
    """(length, embed_dim), `std` in root mean square; see `Positions`."""
    if kind == "random":
        return torch.empty(length, embed_dim).normal_(std=std)
    if kind == "line":
        return _line(length, embed_dim, std)
    return _grid(length, embed_dim, std)


def _line(length: int, embed_dim: int, std: float) -> Tensor:
    """Waves along the sequence, half of them sines and half cosines."""
    if embed_dim % 2:
        raise ValueError(f"positions='line' needs an even width (got embed_dim={embed_dim})")
    return math.sqrt(2) * std * _waves(length, embed_dim // 2)


def _grid(length: int, embed_dim: int, std: float) -> Tensor:
    """Half of the numbers are waves along the rows of a square image, the others along its columns."""
    side = math.isqrt(length)
    if side * side != length or embed_dim % 4:
        raise ValueError(
            "positions='grid' needs as many tokens as a square image has pixels and a width that 4 divides "
            f"(got {length} tokens, embed_dim={embed_dim})"
        )
    line = _waves(side, embed_dim // 4)
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    return math.sqrt(2) * std * torch.cat([rows, columns], dim=-1).reshape(length, embed_dim)


def _waves(places: int, waves: int) -> Tensor:
    """(places, 2 waves) sines and cosines whose periods fall from twice the line's length to `SHORTEST` places."""
    periods = 2.0 * places * (SHORTEST / (2.0 * places)) ** torch.linspace(0, 1, waves)
    angle = torch.arange(places)[:, None] * (2 * math.pi / periods)
    return torch.cat([angle.sin(), angle.cos()], dim=1)
