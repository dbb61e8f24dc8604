"""Primal-Attention, the equations line by line: any dtype, any device. The ground truth of every fast path.

In the letters of the paper, per head, with X_h the head's columns of the block's raw input:

    W_{e|X} = f(X_h)ᵀ W_e,   e_i = W_{e|X}ᵀ φ(q_i),      W_{r|X} = f(X_h)ᵀ W_r,   r_i = W_{r|X}ᵀ φ(k_i)
    o_i = W_o [e_i; r_i] + b_o,   heads side by side, then the usual output projection.

Shapes: B sequences, N tokens, H heads of width p, n landmarks, s = rank. `valid` is a (B, N) bool mask or None; the
valid tokens in their order are the sequence, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .sampling import landmark_indices, ragged_landmark_indices, token_of_rank

Phi = Callable[[Tensor], Tensor]


class Scores(NamedTuple):
    """The projection scores of the tokens on the two sets of directions; (B, H, N, s) each."""

    e: Tensor
    r: Tensor


class RunningState(NamedTuple):
    """Causal, not data-dependent: what is left of the past. Nothing here grows with the context."""

    query_sum: Tensor  # (B, H, p)
    key_sum: Tensor  # (B, H, p)
    weight: Tensor  # (B, H): how many tokens the sums hold, decayed as they are
    feature_sum: Tensor | None = None  # (B, H, p): Σ φ_k, only for the softmax map's D̂


class LandmarkState(NamedTuple):
    """Causal and data-dependent: the projection weights so far, and how many tokens came."""

    w_e_x: Tensor  # (B, H, p, s)
    w_r_x: Tensor  # (B, H, p, s)
    position: Tensor  # (B,)
    steps: int  # an upper bound of `position` that costs no look at the device
    feature_sum: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Sums, states and the objective are kept in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H·p) → (B, H, N, p)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x_h: Tensor) -> Tensor:
    """(B, H, N, p) → (B, N, H·p): the way back of `split_heads`."""
    return x_h.transpose(1, 2).flatten(2)


def landmark_rows(x_h: Tensor, landmarks: int, valid: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """f(X_h): evenly spaced rows of each sequence's own valid tokens; zero rows for an empty sequence.

    shift: how far each stands from its even place, in steps from one to the next, (n,).
    """
    if valid is None:
        return x_h[:, :, landmark_indices(x_h.shape[2], landmarks, x_h.device, shift)]  # (B, H, n, p)
    lengths = valid.sum(dim=1)
    rows = token_of_rank(valid, ragged_landmark_indices(lengths, landmarks, shift))  # (B, n)
    picked = x_h.gather(2, rows[:, None, :, None].expand(-1, x_h.shape[1], -1, x_h.shape[3]))
    return picked * (lengths > 0)[:, None, None, None]


def projection_weights(rows: Tensor, w: Tensor) -> Tensor:
    """W_{·|X} = f(X)ᵀ W. rows: (B, H, n, p), w: (H, n, s) → (B, H, p, s)."""
    return rows.mT @ w


def running_sum(
    z: Tensor, decay: Tensor | None = None, valid: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """s_i = γ·s_{i−1} + z_i over the valid tokens, in at least float32; a padded token repeats what stood before it.

    z: (B, H, N, p), decay γ: (H,), start: (B, H, p).
    """
    s = z.to(wide(z.dtype))
    if valid is not None:
        s = s * valid[:, None, :, None]
    if decay is None:
        s = s.cumsum(dim=2)
        return s if start is None else s + start[:, :, None]
    a = decay.to(s.dtype)[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
    if valid is not None:
        a = torch.where(valid[:, None, :, None], a, 1.0)
    s, a = linear_recurrence(s, a)
    return s if start is None else s + a * start[:, :, None]


CHUNK = 64  # 2⁶: six rounds of doubling solve a chunk
LEVELS = 4  # of chunks of chunks, when the length is not known yet: 64⁴ is 16 million tokens


def linear_recurrence(s: Tensor, a: Tensor, level: int = 1) -> tuple[Tensor, Tensor]:
    """y_i = a_i·y_{i−1} + s_i along dim 2, and the products a_1⋯a_i. s: (B, H, N, p), a: (B, H, N, 1).

    Each chunk is solved by doubling: after k rounds y_i holds the last 2^k terms of its chunk. The ends of the chunks
    are a shorter recurrence of the same kind. Only earlier terms are ever touched, so that not even a NaN gets from the
    future into the past, and no branch depends on N under torch.compile, so that one graph serves all lengths.
    """
    n = s.shape[2]
    if n == 1:
        return s, a
    chunks = (n + CHUNK - 1) // CHUNK
    spare = (0, 0, 0, chunks * CHUNK - n)
    s = F.pad(s, spare).unflatten(2, (chunks, CHUNK))  # (B, H, M, C, p)
    a = F.pad(a, spare, value=1.0).unflatten(2, (chunks, CHUNK))
    reach = 1
    while reach < CHUNK:
        s = torch.cat([s[..., :reach, :], s[..., reach:, :] + a[..., reach:, :] * s[..., :-reach, :]], dim=3)
        a = torch.cat([a[..., :reach, :], a[..., reach:, :] * a[..., :-reach, :]], dim=3)
        reach *= 2
    if level < LEVELS if torch.compiler.is_compiling() else chunks > 1:
        ends, factors = linear_recurrence(s[..., -1, :], a[..., -1, :], level + 1)
        s = s + a * F.pad(ends, (0, 0, 1, 0))[:, :, :-1, None]
        a = a * F.pad(factors, (0, 0, 1, 0), value=1.0)[:, :, :-1, None]
    return s.flatten(2, 3)[:, :, :n], a.flatten(2, 3)[:, :, :n]


def running_weight(z: Tensor, decay: Tensor | None, valid: Tensor | None, start: Tensor | None) -> Tensor:
    """The sum of the weights in `running_sum` of z, (B, H, N, 1): the divisor that makes a mean of it."""
    ones = torch.ones_like(z[..., :1], dtype=wide(z.dtype))
    return running_sum(ones, decay, valid, None if start is None else start[..., None])


def project(phi: Tensor, w_x: Tensor) -> Tensor:
    """e_i = W_{e|X}ᵀ φ(x_i). phi: (B, H, N, p), w_x: (B, H, p, s) or (H, p, s) → (B, H, N, s)."""
    return phi @ w_x.to(phi.dtype)


def energy(scores: Tensor) -> Tensor:
    """Σ_i e_i² per direction, in at least float32: (B, H, N, s) → (B, H, s)."""
    return scores.to(wide(scores.dtype)).square().sum(dim=2)


def causal_landmark_scores(
    phi: Tensor, x_h: Tensor, w: Tensor, grid: Tensor, position: Tensor, decay: Tensor | None, valid: Tensor | None
) -> Tensor:
    """e_i = W_{e|X≤i}ᵀ φ(x_i), W_{e|X≤i} = Σ_{j: g_j ≤ i} γ^(i − g_j) x_{g_j} W_e[j]ᵀ, without ever forming W_{e|X≤i}.

    grid g: (n,) positions of the landmarks; position: (B, N) of each token in its sequence. Equals
    ((φ(q) f(X)ᵀ) ⊙ [g_j ≤ i]) W_e: the landmarks are n keys whose values are the rows of W_e.
    """
    rows, present = causal_landmark_rows(x_h, grid, position, valid)  # (B, H, n, p), (B, n)
    return scores_of_landmarks(phi, rows, present, w, grid, position, decay)


def scores_of_landmarks(
    phi: Tensor, rows: Tensor, present: Tensor, w: Tensor, grid: Tensor, position: Tensor, decay: Tensor | None
) -> Tensor:
    """`causal_landmark_scores` of landmarks that are already picked. rows: (B, H, n, p), present: (B or 1, n)."""
    seen = (grid[None, None] <= position[..., None]) & present[:, None]  # (B, N, n)
    similarity = phi @ rows.mT  # (B, H, N, n)
    if decay is not None:
        similarity = similarity * landmark_decay(decay, grid, position, similarity.dtype)
    return similarity.masked_fill(~seen[:, None], 0.0) @ w.to(phi.dtype)


def causal_landmark_rows(x_h: Tensor, grid: Tensor, position: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of this stretch of the sequence that stand on the grid, and which grid points it holds."""
    first = position[:, :1] if valid is None else position[:, :1] - valid[:, :1].long() + 1
    rank = grid[None] - first  # (B, n): the grid point's place in this stretch
    count = torch.full_like(rank[:, :1], x_h.shape[2]) if valid is None else valid.sum(dim=1, keepdim=True)
    present = (rank >= 0) & (rank < count)
    rank = rank.clamp(min=0).minimum((count - 1).clamp(min=0))
    rows = rank if valid is None else token_of_rank(valid, rank)
    picked = x_h.gather(2, rows[:, None, :, None].expand(-1, x_h.shape[1], -1, x_h.shape[3]))
    return picked * present[:, None, :, None], present


def landmark_decay(decay: Tensor, grid: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
    """γ_h^(i − g_j), (B, H, N, n); 1 where the landmark lies ahead (its caller masks those)."""
    age = (position[..., None] - grid).clamp(min=0)[:, None]  # (B, 1, N, n)
    gamma = decay.to(wide(dtype))[None, :, None, None]
    return (gamma.log() * age).exp().to(dtype)


def objective(
    energy_e: Tensor,
    energy_r: Tensor,
    sqrt_lambda: Tensor,
    trace: Tensor,
    tokens: Tensor | int,
    form: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """J_b = ½ Σ_i ‖√Λ e_i‖² + ½ Σ_i ‖√Λ r_i‖² − Tr(W_eᵀ W_r), averaged over the heads: (B,), in at least float32.

    form "mean" averages the energies over the tokens, as training does (Λ is learned and absorbs the scale);
    form "sum" is the paper's J. energies: (B, H, s), trace: (B or 1, H), tokens: (B,) or one number.
    """
    lam = sqrt_lambda.to(wide(sqrt_lambda.dtype)).square()
    half = 0.5 * ((energy_e + energy_r) * lam).sum(dim=(1, 2)) / sqrt_lambda.shape[0]
    if form == "mean":
        half = half / (max(tokens, 1) if isinstance(tokens, int) else tokens.clamp(min=1))
    return half - trace.mean(dim=1)


def weight_trace(w_e: Tensor, w_r: Tensor) -> Tensor:
    """Tr(W_eᵀ W_r) per head in at least float32: (…, H, n, s) → (…, H)."""
    dtype = wide(w_e.dtype)
    return (w_e.to(dtype) * w_r.to(dtype)).sum(dim=(-2, -1))


def feature_sum(phi_k: Tensor, valid: Tensor | None) -> Tensor:
    """Σ φ_k over each sequence's valid tokens, (B, H, 1, p): Remark 4.1's D̂ is made of it where nothing is causal."""
    kept = phi_k if valid is None else phi_k * valid[:, None, :, None]
    return kept.to(wide(phi_k.dtype)).sum(dim=2, keepdim=True)
