"""What a layer takes and gives, whatever computes it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import reference as eq
from .modes import State
from .reference import Scores


class Weights(NamedTuple):
    """The layer's parameters, by the names of `PrimalAttention`."""

    qk_weight: Tensor  # (2d, d), rows [W_q; W_k]
    qk_bias: Tensor | None
    w_e: Tensor  # (H, n, s), or (H, p, s) when not data-dependent
    w_r: Tensor
    score_weight: Tensor  # (p, 2s), shared by the heads
    score_bias: Tensor | None
    out_weight: Tensor  # (d, d)
    out_bias: Tensor | None


class Energies(NamedTuple):
    """What the objective needs of a pass: Σ_i e², Σ_i r² per direction, and the number of tokens they hold."""

    e: Tensor  # (B, H, s)
    r: Tensor  # (B, H, s)
    tokens: Tensor | int


class Objective(NamedTuple):
    """How J is formed."""

    sqrt_lambda: Tensor  # (H, s)
    form: Literal["mean", "sum"] = "mean"
    trace: Literal["weights", "projections"] = "weights"

    def of(self, energies: Energies, traced: tuple[Tensor, Tensor]) -> Tensor:
        """J per sample, (B,); `traced` are the two sets of weights under the trace, (…, H, n, s)."""
        with torch.autocast(energies.e.device.type, enabled=False):
            trace = eq.weight_trace(*traced)
            trace = trace[None] if trace.ndim == 1 else trace
            return eq.objective(energies.e, energies.r, self.sqrt_lambda, trace, energies.tokens, self.form)


class Attended(NamedTuple):
    """The result of a layer."""

    y: Tensor  # like x
    objective: Tensor | None = None  # J, (B,)
    scores: Scores | None = None
    state: State | None = None
