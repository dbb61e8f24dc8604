"""Context parallelism: each rank holds a shard of consecutive tokens of every sequence, in the order of the ranks.

Given the projection weights, the tokens of Primal-Attention are independent. A rank needs from the others

    the landmark rows                       n·d numbers      data-dependent modes
    the sums before and after its shard     2·d per rank     running means and decayed sums
    the sum of the features φ_k             d per rank       softmax feature map
    the sum of the energies                 2·H·s numbers    objective

and the number of tokens on each rank. Nothing sent grows with the length N. `Context.boundary` collects the first three
for one call of a layer. The other methods serve the layers around attention: convolutions (`halo`), positions
(`locate`) and pooling (`sum`, `maximum`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ops import reference
from ..ops.feature_maps import FeatureMap, accumulation_dtype
from ..ops.landmarks import landmark_indices, position_of_rank, ragged_landmark_indices
from ..ops.types import Boundary, Mode, RunningState
from ..utils.collectives import gather, reduce, sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Context:
    """The ranks that share sequences. `context_parallel` sets it as the attribute `context` of layers.

    Args:
        group: the process group of the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._checked_lengths: set[tuple[int, int]] = set()

    @classmethod
    def over(cls, mesh: DeviceMesh) -> Context:
        """Return the context of a mesh of one dimension."""
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension (got {mesh.ndim}): slice it by name, mesh['context']")
        return cls(mesh.get_group())

    def __deepcopy__(self, memo: Any) -> Context:
        return self  # process groups cannot be copied

    def __repr__(self) -> str:
        return f"Context(rank={self.rank}, size={self.size})"

    def sum(self, t: Tensor) -> Tensor:
        """Return Σ over the ranks, differentiable.

        Args:
            t: the term of this rank.
        """
        return sum_over(t, self.group)

    def maximum(self, x: Tensor) -> Tensor:
        """Return amax over the tokens of all ranks, (B, d). Equal maxima share the gradient.

        Args:
            x: the tokens of this rank, (B, N, d).
        """
        best = reduce(x.detach().amax(dim=1), self.group, "max")
        is_best = x.detach() == best[:, None]
        number = reduce(is_best.sum(dim=1), self.group, "sum").clamp(min=1)
        shared = self.sum(torch.where(is_best, x / number[:, None], 0.0).sum(dim=1))
        # Only the gradient comes from the sum: its value is rounded, and NaN for −∞.
        return best + torch.where(torch.isfinite(best), shared - shared.detach(), 0.0)

    def first(self, t: Tensor) -> Tensor:
        """Return the first rank's t on every rank, so that all use the same random draw."""
        return reduce(t if self.rank == 0 else torch.zeros_like(t), self.group, "sum")

    def locate(self, x: Tensor, valid: Tensor | None = None) -> SequenceShard:
        """Return the place of this rank's tokens in their sequences.

        Args:
            x: the tokens of this rank, (B, N, …).
            valid: (B, N) bool, True at tokens; None if there is no padding.
        """
        count = torch.full((1,), x.shape[1], device=x.device) if valid is None else valid.sum(dim=1)
        return SequenceShard(self, gather(count, self.group), valid)

    def boundary(
        self,
        x: Tensor,
        qk: Tensor,
        mode: Mode,
        feature_map: FeatureMap,
        valid: Tensor | None,
        decay: Tensor | None,
        shift: Tensor | None,
    ) -> tuple[Boundary, Tensor]:
        """Return the contributions of the other ranks to one call of a layer, and the lengths of the sequences, (B,).

        Args:
            x: input of this rank, (B, N, d), zero at padding.
            qk: its projected queries and keys, (B, N, 2d).
            mode: the mode of the layer.
            feature_map: φ.
            valid: (B, N) bool, True at tokens.
            decay: γ of each head, (H,).
            shift: jitter of the landmarks, the same on all ranks.
        """
        shard = self.locate(x, valid)
        q, k = (reference.split_heads(z, mode.heads) for z in qk.chunk(2, dim=-1))
        boundary = Boundary()
        if mode.data_dependent and mode.causal:
            assert mode.max_length is not None
            shard.check_length(mode.max_length, x.shape[1])
            grid = landmark_indices(mode.max_length, mode.landmarks, x.device)[None]
            boundary = Boundary(shard.rows(x, grid), grid < shard.total[:, None], offset=shard.offset)
        elif mode.data_dependent:
            boundary = Boundary(shard.rows(x, ragged_landmark_indices(shard.total, mode.landmarks, shift)))
        elif mode.causal or decay is not None:
            past = shard.outer_sums(q, k, decay)
            boundary = Boundary(past=past, future=None if mode.causal else shard.outer_sums(q, k, decay, after=True))
        if feature_map.is_normalised:
            feature_sum = self._feature_sum(shard, q, k, mode, feature_map, decay, boundary)
            boundary = boundary._replace(feature_sum=feature_sum)
        return boundary, shard.total.expand(x.shape[0]).contiguous()

    def _feature_sum(
        self,
        shard: SequenceShard,
        q: Tensor,
        k: Tensor,
        mode: Mode,
        feature_map: FeatureMap,
        decay: Tensor | None,
        boundary: Boundary,
    ) -> Tensor:
        """Σ φ_k before the shard, (B, H, p), if causal, else over the whole sequences, (B, H, 1, p)."""
        if mode.data_dependent:
            phi_k = feature_map.apply(k)
        else:
            plain = replace(feature_map, is_normalised=False)
            _, phi_k, _ = reference.sum_features(q, k, mode, plain, shard.valid, decay, boundary.past, boundary)
        if mode.causal:
            return shard.outer_sum(decayed_total(phi_k, decay, shard.valid), decay)
        return self.sum(decayed_total(phi_k, None, shard.valid))[:, :, None]

    def halo(self, x: Tensor, left: int, right: int) -> Tensor:
        """Return x with neighbouring tokens of other ranks, (B, left + N + right, d); zeros beyond the ends.

        Args:
            x: the tokens of this rank, (B, N, d).
            left: number of tokens before x.
            right: number of tokens after x.
        """
        counts = gather(torch.full((1,), x.shape[1], device=x.device), self.group)[:, 0]
        parts = [x]
        if left:
            ends = gather(_pad_tokens(x[:, -left:], left, at_end=False), self.group)
            order = torch.arange(self.rank - 1, -1, -1, device=x.device)
            parts.insert(0, _nearest_tokens(ends, counts, order, left).flip(1))
        if right:
            starts = gather(_pad_tokens(x[:, :right], right, at_end=True).flip(1), self.group)
            order = torch.arange(self.rank + 1, self.size, device=x.device)
            parts.append(_nearest_tokens(starts, counts, order, right))
        return torch.cat(parts, dim=1)


class SequenceShard:
    """The place of one rank's tokens in their sequences.

    Numbers per sequence are (B,), without a mask (1,) for all sequences; `counts` holds those of all ranks.
    """

    def __init__(self, context: Context, counts: Tensor, valid: Tensor | None) -> None:
        self.context, self.counts, self.valid = context, counts, valid  # counts: (ranks, B or 1)

    @property
    def offset(self) -> Tensor:
        """Tokens on earlier ranks."""
        return self.counts[: self.context.rank].sum(dim=0)

    @property
    def total(self) -> Tensor:
        """Tokens of the whole sequences."""
        return self.counts.sum(dim=0)

    def check_length(self, max_length: int, local: int) -> None:
        """Raise for sequences longer than `max_length`. On a GPU they are read once per number of local tokens."""
        if torch.compiler.is_compiling() or (max_length, local) in self.context._checked_lengths:
            return
        longest = int(self.total.max()) if self.total.numel() else 0
        if longest > max_length:
            raise ValueError(f"max_length={max_length} is exceeded by a sequence of {longest} tokens")
        if self.total.device.type != "cpu":
            self.context._checked_lengths.add((max_length, local))

    def rows(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens at `positions` of the complete sequences, from all ranks; zero beyond the end.

        x: (B, N, d), positions: (B or 1, n) among the valid tokens → (B, n, d), the same on all ranks.
        """
        local = positions - self.offset[:, None]
        is_local = (local >= 0) & (local < self.counts[self.context.rank][:, None])
        local = torch.where(is_local, local, 0).expand(x.shape[0], -1)
        slots = local if self.valid is None else position_of_rank(self.valid, local)
        picked = x.gather(1, slots[..., None].expand(-1, -1, x.shape[2]))
        return self.context.sum(torch.where(is_local[..., None], picked, 0.0))

    def outer_sums(self, q: Tensor, k: Tensor, decay: Tensor | None, after: bool = False) -> RunningState:
        """Return the running sums of q and k, (B, H, N, p), before the shard, or from the end if `after`."""
        ones = torch.ones(1, 1, 1, 1, dtype=accumulation_dtype(q.dtype), device=q.device).expand(*q.shape[:3], 1)
        totals = torch.cat([decayed_total(z, decay, self.valid, after) for z in (q, k, ones)], dim=-1)
        p = q.shape[3]
        query, key, weight = self.outer_sum(totals, decay, after).split([p, p, 1], dim=-1)
        return RunningState(query, key, weight[..., 0])

    def outer_sum(self, totals: Tensor, decay: Tensor | None, after: bool = False) -> Tensor:
        """Combine the totals (B, H, m) of the earlier ranks, or of the later ones if `after`, at the edge of the shard.

        Each rank's total is multiplied by γ for every token between its shard and this one.
        """
        every = gather(totals, self.context.group)  # (ranks, B, H, m)
        rank, ranks = self.context.rank, torch.arange(self.context.size, device=totals.device)
        weight = (ranks > rank if after else ranks < rank).to(totals.dtype)[:, None, None]  # (ranks, 1, 1)
        if decay is not None:
            ends = self.counts.cumsum(dim=0)
            between = ends - self.counts - ends[rank] if after else self.offset - ends  # (ranks, B or 1)
            weight = weight * (decay.to(totals.dtype).log() * between.clamp(min=0)[..., None]).exp()
        return (weight[..., None] * every).sum(dim=0)


def decayed_total(z: Tensor, decay: Tensor | None, valid: Tensor | None, from_end: bool = False) -> Tensor:
    """Return the last row of `running_sum(z, decay, valid)`, or of the sum from the end: (B, H, N, p) → (B, H, p)."""
    if decay is None:
        tokens = z if valid is None else z.masked_fill(~valid[:, None, :, None], 0.0)
        return tokens.sum(dim=2, dtype=accumulation_dtype(z.dtype))
    count = torch.ones(1, z.shape[2], dtype=torch.int64, device=z.device) if valid is None else valid.long()
    position = count.cumsum(dim=1)
    # Tokens between a token and the edge.
    age = (position - 1).clamp(min=0) if from_end else position[:, -1:] - position

    def total(z: Tensor, log_decay: Tensor) -> Tensor:
        power = (log_decay[None, :, None] * age[:, None]).exp().masked_fill(count[:, None] == 0, 0.0)  # γ_h^age
        return (power[:, :, None] @ z.to(power.dtype)).squeeze(2)

    log_decay = decay.to(accumulation_dtype(z.dtype)).log()
    # Only z is saved for the backward pass, not its copy in the accumulation dtype.
    return checkpoint(total, z, log_decay, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _pad_tokens(x: Tensor, width: int, *, at_end: bool) -> Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, 0, missing) if at_end else (0, 0, missing, 0))


def _nearest_tokens(edges: Tensor, counts: Tensor, order: Tensor, width: int) -> Tensor:
    """Return the `width` tokens nearest to this rank, nearest first: (B, width, d).

    edges: (ranks, B, width, d), the tokens of each rank with the nearest one last; order: ranks from near to far.
    """
    available = counts[order].clamp(max=width)
    cumulative = available.cumsum(dim=0)
    token = torch.arange(width, device=edges.device)
    index = torch.searchsorted(cumulative, token, right=True)
    exists = index < len(order)
    if len(order) == 0:
        # Every rank must have the gather in its graph, or the backward pass of the other ranks deadlocks.
        return edges.sum(dim=0) * 0.0
    index = index.clamp(max=len(order) - 1)
    place = width - 1 - (token - (cumulative - available)[index])
    picked = edges[order[index], :, place.clamp(min=0)].transpose(0, 1)  # (B, width, d)
    return torch.where(exists[:, None], picked, 0.0)
