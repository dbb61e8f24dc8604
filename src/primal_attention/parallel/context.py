"""One sequence over many ranks: each holds a stretch of consecutive tokens, in the order of the ranks.

Given the projection weights every token of Primal-Attention stands alone. What a rank must learn from the others is

    the landmarks' rows                n·d numbers      data-dependent weights, causal or not
    the sums before its first token    2·d per rank     running means
    the energies' sum                  2·H·s numbers    the objective

and the number of tokens that each rank holds. Nothing here grows with the length N. A `Stretch` answers these
questions for one pass of a layer; `Context` makes it, and serves what stands around the attention: convolutions
(`halo`), positions (`at`) and pooling (`sum`, `maximum`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.reference import RunningState, wide
from ..ops.sampling import ragged_landmark_indices, token_of_rank
from . import collectives
from .totals import log_of, total

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Context:
    """The ranks that share sequences. Layers hold one as `context`; see `context_parallel`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.looked_at: set[tuple[int, int]] = set()

    @classmethod
    def over(cls, mesh: DeviceMesh) -> Context:
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension (got {mesh.ndim}): slice it by name, mesh['context']")
        return cls(mesh.get_group())

    def __deepcopy__(self, memo: Any) -> Context:
        return self  # a copy of a model works with the same ranks

    def __repr__(self) -> str:
        return f"Context(rank={self.rank}, size={self.size})"

    def sum(self, t: Tensor) -> Tensor:
        """Σ over the ranks, differentiable."""
        return collectives.sum_over(t, self.group)

    def maximum(self, x: Tensor) -> Tensor:
        """amax over the tokens of all ranks, (B, N, d) → (B, d). Equal maxima share the gradient, as in `amax`."""
        best = collectives.reduce(x.detach().amax(dim=1), self.group, "max")
        ties = x.detach() == best[:, None]
        number = collectives.reduce(ties.sum(dim=1), self.group, "sum").clamp(min=1)
        shared = self.sum(torch.where(ties, x / number[:, None], 0.0).sum(dim=1))
        # The value is the maximum itself: −∞, and a share that rounding has touched, must not come out of the sum.
        return best + torch.where(torch.isfinite(best), shared - shared.detach(), 0.0)

    def first(self, t: Tensor) -> Tensor:
        """The first rank's t on every rank, for what is drawn at random and must be one draw."""
        return collectives.reduce(t if self.rank == 0 else torch.zeros_like(t), self.group, "sum")

    def at(self, x: Tensor, valid: Tensor | None = None, shift: Tensor | None = None) -> Stretch:
        """This rank's stretch of the sequences whose tokens here are x (B, N, …), those that `valid` (B, N) marks.

        shift: of the landmarks, the same on all ranks.
        """
        here = torch.full((1,), x.shape[1], device=x.device) if valid is None else valid.sum(dim=1)
        return Stretch(self, collectives.gather(here, self.group), valid, shift)

    def halo(self, x: Tensor, left: int, right: int) -> Tensor:
        """x with the last `left` tokens before it and the first `right` after it, zeros beyond the sequence's ends.

        (B, N, d) → (B, left + N + right, d). A rank may hold fewer tokens than its neighbours ask for.
        """
        counts = collectives.gather(torch.full((1,), x.shape[1], device=x.device), self.group)[:, 0]
        parts = [x]
        if left:
            ends = collectives.gather(_padded(x[:, -left:], left, at_end=False), self.group)
            order = torch.arange(self.rank - 1, -1, -1, device=x.device)
            parts.insert(0, _collect(ends, counts, order, left).flip(1))
        if right:
            starts = collectives.gather(_padded(x[:, :right], right, at_end=True).flip(1), self.group)
            order = torch.arange(self.rank + 1, self.size, device=x.device)
            parts.append(_collect(starts, counts, order, right))
        return torch.cat(parts, dim=1)


class Stretch:
    """The tokens of one rank in their sequences. Numbers per sequence are (B,), without a mask (1,) for all of them."""

    def __init__(self, context: Context, counts: Tensor, valid: Tensor | None, shift: Tensor | None = None) -> None:
        self.context, self.counts, self.valid, self.shift = context, counts, valid, shift  # counts: (ranks, B or 1)

    @property
    def before(self) -> Tensor:
        """Tokens on earlier ranks."""
        return self.counts[: self.context.rank].sum(dim=0)

    @property
    def here(self) -> Tensor:
        return self.counts[self.context.rank]

    @property
    def total(self) -> Tensor:
        """Tokens of the whole sequences."""
        return self.counts.sum(dim=0)

    def sum(self, t: Tensor) -> Tensor:
        return self.context.sum(t)

    def check_length(self, most: int, here: int) -> None:
        """Refuse sequences longer than `most`. A look at the device waits for it, so it is taken once per size."""
        if torch.compiler.is_compiling() or (most, here) in self.context.looked_at:
            return
        longest = int(self.total.max()) if self.total.numel() else 0
        if longest > most:
            raise ValueError(f"max_length={most} is exceeded by a sequence of {longest} tokens")
        if self.total.device.type != "cpu":
            self.context.looked_at.add((most, here))

    def rows(self, x: Tensor, numbers: Tensor) -> Tensor:
        """The tokens of the given numbers in their whole sequences, wherever they are; zero beyond the end.

        x: (B, N, d), numbers: (B or 1, n) counted over the valid tokens → (B, n, d), the same on all ranks.
        """
        local = numbers - self.before[:, None]
        mine = (local >= 0) & (local < self.here[:, None])
        local = torch.where(mine, local, 0).expand(x.shape[0], -1)
        at = local if self.valid is None else token_of_rank(self.valid, local)
        picked = x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
        return self.sum(torch.where(mine[..., None], picked, 0.0))

    def landmarks(self, x: Tensor, count: int) -> Tensor:
        """f(X): the landmarks of the whole sequences, (B, N, d) → (B, n, d); zero rows for an empty one."""
        return self.rows(x, ragged_landmark_indices(self.total, count, self.shift))

    def earlier(self, totals: Tensor, decay: Tensor | None) -> Tensor:
        """s_{first − 1}: what is left of the earlier ranks' totals at the end of the last of them.

        totals: (B, H, m) of this rank, decay: (H,) → (B, H, m).
        """
        every = collectives.gather(totals, self.context.group)  # (ranks, B, H, m)
        earlier = torch.arange(self.context.size, device=totals.device) < self.context.rank
        weight = earlier.to(totals.dtype)[:, None, None]  # (ranks, 1, 1)
        if decay is not None:
            between = self.before - self.counts.cumsum(dim=0)  # tokens after rank c and before this one
            power = log_of(decay.to(totals.dtype)) * between.clamp(min=0)[..., None]  # (ranks, B or 1, H)
            weight = weight * power.exp()
        return (weight[..., None] * every).sum(dim=0)

    def past(
        self, q: Tensor, k: Tensor, decay: Tensor | None, valid: Tensor | None, held_bias: Tensor | None = None
    ) -> RunningState:
        """The running sums of q and k, (B, H, N, p), before this rank's first token.

        held_bias: (2·H·p,), a bias that stands in q and k without its gradient, which then enters through the sums.
        """
        heads, p, dtype = q.shape[1], q.shape[3], wide(q.dtype)
        ones = torch.ones(1, 1, 1, 1, dtype=dtype, device=q.device).expand(*q.shape[:3], 1)
        weight = total(ones, decay, valid)  # (B, H, 1)
        sums = torch.cat([total(q, decay, valid), total(k, decay, valid)], dim=-1)  # (B, H, 2p)
        if held_bias is not None:
            nothing = (held_bias - held_bias.detach()).to(dtype).view(2, heads, p)  # but for its gradient
            sums = sums + weight * nothing.transpose(0, 1).flatten(1)
        query, key, held = self.earlier(torch.cat([sums, weight], dim=-1), decay).split([p, p, 1], dim=-1)
        return RunningState(query, key, held[..., 0])

    def past_sum(self, z: Tensor, decay: Tensor | None, valid: Tensor | None) -> Tensor:
        """The running sum of z, (B, H, N, p), before this rank's first token: (B, H, p)."""
        return self.earlier(total(z, decay, valid), decay)


def _padded(x: Tensor, width: int, *, at_end: bool) -> Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, 0, missing) if at_end else (0, 0, missing, 0))


def _collect(edges: Tensor, counts: Tensor, order: Tensor, width: int) -> Tensor:
    """The `width` tokens nearest to this rank, nearest first: (B, width, d).

    edges: (ranks, B, width, d), each rank's tokens with the one nearest to us last; order: ranks from near to far.
    """
    held = counts[order].clamp(max=width)
    far = held.cumsum(dim=0)  # tokens on the ranks up to the i-th of `order`
    token = torch.arange(width, device=edges.device)
    index = torch.searchsorted(far, token, right=True)
    exists = index < len(order)
    if len(order) == 0:
        # Nothing lies beyond, but the gathering must be part of this rank's graph as it is of the others'.
        return edges.sum(dim=0) * 0.0
    index = index.clamp(max=len(order) - 1)
    place = width - 1 - (token - (far - held)[index])
    picked = edges[order[index], :, place.clamp(min=0)].transpose(0, 1)  # (B, width, d)
    return torch.where(exists[:, None], picked, 0.0)
