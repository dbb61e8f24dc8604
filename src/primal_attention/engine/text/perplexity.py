"""Training of language models: the loss of the next token, J squared per sequence, and how well a text is predicted.

perplexity      exp of the mean loss per token: depends on the vocabulary
bits_per_byte   the whole loss in bits over the bytes of the text: comparable between vocabularies
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from primal_attention.data.vocabulary import Vocabulary
from primal_attention.engine.batches import Batches
from primal_attention.engine.config import Recipe
from primal_attention.engine.files import write_text
from primal_attention.engine.module import Batch, TrainingModule
from primal_attention.engine.text.text_windows import MeasuredWindows

VOCABULARY = "vocabulary.json"


class LanguageModule(TrainingModule):
    """A language model in training. The run folder gets the vocabulary, without which the weights mean nothing."""

    splits_sequences: ClassVar[bool] = True
    headline: ClassVar[str] = "bits_per_byte"

    def __init__(self, model: nn.Module, recipe: Recipe, vocabulary: Vocabulary) -> None:
        super().__init__(model, recipe)
        self.vocabulary = vocabulary

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            for folder in {Path(c.folder) for c in self.trainer.callbacks if hasattr(c, "folder")}:  # type: ignore[attr-defined]
                write_text(folder / VOCABULARY, self.vocabulary.text())

    def task_loss(self, batch: Batch) -> Tensor:
        (windows,) = batch
        seen, targets = self.tokens(windows[:, :-1], windows[:, 1:])
        return self.model(seen, targets=targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        (windows,) = batch
        tokens = (windows[:, 1:] >= 0).sum()
        # What stands behind the text is no token; it is read as one, and nothing before it sees it.
        seen, targets = self.tokens(windows[:, :-1].clamp(min=0), windows[:, 1:])
        loss = model(seen, targets=targets)
        return {"loss": loss.double() * tokens, "cases": tokens.double()}

    def evaluate(self, batches: Batches) -> dict[str, float]:
        means = super().evaluate(batches)
        assert isinstance(batches, MeasuredWindows)
        bits = means["loss"] / math.log(2)
        return {**means, "perplexity": math.exp(means["loss"]), "bits_per_byte": bits * batches.tokens / batches.bytes}
