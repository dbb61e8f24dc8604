"""Projection weights, projection scores and running sums of the CPU path, forward and backward.

The normalised features are never stored, because the division commutes with the projection:

    e = (W_{e|X}ᵀ z) / ‖z‖,      dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X}ᵀ = (g / ‖z‖) zᵀ      with g = de

z has one token per row, the scores have one token per column: matrix products read and write both layouts directly,
and the element-wise passes run along the tokens. g is the number of sequences with separate projection weights, m
their tokens; g = 1 if all sequences share the weights.
"""

from __future__ import annotations

from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor

from ..feature_maps import EPS, HUGE_NORM, HUGE_SCALE, accumulation_dtype
from ..landmarks import landmark_indices, position_of_rank, ragged_landmark_indices

MIN_LONG = 128  # tokens from which separate calls for each sequence are faster


def is_long(g: int, m: int) -> bool:
    """Return True to process sequences one by one without copies, False to process all at once in copies by head."""
    return g == 1 or m >= MIN_LONG


# Projection weights


def landmark_positions(x: Tensor, valid: Tensor | None, landmarks: int, shift: Tensor | None) -> Tensor:
    """Return the landmarks of each sequence as rows of the flat input, (B, n). Those of empty sequences are unused."""
    batch, length, _ = x.shape
    offset = torch.arange(batch, device=x.device)[:, None] * length
    if valid is None:
        return landmark_indices(length, landmarks, x.device, shift) + offset
    return position_of_rank(valid, ragged_landmark_indices(valid.sum(dim=1), landmarks, shift)) + offset


class ProjectionWeights:
    """W_{e|X} and W_{r|X} of each sequence, or W_e and W_r if data-independent, in the accumulation dtype.

    Attributes:
        w_x: W_{e|X}ᵀ and W_{r|X}ᵀ, (B or 1, 2, H, s, p).
    """

    def __init__(self, x: Tensor, positions: Tensor | None, valid: Tensor | None, w_e: Tensor, w_r: Tensor) -> None:
        dtype, heads = accumulation_dtype(x.dtype), w_e.shape[0]
        self.w_e, self.w_r, self.positions = w_e.to(dtype), w_r.to(dtype), positions
        if positions is None:
            self.w_x = torch.stack([self.w_e.mT, self.w_r.mT])[None]
            return
        (batch, _, d), p = x.shape, x.shape[2] // heads
        rows = x.view(-1, d).index_select(0, positions.view(-1)).to(dtype).view(*positions.shape, heads, p)
        self.is_empty = None if valid is None else ~valid.any(dim=1)[:, None, None, None]
        if self.is_empty is not None:
            rows.masked_fill_(self.is_empty, 0.0)
        self.rows = rows.permute(2, 1, 0, 3).flatten(2)  # f(X_h) of all sequences side by side, (H, n, B·p)
        sides = (torch.bmm(w.mT, self.rows).unflatten(2, (batch, p)) for w in (self.w_e, self.w_r))  # (H, s, B, p)
        self.w_x = torch.stack([side.permute(2, 0, 1, 3) for side in sides], 1)

    def of(self, sequences: slice) -> Tensor:
        """Return the weights of some sequences."""
        return self.w_x if self.positions is None else self.w_x[sequences]

    def backward(self, grad: Tensor, grad_x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of W_e and W_r and add those of the landmarks to grad_x. grad: that of w_x."""
        if self.positions is None:
            return grad[0, 0].mT, grad[0, 1].mT
        grad_e, grad_r = (side.permute(1, 2, 0, 3).flatten(2) for side in grad.unbind(1))  # (H, s, B·p)
        if grad_x is not None:
            self._add_landmark_gradient(torch.bmm(self.w_e, grad_e).baddbmm_(self.w_r, grad_r), grad_x)
        grads = torch.bmm(self.rows, torch.cat([grad_e, grad_r], 1).mT)  # (H, n, 2s)
        return grads.split(self.w_e.shape[2], dim=2)  # type: ignore[return-value]

    def _add_landmark_gradient(self, grad_rows: Tensor, grad_x: Tensor) -> None:
        assert self.positions is not None
        (batch, _, d), (heads, landmarks, _) = grad_x.shape, grad_rows.shape
        rows = grad_rows.view(heads, landmarks, batch, d // heads).permute(2, 1, 0, 3)
        if self.is_empty is not None:
            rows = rows.masked_fill(self.is_empty, 0.0)
        rows = rows.reshape(batch * landmarks, d).to(grad_x.dtype)
        grad_x.view(-1, d).index_add_(0, self.positions.view(-1), rows)


# Scores


def project(z: Tensor, w_x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores, (g, 2, H, s, m), and 1/‖z‖, (g, 2H, m). z: (g, m, 2H, p), w_x: (g, 2, H, s, p)."""
    scale = inverse = _inverse_norm(z)
    if (factor := _huge_factor(inverse)) is not None:
        z = z * factor.transpose(1, 2)[..., None]
        scale = _inverse_norm(z)
        inverse = scale * factor
    (g, channels, m), w = inverse.shape, w_x.flatten(1, 2)
    scores = z.new_empty(g, channels, w.shape[2], m)
    if is_long(g, m):
        for i in range(g):
            torch.bmm(w[i], z[i].permute(1, 2, 0), out=scores[i])
    else:
        torch.bmm(w.flatten(0, 1), z.transpose(1, 2).flatten(0, 1).mT, out=scores.view(g * channels, -1, m))
    scores.mul_(scale[:, :, None])
    return scores.view(*w_x.shape[:4], m), inverse


def project_backward(grad: Tensor, z: Tensor, w_x: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of z and w_x. grad: that of the scores, overwritten. Shapes as in `project`."""
    (g, channels, m), w = inverse.shape, w_x.flatten(1, 2)
    if (factor := _huge_factor(inverse)) is not None:
        z, inverse = z * factor.transpose(1, 2)[..., None], inverse / factor
    radial = (grad * scores).sum(3).view(g, channels, m).mul_(inverse).mul_(inverse)  # ⟨g, e⟩ / ‖z‖²
    radial.masked_fill_(inverse >= 1 / EPS, 0.0)  # below the floor of ‖z‖ the divisor is a constant
    scaled = grad.view(g, channels, -1, m).mul_(inverse[:, :, None])
    grad_z = z * radial.transpose(1, 2)[..., None]
    grad_w = torch.empty_like(w)
    if is_long(g, m):
        for i in range(g):
            torch.bmm(scaled[i], z[i].transpose(0, 1), out=grad_w[i])
            grad_z[i].transpose(0, 1).baddbmm_(scaled[i].mT, w[i], beta=-1)
    else:
        flat = scaled.flatten(0, 1)
        torch.bmm(flat, z.transpose(1, 2).flatten(0, 1), out=grad_w.flatten(0, 1))
        projected = torch.bmm(flat.mT, w.flatten(0, 1)).view(g, channels, m, -1)
        torch.sub(projected.transpose(1, 2), grad_z, out=grad_z)
    if factor is not None:
        grad_z.mul_(factor.transpose(1, 2)[..., None])
    return grad_z, grad_w.view(w_x.shape)


def _inverse_norm(z: Tensor) -> Tensor:
    """1/‖z‖, (g, m, 2H, p) → (g, 2H, m)."""
    norm = torch.linalg.vector_norm(z, dim=-1).transpose(1, 2)
    return torch.clamp(norm, min=EPS, out=norm.new_empty(norm.shape)).reciprocal_()


def _huge_factor(inverse: Tensor) -> Tensor | None:
    """Return HUGE_SCALE where ‖z‖ is huge and 1 elsewhere, or None if no row is. As in `feature_maps.cosine`."""
    is_huge = inverse < 1 / HUGE_NORM
    if not torch.compiler.is_compiling() and not is_huge.any():
        return None
    return torch.where(is_huge, HUGE_SCALE, 1.0).to(inverse.dtype)


# Running sums


def running_sum_(s: Tensor, factors: Tensor | None, carry: Tensor | None, reverse: bool = False) -> Tensor:
    """Replace z by s_i = f_i s_{i−1} + z_i along dim 1, and return the last s. `reverse` starts at the end.

    The tokens are cut into chunks. Position by position, all chunks at once add the previous token; then each chunk
    adds the last sum of the previous chunk. The number of calls grows with √N. Only earlier terms are added to later
    ones, so a NaN cannot propagate to earlier tokens, as it would through a triangular matrix product.

    s: z, (B, N, C, p), overwritten; factors: f, (B, N, C, 1), None for ones; carry: the initial sum, (B, C, p).
    """
    length = s.shape[1]
    chunk = isqrt(length)
    chunks = length // chunk
    in_chunks = slice(length - chunks * chunk, length) if reverse else slice(chunks * chunk)
    order = range(chunk - 1, -1, -1) if reverse else range(chunk)
    z = s[:, in_chunks].unflatten(1, (chunks, chunk))  # (B, M, K, C, p)
    f = None if factors is None else factors[:, in_chunks].unflatten(1, (chunks, chunk))
    for previous, here in pairwise(order):
        _add_scaled(z[:, :, here], None if f is None else f[:, :, here], z[:, :, previous])
    if f is not None:  # the products of the factors from the first token of the chunk
        f = f.flip(2).cumprod(2).flip(2) if reverse else f.cumprod(2)
    for i in range(chunks - 1, -1, -1) if reverse else range(chunks):
        if carry is not None:
            _add_scaled(z[:, i], None if f is None else f[:, i], carry[:, None])
        carry = z[:, i, order[-1]]
    for i in range(in_chunks.start - 1, -1, -1) if reverse else range(in_chunks.stop, length):
        assert carry is not None
        _add_scaled(s[:, i], None if factors is None else factors[:, i], carry)
        carry = s[:, i]
    assert carry is not None
    return carry.clone()


def _add_scaled(total: Tensor, factor: Tensor | None, term: Tensor) -> None:
    if factor is None:
        total.add_(term)
    else:
        total.addcmul_(factor, term)


def decay_factors(decay: Tensor, valid: Tensor | None, batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return γ at each token and 1 at padding, which repeats the sum before it, (B, N, 2H, 1)."""
    factors = decay.to(dtype).repeat(2)[None, None, :, None].expand(batch, length, -1, -1)
    return factors if valid is None else torch.where(valid[:, :, None, None], factors, 1.0)
