"""Training of classifiers of token sequences: cross-entropy, accuracy, and J squared after the mean over the batch.

A batch is (tokens (B, N), labels (B,)), or (tokens, tokens, labels) where the cases are pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.engine.config import Recipe
from primal_attention.engine.module import Batch, TrainingModule


class SequenceModule(TrainingModule):
    """A classifier of token sequences in training.

    padded: token 0 is padding; else the model gets no mask. any_length: the batches come in several lengths.
    """

    splits_sequences: ClassVar[bool] = True
    ksvd_reduction: ClassVar[Literal["sample", "batch"]] = "batch"
    evaluates_compiled: ClassVar[bool] = False

    def __init__(self, model: nn.Module, recipe: Recipe, *, padded: bool, any_length: bool = False) -> None:
        super().__init__(model, recipe, any_length=any_length)
        self.padded = padded

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        *sequences, _ = batch
        given: list[Tensor | None] = []
        for ids in sequences:
            # Stored in one byte, looked up by eight.
            given += self.tokens(ids.long(), ids == 0 if self.padded else None)
        return tuple(given)

    def task_loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(*self.inputs(batch)), batch[-1])

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        labels = batch[-1]
        logits = model(*self.inputs(batch)).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "cases": torch.tensor(len(labels)),
        }
