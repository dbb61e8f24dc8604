"""From q and k to y, by one of two ways.

Through the scores (rows, H, 2, S), which are written, kept and handed to the output maps; or, where the rank is large
against the head's width and nobody wants the scores themselves, to the heads' outputs (rows, H·p) at once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..kernels.fold import foldable
from ..kernels.wide import wide
from ..layer import Weights
from ..modes import Mode
from .nodes import Combine, Output, Project, through
from .score_nodes import GrowingScore, Mix, RunningMix, RunningScore, Score

# Of a large rank in 16 bits: whether W_{e|X} is kept for the way back where it is at most half as large as x, so that
# W_{r|X} alone is formed again. With both, more would be kept than softmax's attention keeps.
KEEP = True


def held(bias: Tensor | None) -> Tensor | None:
    """The bias without its gradient, which comes from elsewhere."""
    return None if bias is None else bias.detach()


class Heads(NamedTuple):
    """The layer between its projection and y; `found` below is what the way taken gives: scores, or heads' outputs."""

    weights: Weights
    tables: list[Tensor]
    single: bool
    whole: bool
    at_once: bool
    measured: bool  # somebody asks for J, hence for the energies

    @classmethod
    def of(
        cls, weights: Weights, mode: Mode, tables: list[Tensor], single: bool, whole: bool, measured: bool, scored: bool
    ) -> Heads:
        """scored: the scores themselves are wanted, by the caller or by dropout."""
        p, rank = weights.score_weight.shape[0], weights.w_e.shape[-1]
        growing = mode.causal and mode.data_dependent
        at_once = wide(mode.heads, p, rank) and not (scored or growing)
        return cls(weights, tables, single, whole, at_once, measured)

    @property
    def rank(self) -> int:
        return self.weights.w_e.shape[-1]

    def project(
        self, x: Tensor, rows: Tensor, exact: bool, shortest: int, biased: bool = True
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """q and k, W_{·|X} and the traces. W_{·|X} is in one tensor, or one for each side where one may be kept."""
        w = self.weights
        bias = held(w.qk_bias) if biased else None
        qk, wx, other, trace = through(
            Project, "project", x, w.qk_weight, bias, w.w_e, w.w_r, rows, exact, shortest, self.at_once
        )
        return qk, [wx, other] if self.at_once else [wx], trace

    def attend(self, qk: Tensor, wx: list[Tensor], origin: list[Tensor]) -> tuple[Tensor, Tensor]:
        """`found` and energies, not causal. origin: what wx is rebuilt from on the way back, if it is to be rebuilt."""
        w, where = self.weights, (self.tables, self.single)
        if self.at_once:
            first, other = wx[0], wx[1] if len(wx) > 1 else None
            maps = (w.score_weight, held(w.score_bias), w.qk_bias)
            kept = KEEP and other is not None and _small(first, qk)
            return through(Mix, "mix", qk, first, other, *maps, origin, kept, *where, self.whole, self.measured)  # type: ignore[no-any-return]
        return through(Score, "score", qk, wx[0], w.qk_bias, origin, *where, self.rank, self.whole)  # type: ignore[no-any-return]

    def run(
        self, qk: Tensor, wx: Tensor, log_decay: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`found`, energies and the final sums of the causal running sums. initial: the sums before the first token."""
        w, where = self.weights, (self.tables, self.single)
        if self.at_once:
            maps = (w.score_weight, held(w.score_bias), w.qk_bias)
            results = through(
                RunningMix, "running_mix", qk, wx, *maps, log_decay, initial, *where, self.whole, self.measured
            )
        else:
            past = (log_decay, initial)
            results = through(
                RunningScore, "running_score", qk, wx, w.qk_bias, *past, *where, self.rank, self.whole
            )  # fmt: skip
        found, energy, _, final = results
        return found, energy, final

    def grow(self, x: Tensor, log_decay: Tensor | None, rows: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and energies of the causal data-dependent mode, from x on."""
        w = self.weights
        scores, energy, _ = through(
            GrowingScore, "growing_score", x, w.qk_weight, w.qk_bias, w.w_e, w.w_r, log_decay, rows, grid,
            self.tables, self.single, self.whole,
        )  # fmt: skip
        return scores, energy

    def output(self, found: Tensor, dropout: float) -> Tensor:
        """y (rows, d)."""
        w = self.weights
        if self.at_once:
            return through(Output, "output", found, w.score_bias, w.out_weight, w.out_bias)  # type: ignore[no-any-return]
        return combine(_drop(found, dropout, self.rank) if dropout else found, w, self.rank)


def _small(wx: Tensor, qk: Tensor) -> bool:
    """In 16 bits, as q and k are, and at most half as large as x, which is half of them."""
    return wx.dtype == qk.dtype and wx.dtype.itemsize == 2 and 4 * wx.numel() <= qk.numel()


def combine(scores: Tensor, weights: Weights, rank: int) -> Tensor:
    """y = W_out concat_h(W_o [e; r] + b_o) + b_out. scores: (rows, H, 2, S) → (rows, d)."""
    rows, heads, _, stored = scores.shape
    _, _, _, _, score_weight, score_bias, out_weight, out_bias = weights
    p = score_weight.shape[0]
    if foldable(heads, p, rank):
        return through(Combine, "combine", scores, score_weight, score_bias, out_weight, out_bias)  # type: ignore[no-any-return]
    padded = F.pad(score_weight.view(p, 2, rank), (0, stored - rank)).view(p, 2 * stored)
    each = F.linear(scores.view(rows * heads, 2 * stored), padded, score_bias)
    return F.linear(each.view(rows, heads * p), out_weight, out_bias)


def _drop(scores: Tensor, dropout: float, rank: int) -> Tensor:
    """Dropout on the scores; the column of ones beyond them, which carries the bias and its gradient, stays."""
    dropped = F.dropout(scores, dropout)
    if scores.shape[3] > rank:
        dropped[:, 0, 0, rank] = 1.0
    return dropped
