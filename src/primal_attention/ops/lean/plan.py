"""What a pass of the lean path is asked for, besides its tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..modes import Mode


class Plan(NamedTuple):
    mode: Mode
    dropout: float = 0.0
    form: Literal["mean", "sum"] = "mean"
    trace: Literal["weights", "projections"] = "weights"
    scores: bool = False
    final: bool = False
    keep: bool = True  # there will be a way back


def scale(plan: Plan, valid: Tensor | None, length: int, dtype: torch.dtype) -> Tensor | float:
    """What makes J's first two terms of the summed energies: (B,) or one number."""
    half = 0.5 / plan.mode.heads
    if plan.form == "sum":
        return half
    return half / length if valid is None else half / valid.sum(dim=1).clamp(min=1).to(dtype)
