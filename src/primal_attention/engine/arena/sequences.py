"""Training of classifiers of token sequences: cross-entropy, accuracy, and J squared after the mean over the batch.

A batch is (tokens (B, N), labels (B,)), or (tokens, tokens, labels) where the cases are pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

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

    def logits(self, model: nn.Module, sequences: tuple[Tensor, ...]) -> Tensor:
        given: list[Tensor | None] = []
        for ids in sequences:
            # Stored in one byte, looked up by eight.
            given += self.tokens(ids.long(), ids == 0 if self.padded else None)
        return model(*given)

    def task_loss(self, batch: Batch) -> Tensor:
        *sequences, labels = batch
        return F.cross_entropy(self.logits(self.model, tuple(sequences)), labels)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        *sequences, labels = batch
        logits = self.logits(model, tuple(sequences)).float()
        return {
            "accuracy": (logits.argmax(dim=-1) == labels).sum(),
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "cases": torch.tensor(len(labels)),
        }
