"""A run that is cut off in a step and goes on, beside one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primal_attention.train import runner
from primal_attention.train.config import Recipe
from primal_attention.train.module import TrainingModule


class PowerCutError(Exception):
    pass


def assert_resumes_to_the_same(recipe: Recipe, folder: Path, *, step: int) -> None:
    """Train whole, and again with a cut after `step` steps: metrics and weights must agree to the byte."""
    usual = TrainingModule.losses

    def fail(self: TrainingModule, batch: Any) -> Any:
        if self.global_step == step:
            raise PowerCutError
        return usual(self, batch)

    runner.train(recipe, folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingModule, "losses", fail)
        with pytest.raises(PowerCutError):
            runner.train(recipe, folder / "cut")
    runner.train(recipe, folder / "cut", resume=True)
    for file in ("metrics.csv", "model.safetensors"):
        assert (folder / "cut" / file).read_bytes() == (folder / "whole" / file).read_bytes(), file
