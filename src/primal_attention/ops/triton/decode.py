"""One token of the causal data-independent mode: update the sums, normalise and project, in one launch.

    s ← γ s + z,   e = Wᵀ s / ‖s‖                                            (reference: `reference.sum_features`)

One program per sequence, head and side. The cost does not depend on the number of tokens read before.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import ceil_div, inverse_norms, jit_kernel, power_of_two


@jit_kernel
def _decode_kernel(
    qk, query_sum, key_sum, weight, w_e, w_r, log_decay, scores, new_query_sum, new_key_sum, new_weight,
    HEADS: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, NS: tl.constexpr,
    DECAY: tl.constexpr,
):  # fmt: skip
    sequence, lane = tl.program_id(0), tl.program_id(1)
    head, side = lane // 2, lane % 2
    p = tl.arange(0, BP)
    gamma = tl.exp(tl.load(log_decay + head)) if DECAY else 1.0
    place = (sequence * HEADS + head) * P + p
    old = query_sum if side == 0 else key_sum
    new = new_query_sum if side == 0 else new_key_sum
    w = w_e if side == 0 else w_r
    z = tl.load(qk + sequence * (2 * HEADS * P) + (side * HEADS + head) * P + p, mask=p < P, other=0.0).to(tl.float32)
    total = gamma * tl.load(old + place, mask=p < P, other=0.0) + z
    tl.store(new + place, total, mask=p < P)
    if side == 0:
        tl.store(new_weight + sequence * HEADS + head, gamma * tl.load(weight + sequence * HEADS + head) + 1.0)
    inverse, _ = inverse_norms(total[None])
    phi = tl.sum(total[None] * inverse[:, None], 0)
    for block in range(NS):
        s = block * BS + tl.arange(0, BS)
        inside = (p[:, None] < P) & (s[None] < RANK)
        part = tl.load(w + (head * P + p)[:, None] * RANK + s[None], mask=inside, other=0.0).to(tl.float32)
        e = tl.sum(phi[:, None] * part, 0)
        out = scores + ((sequence * HEADS + head) * 2 + side) * RANK + s
        tl.store(out, e.to(scores.dtype.element_ty), mask=s < RANK)


def decode(
    qk: Tensor,
    query_sum: Tensor,
    key_sum: Tensor,
    weight: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scores (B, H, 2, s) of one token each and the state after it.

    qk: (B, 2·H·p); query_sum, key_sum: (B, H, p) float32; weight: (B, H).
    """
    query_sum, key_sum, weight = (t.contiguous() for t in (query_sum, key_sum, weight))
    batch, heads, p = query_sum.shape
    rank = w_e.shape[2]
    scores = torch.empty((batch, heads, 2, rank), dtype=qk.dtype, device=qk.device)
    after = torch.empty_like(query_sum), torch.empty_like(key_sum), torch.empty_like(weight)
    block = min(power_of_two(rank), 64)
    _decode_kernel[(batch, 2 * heads)](
        qk.contiguous(), query_sum, key_sum, weight, w_e, w_r, qk if log_decay is None else log_decay, scores, *after,
        HEADS=heads, P=p, RANK=rank, BP=power_of_two(p), BS=block, NS=ceil_div(rank, block),
        DECAY=log_decay is not None,
    )  # fmt: skip
    return scores, *after
