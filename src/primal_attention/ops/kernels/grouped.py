"""The gradients of weights that a group of chunks shares: `square.weight_gradients` for sequences of one W.

    dW = D W_o + Σ_chunks 2 C W diag(g_E),        dW_o = Dᵀ W

D is summed over the whole group and multiplied once; only the energies' weights g_E differ from chunk to chunk.
Functions for use inside kernels; everything is transposed, (BS, BP), for the reason given in `square.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import dot
from .square import directions, score_map, twice_energy


@triton.jit
def place(target, block, stride, S: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """Where a block of directions stands, (BS, BP), and which of it there is."""
    p, s = tl.arange(0, BP), block * BS + tl.arange(0, BS)
    return target + p[None] * stride + s[:, None], (p[None] < P) & (s[:, None] < S)


@triton.jit
def add_energy_gradient(
    gram, w, grad_energy, grad_w, again, like,
    P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's part of dW, onto what the group's earlier chunks left there, if there were any (`again`)."""
    gram = gram.to(like.dtype.element_ty)
    for block in range(NS):
        target, fits = place(grad_w, block, S, S, P, BP, BS)
        before = tl.load(target, mask=fits & again, other=0.0)  # first, so that the product hides the wait
        w_s = tl.trans(directions(w, block, like, P, S, BP, BS))
        of_w = dot(w_s, gram, PRECISION) * twice_energy(grad_energy, block, RANK, BS)[:, None]
        tl.store(target, before + of_w, mask=fits)
    tl.debug_barrier()  # what stands there may be read next by other threads than wrote it


@triton.jit
def store_output_gradients(
    cross, w, score_weight, grad_w, grad_score, like,
    P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The group's dW_o, and its part of dW through the output. ENERGY: the chunks left theirs there."""
    cross = cross.to(like.dtype.element_ty)
    for block in range(NS):
        target, fits = place(grad_w, block, S, S, P, BP, BS)
        before = tl.load(target, mask=fits, other=0.0) if ENERGY else tl.zeros((BS, BP), tl.float32)
        w_o = tl.trans(score_map(score_weight, block, P, RANK, BP, BS))
        tl.store(target, before + dot(w_o, tl.trans(cross), PRECISION), mask=fits)
    for block in range(NS):  # a loop of its own: one product in each
        w_s = tl.trans(directions(w, block, like, P, S, BP, BS))
        target, fits = place(grad_score, block, 2 * S, S, P, BP, BS)
        tl.store(target, dot(w_s, cross, PRECISION), mask=fits)
