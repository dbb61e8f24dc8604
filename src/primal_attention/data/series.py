"""Labelled collections of multivariate series, and the preprocessing every time-series model here shares.

A series is an array (time, channels). Missing values are interpolated along time, each channel is standardised with the
training set's mean and deviation, and batches are padded on the right, with a mask that is True on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from primal_attention.data.errors import DataError


@dataclass(frozen=True)
class Split:
    """Cases of one half of a data set: series of shape (time, channels) and integer labels."""

    series: list[np.ndarray]
    labels: np.ndarray  # (cases,) int64

    def __len__(self) -> int:
        return len(self.series)

    def take(self, index: np.ndarray) -> Split:
        return Split([self.series[i] for i in index], self.labels[index])


@dataclass(frozen=True)
class SeriesData:
    """A classification problem: a training half, a test half and the class names that the labels count."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        return self.train.series[0].shape[1]

    @property
    def max_length(self) -> int:
        """Longest series of the training half."""
        return max(len(s) for s in self.train.series)


def drop_missing_tail(series: np.ndarray) -> np.ndarray:
    """Cut the time steps at the end in which no channel has a value: archives pad unequal lengths that way."""
    known = np.flatnonzero(np.isfinite(series).any(axis=1))
    return series[: known[-1] + 1] if len(known) else series


def interpolate_missing(series: np.ndarray) -> np.ndarray:
    """Fill gaps linearly along time; gaps at the ends take the nearest value; a channel without any value stays NaN."""
    finite = np.isfinite(series)
    if finite.all():
        return series
    filled = np.where(finite, series, np.nan)
    time = np.arange(len(series))
    for c in np.flatnonzero(~finite.all(axis=0)):
        known = finite[:, c]
        if known.any():
            filled[:, c] = np.interp(time, time[known], series[known, c])
    return filled


@dataclass(frozen=True)
class Standardizer:
    """Per-channel z-score. Statistics are over all time steps of the training cases (ddof 1)."""

    mean: np.ndarray  # (channels,)
    std: np.ndarray  # (channels,)

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> Standardizer:
        steps = np.concatenate(series).astype(np.float64)  # (total time, channels)
        known = np.isfinite(steps)
        count = known.sum(axis=0)
        mean = np.where(known, steps, 0.0).sum(axis=0) / np.maximum(count, 1)
        square = np.where(known, steps - mean, 0.0) ** 2
        std = np.sqrt(square.sum(axis=0) / np.maximum(count - 1, 1))
        # A constant channel carries nothing: leave its scale alone instead of dividing by zero.
        flat = std <= 1e-12 * np.maximum(np.abs(mean), 1.0)
        return cls(mean, np.where(flat, 1.0, std))

    def __call__(self, series: np.ndarray) -> np.ndarray:
        """Standardised copy; a channel without any value becomes zero, the training mean."""
        return np.nan_to_num((series - self.mean) / self.std, nan=0.0)


def pad(series: Sequence[np.ndarray], *, length: int | None = None, clip: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Stack to (cases, time, channels) float32 with zeros on the right, and the mask (cases, time), True = padding.

    `length` is the least length of the result; longer series are cut to it, or kept whole when `clip` is off.
    """
    longest = max((len(s) for s in series), default=0)
    if length is None or (not clip and longest > length):
        length = longest
    channels = series[0].shape[1] if len(series) else 0
    values = np.zeros((len(series), length, channels), dtype=np.float32)
    mask = np.ones((len(series), length), dtype=bool)
    for i, s in enumerate(series):
        n = min(len(s), length)
        values[i, :n] = s[:n]
        mask[i, :n] = False
    return values, mask


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of (kept, held out): about `fraction` of every class held out, never the only case of a class."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"the held-out fraction must lie between 0 and 1 (got {fraction})")
    if len(labels) == 0:
        raise DataError("there are no samples to hold any out")
    rng = np.random.default_rng(seed)
    held = []
    for label in np.unique(labels):
        cases = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(cases))), len(cases) - 1)
        held.append(cases[:count])
    out = np.sort(np.concatenate(held))
    if len(out) == 0:
        raise DataError("every class has one case only: nothing can be held out for validation")
    return np.setdiff1d(np.arange(len(labels)), out), out
