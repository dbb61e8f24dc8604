"""The p × p matrices of `wide.py`: A and B from a head's weights, and from C and D its energies and gradients.

Functions for use inside kernels. W is a side's weights (p, S), W_o its half of the score map; the rank comes in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import dot


@triton.jit
def directions(w, block, like, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """A block of W's columns, (BP, BS)."""
    p, s = tl.arange(0, BP), block * BS + tl.arange(0, BS)
    return tl.load(w + p[:, None] * S + s[None], mask=(p[:, None] < P) & (s[None] < S), other=0.0).to(
        like.dtype.element_ty
    )


@triton.jit
def score_map(score_weight, block, P: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """The same columns of W_o's half for this side, (BP, BS)."""
    p, s = tl.arange(0, BP), block * BS + tl.arange(0, BS)
    return tl.load(
        score_weight + p[:, None] * (2 * RANK) + s[None], mask=(p[:, None] < P) & (s[None] < RANK), other=0.0
    )  # fmt: skip


@triton.jit
def add_rows(
    low, high, w, right, block, like,
    P: tl.constexpr, S: tl.constexpr, SHORT: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of W's columns times `right`, (BS, BP), onto the sums of `no_sums(SHORT, BP)`.

    In float32 they are halves: ptxas 12.8 leaves warp-group products of TF32 out of some loops, and sums stay zero.
    """
    if SHORT < 64 and BP >= 64:
        HALF: tl.constexpr = BP // 2
        low += dot(directions(w, block, like, P, S, HALF, BS), right, PRECISION)
        high += dot(directions(w + HALF * S, block, like, P - HALF, S, HALF, BS), right, PRECISION)
    else:
        low += dot(directions(w, block, like, P, S, BP, BS), right, PRECISION)
    return low, high


@triton.jit
def output_map(
    w, score_weight, like,
    P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A = W W_oᵀ, (BP, BP)."""
    SHORT: tl.constexpr = 32 if like.dtype.element_ty == tl.float32 else BP
    low, high = no_sums(SHORT, BP)
    for block in range(NS):
        w_o = tl.trans(score_map(score_weight, block, P, RANK, BP, BS))
        low, high = add_rows(low, high, w, w_o, block, like, P, S, SHORT, BP, BS, PRECISION)
    return in_one(low, high, SHORT, BP).to(like.dtype.element_ty)


@triton.jit
def twice_energy(grad_energy, block, RANK: tl.constexpr, BS: tl.constexpr):
    s = block * BS + tl.arange(0, BS)
    return 2.0 * tl.load(grad_energy + s, mask=s < RANK, other=0.0)


@triton.jit
def energy_map(
    w, grad_energy, like,
    P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B = 2 W diag(g_E) Wᵀ over its largest weight, which 16 bits might not hold, and that weight."""
    all_s = tl.arange(0, BR)
    most = 2.0 * tl.max(tl.abs(tl.load(grad_energy + all_s, mask=all_s < RANK, other=0.0)), 0)
    most = tl.where(most > 0.0, most, 1.0)
    SHORT: tl.constexpr = 32 if like.dtype.element_ty == tl.float32 else BP
    low, high = no_sums(SHORT, BP)
    for block in range(NS):
        w_s = directions(w, block, like, P, S, BP, BS)
        weighted = w_s.to(tl.float32) * (twice_energy(grad_energy, block, RANK, BS) / most)[None]
        weighted = tl.trans(weighted.to(w_s.dtype))
        low, high = add_rows(low, high, w, weighted, block, like, P, S, SHORT, BP, BS, PRECISION)
    return in_one(low, high, SHORT, BP).to(like.dtype.element_ty), most


@triton.jit
def store_energies(
    gram, w, energy, like,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E_s = w_sᵀ C w_s. Where C is nearly of rank one its rounding shows in every E_s: two terms of 16 bits hold it."""
    kind: tl.constexpr = like.dtype.element_ty
    FINE: tl.constexpr = "tf32x3" if PRECISION == "rounded" else PRECISION
    high = gram.to(kind)
    low = (gram - high.to(tl.float32)).to(kind)
    for block in range(NS):
        s = block * BS + tl.arange(0, BS)
        w_s = tl.trans(directions(w, block, like, P, S, BP, BS))
        found = dot(w_s, high, FINE)
        if kind != tl.float32:
            found += dot(w_s, low, FINE)
        tl.store(energy + s, tl.sum(found * w_s.to(tl.float32), 1), mask=s < S)


@triton.jit
def add(target, value, again, mask):
    """Into partial sums that this program alone owns; the first time there is nothing to add to."""
    before = tl.load(target, mask=mask & again, other=0.0)
    tl.store(target, before + value, mask=mask)


@triton.jit
def pile(target, value, again, mask):
    """As `add`, without waiting for what is there.

    A thread meets the same places in every chunk, so their sums have one order. Masks, no branch: two branches behind
    products of a loop are beyond Triton 3.6, which then compiles nothing.
    """
    tl.store(target, value, mask=mask & (again == 0))
    tl.atomic_add(target, value, mask=mask & again, sem="relaxed")


@triton.jit
def largest(twice):
    """Of a head's energies: what B is divided by, which 16 bits might not hold."""
    most = tl.max(tl.abs(twice), 0)
    return tl.where(most > 0.0, most, 1.0)


@triton.jit
def weight_gradients_at_once(
    turned, gram, w_s, w_o, twice, grad_w, grad_score, again,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
    DEPENDS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `weight_gradients`, where W and W_o are at hand in one block; turned: Dᵀ."""
    p, s = tl.arange(0, BP), tl.arange(0, BS)
    fits = (p[:, None] < P) & (s[None] < S)
    turned = turned.to(w_s.dtype)
    of_w = dot(tl.trans(turned), w_o, PRECISION)
    if ENERGY:
        of_w += dot(gram.to(w_s.dtype), w_s, PRECISION) * twice[None]
    target = grad_w + p[:, None] * S + s[None]
    if DEPENDS:
        tl.store(target, of_w.to(grad_w.dtype.element_ty), mask=fits)
    else:
        pile(target, of_w, again, fits)
    pile(grad_score + p[:, None] * (2 * S) + s[None], dot(turned, w_s, PRECISION), again, fits)
    tl.debug_barrier()  # the next chunk's sums may be added by other threads than wrote these


@triton.jit
def weight_gradients(
    cross, gram, w, score_weight, grad_energy, grad_w, grad_score, again, like,
    P: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    DEPENDS: tl.constexpr, ENERGY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW, which is the chunk's own where the weights depend on the data and a partial sum where not, and dW_o."""
    kind = like.dtype.element_ty
    cross, gram = cross.to(kind), gram.to(kind)
    p = tl.arange(0, BP)
    for block in range(NS):
        # Transposed, (BS, BP): few rows keep several products of one loop off the warp-group instructions.
        s = block * BS + tl.arange(0, BS)
        fits = (p[None] < P) & (s[:, None] < S)
        w_s = tl.trans(directions(w, block, like, P, S, BP, BS))
        of_w = dot(tl.trans(score_map(score_weight, block, P, RANK, BP, BS)), tl.trans(cross), PRECISION)
        if ENERGY:
            of_w += dot(w_s, gram, PRECISION) * twice_energy(grad_energy, block, RANK, BS)[:, None]
        of_score = dot(w_s, cross, PRECISION)
        target = grad_w + p[None] * S + s[:, None]
        if DEPENDS:
            tl.store(target, of_w.to(grad_w.dtype.element_ty), mask=fits)
        else:
            add(target, of_w, again, fits)
        add(grad_score + p[None] * (2 * S) + s[:, None], of_score, again, fits)
    tl.debug_barrier()  # the next chunk's sums may be read by other threads than wrote these


@triton.jit
def no_sums(BT: tl.constexpr, BP: tl.constexpr):
    """Room for a (BP, BP) sum over blocks of BT rows.

    In halves of its rows where blocks are short: then no product of the loop is tall enough for the warp-group
    instructions, which the compiler gets wrong in some loops. Otherwise all of it is in the first.
    """
    ROWS: tl.constexpr = BP // 2 if BT < 64 and BP >= 64 else BP
    return tl.zeros((ROWS, BP), tl.float32), tl.zeros((ROWS if ROWS < BP else 16, BP), tl.float32)


@triton.jit
def add_product(low, high, left, right, BT: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr):
    """leftᵀ right onto such a sum."""
    if BT < 64 and BP >= 64:
        upper, lower = tl.split(tl.permute(tl.reshape(left, (BT, 2, BP // 2)), (0, 2, 1)))
        low += dot(tl.trans(upper), right, PRECISION)
        high += dot(tl.trans(lower), right, PRECISION)
    else:
        low += dot(tl.trans(left), right, PRECISION)
    return low, high


@triton.jit
def in_one(low, high, BT: tl.constexpr, BP: tl.constexpr):
    whole = low
    if BT < 64 and BP >= 64:
        whole = tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), (BP, BP))
    return whole
