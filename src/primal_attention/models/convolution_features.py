"""Random-convolution features of series, a ridge head over them, and the combination of several classifiers.

    features = ConvolutionFeatures.fit(series, seed)      # aeon's MultiRocket and Hydra transforms, scaled
    head, held_out = RidgeHead.fit(features(series), labels, classes)     # with leave-one-out predictions
    weights = fit_weights([held_out, …], labels)          # probabilities are softmax(Σ weight · scores)

A. Dempster, D. Schmidt, G. Webb, "Hydra: competing convolutional kernels for fast and accurate time series
classification", 2023; C. W. Tan et al., "MultiRocket: multiple pooling operators and transformations", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MIN_LENGTH = 16  # of the resampled series; the transforms need 9 steps
MAX_VALUES = 2**27  # in the matrix of training features; many samples get fewer kernels
KERNELS = 6250  # MultiRocket's default, which gives eight features each
CHUNK = 256  # samples that Hydra transforms at once
PENALTIES = np.logspace(-3, 3, 10)
MAX_CHOOSING = 2500  # samples that choose the penalty: an eigendecomposition of more takes long
PRIOR = 5.0  # weight of the usual combination against held-out samples


def resample(series: np.ndarray, length: int) -> np.ndarray:
    """Resample (time, channels) to `length` steps by linear interpolation."""
    if len(series) == length:
        return series
    position = np.linspace(0, len(series) - 1, length)
    return np.stack([np.interp(position, np.arange(len(series)), channel) for channel in series.T], axis=1)


@contextmanager
def preserve_settings() -> Iterator[None]:
    """Restore the generators and thread counts of numpy and torch, which aeon and numba change."""
    state, threads = np.random.get_state(), torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(state)
        torch.set_num_threads(threads)


class ConvolutionFeatures:
    """MultiRocket and Hydra features of series (time, channels), each scaled by the training samples.

    Series of other lengths are resampled to the longest training series.
    """

    scales: dict[str, np.ndarray]

    def __init__(self, shape: tuple[int, int], kernels: int, seed: int) -> None:
        with preserve_settings():
            from aeon.transformations.collection.convolution_based import HydraTransformer, MultiRocket

        self.shape, self.kernels, self.seed = shape, kernels, seed  # shape: (channels, time)
        threads = torch.get_num_threads()
        self.hydra = HydraTransformer(random_state=seed, n_jobs=threads)
        self.rocket = MultiRocket(n_kernels=kernels, random_state=seed, n_jobs=threads)

    @classmethod
    def fit(cls, series: Sequence[np.ndarray], seed: int) -> ConvolutionFeatures:
        """Draw the kernels, and compute the biases and scales of the training samples."""
        length = max(MIN_LENGTH, *(len(s) for s in series))
        kernels = int(np.clip(MAX_VALUES // (8 * len(series)), 84, KERNELS))
        self = cls((series[0].shape[1], length), kernels, seed)
        values = self._stack(series)
        self._fit_transforms(values)
        hydra, rocket = self._transform(values)
        zeros = (hydra == 0).mean(axis=0) ** 4
        self.scales = {
            "hydra_mean": hydra.mean(axis=0),
            "hydra_scale": hydra.std(axis=0, ddof=min(1, len(series) - 1)) + zeros + 1e-8,
            "rocket_mean": rocket.mean(axis=0),
            "rocket_scale": np.where((deviation := rocket.std(axis=0)) == 0, 1, deviation),
        }
        return self

    def __call__(self, series: Sequence[np.ndarray]) -> np.ndarray:
        """Scaled features, (samples, features) float32."""
        hydra, rocket = self._transform(self._stack(series))
        scales = self.scales
        hydra = (hydra - scales["hydra_mean"]) * (hydra != 0) / scales["hydra_scale"]
        rocket = (rocket - scales["rocket_mean"]) / scales["rocket_scale"]
        return np.concatenate([hydra, rocket], axis=1).astype(np.float32)

    def _stack(self, series: Sequence[np.ndarray]) -> np.ndarray:
        # One memory layout: numba compiles a transform anew for every other one, which takes half a minute.
        return np.ascontiguousarray(np.stack([resample(s, self.shape[1]).T for s in series]), dtype=np.float32)

    def _fit_transforms(self, values: np.ndarray) -> None:
        with preserve_settings():
            self.hydra.fit(values)
            self.rocket.fit(values)

    def _transform(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with preserve_settings():
            parts = [self.hydra.transform(values[i : i + CHUNK]) for i in range(0, len(values), CHUNK)]
            return np.sqrt(np.concatenate(parts).clip(min=0)), self.rocket.transform(values)

    def arrays(self) -> dict[str, np.ndarray]:
        """All fitted arrays, for a file."""
        fitted = {"base": self.rocket.parameter, "difference": self.rocket.parameter1}
        return self.scales | {f"{key}/{i}": array for key, tup in fitted.items() for i, array in enumerate(tup)}

    @classmethod
    def restore(cls, arrays: Mapping[str, np.ndarray], **settings: Any) -> ConvolutionFeatures:
        """The features of `arrays()` and the attributes shape, kernels and seed."""
        self = cls(**settings)
        self._fit_transforms(np.zeros((2, *self.shape)))  # Hydra's kernels depend on the seed and the shape only

        def group(name: str) -> tuple[np.ndarray, ...]:
            count = sum(key.startswith(f"{name}/") for key in arrays)
            return tuple(np.array(arrays[f"{name}/{i}"]) for i in range(count))  # writable, as numba compiled them

        self.rocket.parameter, self.rocket.parameter1 = group("base"), group("difference")
        self.scales = {name: array for name, array in arrays.items() if "/" not in name}
        return self


@dataclass(frozen=True)
class RidgeHead:
    """One ridge regression per class on targets ±1; the penalty has the least leave-one-out error."""

    weight: np.ndarray  # (features, classes)
    bias: np.ndarray  # (classes,)

    @classmethod
    def fit(cls, features: np.ndarray, labels: np.ndarray, classes: int) -> tuple[RidgeHead, np.ndarray]:
        """Return the head and its leave-one-out scores (samples, classes).

        With centred features, G = K + αI for the kernel matrix K, and centred targets Y, the residual of sample i
        without sample i in the training is α (G⁻¹Y)_i / (α (G⁻¹)_ii − 1/n); 1/n is the share of the intercept.
        """
        count, mean = len(features), features.mean(axis=0)
        targets = 2.0 * np.eye(classes)[labels] - 1
        kernel = centre((features - mean) @ (features - mean).T)
        chosen = np.random.default_rng(0).permutation(count)[:MAX_CHOOSING]
        penalty = choose_penalty(centre(kernel[np.ix_(chosen, chosen)]), targets[chosen])
        inverse = np.linalg.inv(kernel + penalty * np.eye(count))
        dual = inverse @ (targets - targets.mean(axis=0))
        held_out = targets - penalty * dual / (penalty * np.diag(inverse) - 1 / count)[:, None]
        weight = ((features - mean).T @ dual).astype(np.float32)
        return cls(weight, targets.mean(axis=0) - mean @ weight), held_out

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Scores (samples, classes)."""
        return features @ self.weight + self.bias


def centre(kernel: np.ndarray) -> np.ndarray:
    """Remove the means of rows and columns, in float64: an inexact mean would look like a direction of the data."""
    kernel = kernel.astype(np.float64)
    kernel = kernel - kernel.mean(axis=0)
    return kernel - kernel.mean(axis=1, keepdims=True)


def choose_penalty(kernel: np.ndarray, targets: np.ndarray) -> float:
    """The penalty with the least mean squared leave-one-out error."""
    count = len(kernel)
    values, vectors = np.linalg.eigh(kernel)
    values = np.where(values < 1e-9 * values[-1], 0.0, values)
    rotated = vectors.T @ (targets - targets.mean(axis=0))
    errors = []
    for penalty in PENALTIES:
        shrink = penalty / (values + penalty)
        leverage = np.square(vectors) @ shrink - 1 / count
        errors.append(np.square((vectors * shrink) @ rotated / leverage.clip(min=1e-12)[:, None]).mean())
    return float(PENALTIES[int(np.argmin(errors))])


def fit_weights(scores: Sequence[np.ndarray], labels: np.ndarray, usual: Sequence[float]) -> np.ndarray:
    """Weights w > 0 of the probabilities softmax(Σ_m w_m · scores_m) that fit held-out scores best.

    The loss is the cross-entropy, summed over the samples, plus PRIOR · Σ_m (w_m / usual_m − 1)². The second term
    decides if there are few samples, and keeps the weights finite if all held-out predictions are right.

    Args:
        scores: Held-out scores (samples, classes) of each classifier.
        labels: (samples,) class indices.
        usual: Weight of each classifier without data.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    stacked, start = np.stack(scores), np.asarray(usual)  # (classifiers, samples, classes), (classifiers,)
    targets = np.eye(stacked.shape[2])[labels]

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        log_p = log_softmax(np.tensordot(weights, stacked, axes=1), axis=1)
        change = weights / start - 1
        gradient = np.einsum("nc,mnc->m", np.exp(log_p) - targets, stacked) + 2 * PRIOR * change / start
        return float(PRIOR * np.square(change).sum() - (targets * log_p).sum()), gradient

    bounds = [(0.1 * weight, None) for weight in start]  # positive, so that the largest score decides
    return minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B").x


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error: the mean of |accuracy − confidence| over bins of equal width of the confidence.

    Args:
        probabilities: (samples, classes).
        labels: (samples,) class indices.
        bins: Number of bins; each counts by its samples.
    """
    confidence, is_right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gap = np.bincount(place, weights=is_right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(labels))
