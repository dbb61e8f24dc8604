"""Augmentation of padded series on the device, one random draw per case; padding never moves into the series."""

from __future__ import annotations

import torch
from torch import Tensor


def warp_time(x: Tensor, mask: Tensor, strength: float, knots: int = 4, crop: float = 0.1) -> Tensor:
    """Read each series along a smooth random path through its own valid steps, the ends cut by up to `crop` in all.

    The path is the running sum of positive random speeds, so time never turns back. Padding stands on the right.
    """
    batch, steps, _ = x.shape
    lengths = (~mask).sum(dim=1)  # (B,)
    knot_speed = torch.exp(strength * torch.randn(batch, 1, knots + 2, device=x.device))
    speed = torch.nn.functional.interpolate(knot_speed, steps, mode="linear", align_corners=True).squeeze(1)
    speed = speed.masked_fill(mask, 0.0)
    path = speed.cumsum(dim=1) - speed[:, :1]
    path = path / path.amax(dim=1, keepdim=True).clamp(min=1e-6)  # (B, N) from 0 to 1 over the valid steps
    width = 1 - crop * torch.rand(batch, 1, device=x.device)
    start = (1 - width) * torch.rand(batch, 1, device=x.device)
    position = (start + width * path) * (lengths - 1).clamp(min=0).unsqueeze(1)
    low = position.floor().long()
    high = torch.minimum(low + 1, (lengths - 1).clamp(min=0).unsqueeze(1))
    part = (position - low).unsqueeze(-1)
    rows = torch.arange(batch, device=x.device).unsqueeze(1)
    warped = torch.lerp(x[rows, low], x[rows, high], part.to(x.dtype))
    return warped.masked_fill(mask.unsqueeze(-1), 0.0)


def scale_and_shift(x: Tensor, deviation: float) -> Tensor:
    """A random factor around 1 and a random offset around 0 for each case and channel."""
    batch, _, channels = x.shape
    factor = 1 + deviation * torch.randn(batch, 1, channels, device=x.device)
    offset = deviation * torch.randn(batch, 1, channels, device=x.device)
    return x * factor + offset


def jitter(x: Tensor, deviation: float) -> Tensor:
    """Independent noise on every value."""
    return x + deviation * torch.randn_like(x)


def mix(x: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix every case with a partner: (mixed series, its mask, partner index, own share (B,)).

    A step is valid where either case has one, and a shorter case counts as zero beyond its end.
    """
    # Neither a permutation by randperm nor a look at the parameters' range: a recorded step cannot wait for the device.
    partner = torch.rand(len(x), device=x.device).argsort()
    concentration = torch.full((len(x),), beta, device=x.device)
    share = torch.distributions.Beta(concentration, concentration, validate_args=False).sample()
    own = x.masked_fill(mask.unsqueeze(-1), 0.0)
    weight = share.view(-1, 1, 1)
    return weight * own + (1 - weight) * own[partner], mask & mask[partner], partner, share
