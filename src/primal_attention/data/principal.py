"""Principal directions of the channels, each of about unit variance, beside the channels themselves.

Channels of one body or one machine often move together, and what tells two classes apart may be a small difference
between them: a thumb beside its hand. Standardised channel by channel such a difference is tiny, and noise on the
channels covers it; along the principal directions it is as large as everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from primal_attention.data.series import Standardizer

FLOOR = 1e-3  # added to a direction's variance, in units of a channel's: directions that carry nothing stay small


@dataclass(frozen=True)
class PrincipalChannels(Standardizer):
    """Per-channel z-score, and beside it the same steps along the principal directions of the training cases' steps.

    (time, channels) → (time, 2 · channels)
    """

    basis: np.ndarray  # (channels, channels): one direction per column, divided by its deviation

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> PrincipalChannels:
        plain = Standardizer.fit(series)
        steps = np.concatenate([plain(s) for s in series])  # (total time, channels)
        variance, directions = np.linalg.eigh(steps.T @ steps / max(len(steps) - 1, 1))
        basis = with_settled_signs(directions) / np.sqrt(variance.clip(min=0.0) + FLOOR)
        return cls(plain.mean, plain.std, basis)

    def __call__(self, series: np.ndarray) -> np.ndarray:
        plain = super().__call__(series)
        return np.concatenate([plain, plain @ self.basis], axis=1)


def with_settled_signs(directions: np.ndarray) -> np.ndarray:
    """Unit vectors in columns, each or its opposite: which of them must not depend on the machine or on rounding.

    So the first large entry is positive; the largest one may have a twin.
    """
    size = np.abs(directions)
    first = (size > 0.5 * size.max(axis=0)).argmax(axis=0, keepdims=True)
    return directions * np.where(np.take_along_axis(directions, first, axis=0) < 0, -1.0, 1.0)
