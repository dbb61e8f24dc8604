"""Which numbers dropout drops, as a hash of their place under a key: nothing is stored, and every pass finds it again.

A generator that is made to pass every test of randomness spends about a hundred instructions on a number, more than
the rest of a narrow layer's pass over its tokens. Here a number's 32-bit place is mixed by two odd multipliers and
three shifts, with one half of the key xored in before and the other between them. The key is drawn from torch's
generator at every call, on the device, so a recorded step draws anew in each replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

# As signed 32-bit numbers, which is what tensors hold. The first is 2³² over the golden ratio, the others are known to
# spread every bit of a number over all 32.
STEP, FIRST, SECOND = 0x9E3779B9 - 2**32, 0x21F0AAAD, 0xD35A2D97 - 2**32


def draw_key(device: torch.device) -> Tensor:
    """(2,) int32 from torch's generator of the device."""
    return torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=device)


def mixed(key: Tensor, place: Tensor) -> Tensor:
    """32 bits that look random, for each place (int32)."""
    z = (place ^ key[0]) * STEP
    z = (z ^ _shifted(z, 16)) * FIRST
    z = (z ^ _shifted(z, 15) ^ key[1]) * SECOND
    return z ^ _shifted(z, 16)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & (2 ** (32 - bits) - 1)  # tensors shift the sign along


def drop(x: Tensor, p: float, key: Tensor) -> Tensor:
    """Dropout of x under a key: numbers are kept with probability 1 − p, exact to 2⁻³², and scaled by 1 / (1 − p)."""
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    kept = mixed(key, place) >= min(round(p * 2**32), 2**32 - 1) - 2**31
    return torch.where(kept, x * (1.0 / (1.0 - p)), 0.0)


def coarse(p: float) -> int:
    """p in steps of 2⁻¹⁶: where one mixed number serves two places, each takes half of its bits."""
    return min(round(p * 2**16), 2**16 - 1)


def kept_pair(key: Tensor, place: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Whether the two numbers that share a place are kept, by the low and by the high half of its bits."""
    z = mixed(key, place)
    return (z & 0xFFFF) >= coarse(p), _shifted(z, 16) >= coarse(p)
