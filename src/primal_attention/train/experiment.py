"""What a recipe builds: a Lightning module, the data it trains on and the data it is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from primal_attention.data.uea import Standardizer
from primal_attention.train.batches import Batches
from primal_attention.train.module import TrainingModule


@dataclass
class Experiment:
    """Everything a training needs.

    watched: sets evaluated while training, by name ("test" or "val"); test is measured once more at the end.
    select: the watched set and score by which an epoch is chosen, for example ("val", "accuracy"); None takes the last.
    """

    module: TrainingModule
    train: Batches
    test: Batches
    watched: Mapping[str, Batches]
    select: tuple[str, str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    standardizer: Standardizer | None = None
