"""The delta rule: projection weights that each token updates by one step of least squares.

    W_i = γ_i W_{i−1} + k_i u_iᵀ,   u_i = β_i (v_i − γ_i W_{i−1}ᵀ k_i),   y_i = W_iᵀ q_i            `recurrence`

γ_i and β_i in [0, 1] are one number per token and head. With ‖k‖ = 1 and β = 1 a token replaces the value stored at its
key. A layer (`nn.delta`) applies the rule to both sides, which exchange queries and keys:               `delta_scores`

    e: q = φ(q), k = φ(k), v = h_r          r: q = φ(k), k = φ(q), v = h_e

Chunks of C tokens turn the recurrence into matrix products. With G_i = Σ_{j≤i} log γ_j in the chunk,        `chunked`

    D_ij = e^(G_i − G_j) for j ≤ i, else 0,        T = (I + [β_i k_i·k_j D_ij]_{j<i})⁻¹
    U = T diag(β) (V − e^G K W),   Y = e^G Q W + (Q Kᵀ ∘ D) U,   W ← e^(G_C) W + Kᵀ e^(G_C − G) U

Every exponent is ≤ 0, so nothing overflows. `triton/delta_rule.py` computes the same in a few launches.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024; with decay, "Gated
Delta Networks: Improving Mamba2 with Delta Rule", 2025.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .feature_maps import COSINE, accumulation_dtype, cosine, disabled_autocast
from .primal import _transform_problem, current_device, fused_problem
from .reference import score_energy

BACKENDS = ("auto", "reference", "fused")
CHUNK = 64
MAX_WIDTH = 128  # largest head width and rank of the fused kernels
EPS = 1e-5  # of the scores' norm: scores far smaller than the values stay small


def uses_kernels(backend: str, x: Tensor, head_dim: int, rank: int) -> bool:
    """Return True if the fused kernels support the call; raise if backend="fused" and they do not."""
    if backend == "reference" or (backend == "auto" and not x.is_cuda):
        return False
    problem = fused_problem(x)
    if problem is None and max(head_dim, rank) > MAX_WIDTH:
        problem = f"head width {head_dim} and rank {rank} must not exceed {MAX_WIDTH}"
    if problem is None:
        problem = _transform_problem(COSINE)
    if problem is not None and backend == "fused":
        raise ValueError(f"backend='fused' does not support this call: {problem} (backend='auto' falls back)")
    return problem is None


# The rule


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (…, N, s) and the last W (…, p, s), token by token.

    q, k: (…, N, p); v: (…, N, s); log_decay, beta: (…, N); initial: the W before the first token, (…, p, s). The
    leading dimensions of log_decay and initial may broadcast.
    """
    dtype = accumulation_dtype(log_decay.dtype)
    w = _initial(k, v, initial, dtype)
    rows = []
    with disabled_autocast(q.device):
        for i in range(q.shape[-2]):
            key, value = k[..., i, :, None].to(dtype), v[..., i, None, :].to(dtype)
            w = log_decay[..., i, None, None].to(dtype).exp() * w
            w = w + key @ (beta[..., i, None, None].to(dtype) * (value - key.mT @ w))
            rows.append(q[..., i, None, :].to(dtype) @ w)
    return torch.cat(rows, dim=-2).to(v.dtype), w


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `recurrence`, chunk by chunk. Products are in the dtype of q; W, T and the decay are at least float32."""
    length, p, narrow, dtype = q.shape[-2], k.shape[-1], q.dtype, accumulation_dtype(log_decay.dtype)
    w = _initial(k, v, initial, dtype)
    size = min(chunk, length)
    spare = -length % size  # the rows that fill the last chunk have γ = 1 and β = 0
    q, k, v = (F.pad(t, (0, 0, 0, spare)).contiguous().unflatten(-2, (-1, size)) for t in (q, k, v))  # (…, M, C, ·)
    log_decay, beta = (F.pad(t.to(dtype), (0, spare)).unflatten(-1, (-1, size)) for t in (log_decay, beta))
    total, beta = log_decay.cumsum(dim=-1), beta[..., None]
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    with disabled_autocast(q.device):
        eye = torch.eye(size, dtype=dtype, device=q.device)
        overlap = beta * (k @ k.mT) * decay_between(total, -1)
        solve = torch.linalg.solve_triangular(eye + overlap, eye.expand_as(overlap), upper=False, unitriangular=True)
        solve = solve.to(narrow)
        # U = new_values − keys_read W, so that W ← M W + B with the transition M and B = keys_to_end new_values.
        new_values, keys_read = solve @ (beta * v).to(narrow), solve @ (beta * from_start * k).to(narrow)
        keys_to_end = (to_end * k).to(narrow).mT
        transition = from_start[..., -1:, :] * torch.eye(p, dtype=dtype, device=q.device) - keys_to_end @ keys_read
        states = [w]
        for m, b in zip(transition.unbind(-3), (keys_to_end @ new_values).to(dtype).unbind(-3), strict=True):
            states.append(m @ states[-1] + b)
        w_before = torch.stack(states[:-1], dim=-3).to(narrow)
        local_scores = (q @ k.mT) * decay_between(total, 0).to(narrow)
        y = local_scores @ (new_values - keys_read @ w_before) + (q * from_start.to(narrow)) @ w_before
    return y.flatten(-3, -2)[..., :length, :], states[-1]


def decay_between(total: Tensor, diagonal: int = 0) -> Tensor:
    """D from the sums G (…, C): e^(G_i − G_j) up to a diagonal, zero above it, (…, C, C)."""
    size = total.shape[-1]
    past = torch.ones(size, size, dtype=torch.bool, device=total.device).tril(diagonal)
    return (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp()


def _initial(k: Tensor, v: Tensor, initial: Tensor | None, dtype: torch.dtype) -> Tensor:
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if initial is None:
        return torch.zeros(shape, dtype=dtype, device=k.device)
    return initial.to(dtype).expand(shape)


# The parts of a layer


def delta_scores(
    phi: Tensor, h: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None = None, *, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """The scores [e; r], (B, N, H, 2, s), and the last W_e and W_r, (B, 2, H, p, s) in at least float32.

    Args:
        phi: φ(q) and φ(k), (B, N, 2, H, p).
        h: h_r and h_e, (B, N, 2, H, s).
        log_decay: log γ, (B, N, H).
        beta: β of both sides, (B, N, 2, H).
        initial: W_e and W_r before the first token, (B, 2, H, p, s).
        fused: use the kernels.
    """
    if fused:
        from .triton.delta_rule import DeltaRule

        batch, _, _, heads, p = phi.shape
        if initial is not None:
            initial = initial.float().expand(batch, 2, heads, p, h.shape[-1]).contiguous()
        rows = (t.contiguous() for t in (phi, h, log_decay.float(), beta.float()))
        with current_device(phi):
            return DeltaRule.apply(*rows, initial)  # type: ignore[no-any-return]
    q, v = phi.permute(0, 2, 3, 1, 4), h.permute(0, 2, 3, 1, 4)  # (B, 2, H, N, ·)
    compute = recurrence if phi.shape[1] == 1 else chunked
    y, final = compute(q, q.flip(1), v, log_decay.transpose(1, 2)[:, None], beta.permute(0, 2, 3, 1), initial)
    return y.permute(0, 3, 2, 1, 4), final


def split_features(z: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """φ(q), φ(k) (B, N, 2, H, p) and h_r, h_e (B, N, 2, H, s) of their projections z, (B, N, 2H(p + s))."""
    qk, h = z.split([z.shape[-1] - 2 * heads * rank, 2 * heads * rank], dim=-1)
    return cosine(qk.unflatten(-1, (2, heads, -1))), h.unflatten(-1, (2, heads, -1))


def conv_features(z: Tensor, weight: Tensor, bias: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """`split_features(silu(conv(z)))` by the kernels. weight: (K, 2H(p + s)), row j weighs the input j tokens ago."""
    from .triton.delta_rule import DeltaFeatures

    with current_device(z):
        return DeltaFeatures.apply(z.contiguous(), weight, bias, heads, rank)  # type: ignore[no-any-return]


def gated_scores(
    scores: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    kind: Literal["silu", "sigmoid"] = "silu",
    *,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMS-normalised scores of each head times the gate, (B, N, H, 2s), and the energies Σ_i [e; r]², (B, H, 2, s).

    Args:
        scores: (B, N, H, 2, s).
        weight: weight of the norm, (2s,).
        gate: before its nonlinearity, (B, N, H, 2s).
        kind: the nonlinearity.
        fused: use the kernels.
    """
    flat = scores.flatten(3)
    if fused:
        from .triton.delta_rule import GatedScores

        gate = None if gate is None else gate.to(flat.dtype).contiguous()
        with current_device(flat):
            out, energy = GatedScores.apply(flat.contiguous(), gate, weight, EPS, kind)
    else:
        out = F.rms_norm(flat, flat.shape[-1:], weight.to(flat.dtype), EPS).to(flat.dtype)  # autocast may widen
        if gate is not None:
            out = out * (F.silu(gate) if kind == "silu" else gate.sigmoid())
        energy = score_energy(flat.transpose(1, 2))
    return out, energy.unflatten(-1, (2, -1))
