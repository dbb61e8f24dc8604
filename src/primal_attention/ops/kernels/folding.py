"""A layer norm's weights inside of the linear map that follows it, and their gradients out of it.

With u = (x − mean) / deviation and the norm's gain γ and shift β inside the weights, W₁ LN(x) + b₁ = (W₁γ) u + c.
Then G = Σ dh uᵀ and g = Σ dh hold what the first layer needs: dW₁ = Gγ + g βᵀ, dγ = Σ_f W₁ G, dβ = W₁ᵀ g, db₁ = g.
The second layer's W₂ and b₂ come along, since one launch serves both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import column_sum


@triton.jit
def _fold_norm(
    gain, shift, w1, b1, w2, into, bias, out_of,
    D: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """W₁γ and W₂ in the type of the products, and b₁ + W₁β."""
    d, f = tl.arange(0, D), tl.program_id(0) * BF + tl.arange(0, BF)
    w, v = tl.load(w1 + f[:, None] * D + d[None]).to(tl.float32), tl.load(w2 + d[:, None] * F + f[None])
    c = tl.load(b1 + f).to(tl.float32) + tl.sum(w * tl.load(shift + d).to(tl.float32)[None], 1)
    w *= tl.load(gain + d).to(tl.float32)[None]
    tl.store(into + f[:, None] * D + d[None], w.to(into.dtype.element_ty))
    tl.store(out_of + d[:, None] * F + f[None], v.to(out_of.dtype.element_ty))
    tl.store(bias + f, c)


@triton.jit
def _unfold_norm(
    sums, gain, shift, w1, of_gain, of_shift, of_w1, of_b1, of_w2, of_b2,
    D: tl.constexpr, F: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The added sums of the way back → the gradients of all weights."""
    d, f = tl.arange(0, D), tl.arange(0, F)
    here = f[:, None] * D + d[None]
    outer, hidden = tl.load(sums + here), tl.load(sums + 2 * D * F + f)
    w = tl.load(w1 + here).to(tl.float32)
    scaled = outer * tl.load(gain + d).to(tl.float32)[None]
    scaled += hidden[:, None] * tl.load(shift + d).to(tl.float32)[None]
    tl.store(of_w1 + here, scaled.to(of_w1.dtype.element_ty))
    tl.store(of_gain + d, tl.sum(w * outer, 0).to(of_gain.dtype.element_ty))
    tl.store(of_shift + d, tl.sum(w * hidden[:, None], 0).to(of_shift.dtype.element_ty))
    tl.store(of_b1 + f, hidden.to(of_b1.dtype.element_ty))
    second = tl.load(sums + D * F + here) * SCALE
    tl.store(of_w2 + d[None] * F + f[:, None], second.to(of_w2.dtype.element_ty))
    tl.store(of_b2 + d, tl.load(sums + 2 * D * F + F + d).to(of_b2.dtype.element_ty))


def folded(
    gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """W₁γ, its bias and W₂ as the kernels read them."""
    (f, d), block = w1.shape, 16
    into, bias = torch.empty_like(w1, dtype=dtype), torch.empty_like(b1, dtype=torch.float32)
    out_of = torch.empty_like(w2, dtype=dtype)
    _fold_norm[(f // block,)](gain, shift, w1, b1, w2, into, bias, out_of, D=d, F=f, BF=block)
    return into, bias, out_of


def unfolded(
    parts: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Partial sums (programs, 2df + f + d) → gradients of the gain, the shift, W₁, b₁, W₂ and b₂; scale: of W₂'s."""
    of_gain, of_shift, of_w1, of_b1, of_w2, of_b2 = (torch.empty_like(t) for t in (gain, shift, w1, b1, w2, b2))
    f, d = w1.shape
    _unfold_norm[(1,)](
        column_sum(parts, torch.float32), gain, shift, w1, of_gain, of_shift, of_w1, of_b1, of_w2, of_b2,
        D=d, F=f, SCALE=scale, num_warps=8,
    )  # fmt: skip
    return of_gain, of_shift, of_w1, of_b1, of_w2, of_b2
