"""Held-out cases that differ from those trained on, as the persons of a test set differ from those of its training set.

Cases that are held out at random come from the same persons and sessions as the rest, and tell too good a story of what
happens with others. Archives do not say who made which case; but whoever stands, reaches or speaks differently lies at
an edge of his class.
"""

from __future__ import annotations

import numpy as np

from primal_attention.data.uea import Split, Standardizer, with_settled_signs
from primal_attention.utils.errors import DataError

DIRECTIONS = 2


def edge_holdout(split: Split, fraction: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of (kept, held out): the cases at one edge of their class, as people differ from those trained on.

    A class is ordered by its cases' mean values, projected on the first or the second principal direction of these;
    `number` counts the four edges. A class keeps at least one case.
    """
    standard = Standardizer.fit(split.series)
    means = np.stack([standard(s).mean(axis=0) for s in split.series])
    means = Standardizer.fit([means])(means)
    held = []
    for label in np.unique(split.labels):
        cases = np.flatnonzero(split.labels == label)
        around = means[cases] - means[cases].mean(axis=0)
        directions = with_settled_signs(np.linalg.svd(around, full_matrices=False)[2].T)
        along = around @ directions[:, min(number // 2 % DIRECTIONS, directions.shape[1] - 1)]
        order = cases[np.argsort(along if number % 2 == 0 else -along, kind="stable")]
        held.append(order[: min(max(1, round(fraction * len(cases))), len(cases) - 1)])
    out = np.sort(np.concatenate(held))
    if len(out) == 0:
        raise DataError("every class has one case only: nothing can be held out for validation")
    return np.setdiff1d(np.arange(len(split)), out), out
