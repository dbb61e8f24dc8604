"""Arguments and results of a layer, shared by all backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Mode:
    """The mode of a layer, and the sizes that its parameters do not show."""

    heads: int
    landmarks: int
    data_dependent: bool = True
    causal: bool = False
    max_length: int | None = None


class Weights(NamedTuple):
    """The parameters of a layer. The three maps may be None where the caller applies them."""

    qk_weight: Tensor | None  # (2d, d), rows [W_q; W_k]
    qk_bias: Tensor | None
    w_e: Tensor  # (H, n, s), or (H, p, s) if data-independent
    w_r: Tensor
    score_weight: Tensor | None  # W_o, (p, 2s), shared by the heads
    score_bias: Tensor | None
    out_weight: Tensor | None  # (d, d)
    out_bias: Tensor | None


class Scores(NamedTuple):
    """The projection scores, (B, H, N, s) each."""

    e: Tensor
    r: Tensor


class RunningState(NamedTuple):
    """Streaming state of the causal data-independent mode. Its size does not depend on the number of tokens."""

    query_sum: Tensor  # (B, H, p)
    key_sum: Tensor  # (B, H, p)
    weight: Tensor  # (B, H), the sum of the weights in the running sums
    feature_sum: Tensor | None = None  # (B, H, p), Σ φ_k, for D̂ of the softmax map
    layer: str = ""  # the kind of layer that the state belongs to


class LandmarkState(NamedTuple):
    """Streaming state of the causal data-dependent mode: the projection weights after the last token."""

    w_e_x: Tensor  # (B, H, p, s)
    w_r_x: Tensor  # (B, H, p, s)
    position: Tensor  # (B,), tokens read
    steps: int  # an upper bound of `position` that is known without a device synchronisation
    feature_sum: Tensor | None = None
    layer: str = ""


class DeltaState(NamedTuple):
    """Streaming state of the delta rule: the projection weights after the last token."""

    w_e_x: Tensor  # (B, H, p, s)
    w_r_x: Tensor  # (B, H, p, s)
    conv: Tensor | None  # (B, kernel − 1, 2d + 2Hs), the last inputs of the convolution
    layer: str = ""


State = RunningState | LandmarkState | DeltaState


class Boundary(NamedTuple):
    """Contributions of tokens outside x, for sequences that are split over several calls or ranks."""

    landmark_rows: Tensor | None = None  # (B, n, d), f(X) of the complete sequences
    has_landmark: Tensor | None = None  # (B or 1, n) bool, causal: the landmark exists in the sequence
    past: RunningState | None = None  # the running sums before the first token
    future: RunningState | None = None  # the running sums after the last token, from the end (γ^|i−j| only)
    feature_sum: Tensor | None = None  # (B, H, 1, p) over all tokens, or (B, H, p) over earlier ones if causal
    offset: Tensor | None = None  # (B or 1,), tokens before the first one


class Output(NamedTuple):
    """The result of a layer; None for what was not requested."""

    y: Tensor | None  # like x
    energy: Tensor | None = None  # Σ_i e_i², Σ_i r_i², (B, H, 2, s), of the fused kernels (B, H, 2, stored rank)
    trace: Tensor | None = None  # Tr(W_eᵀ W_r) per head, (1 or B, H), of the fused kernels (H,) or (B, H)
    scores: Scores | None = None
    state: State | None = None
    is_fused: bool = False
