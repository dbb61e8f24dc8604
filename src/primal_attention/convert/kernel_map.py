"""A head to look at: its kernel matrix on one sequence, and how much each landmark has in each token's output.

    o_i = Σ_j (A_j ⟨f_j, φ_q(x_i)⟩ + B_j ⟨f_j, φ_k(x_i)⟩),   A_j = W_s[:, :s] w_{e,j},   B_j = W_s[:, s:] w_{r,j}

The share of landmark j in token i is the length of its term over the sum of the lengths. Biases belong to no landmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.primal import PrimalAttention
from .matrices import Matrix, watching
from .spectrum import batches, call


@dataclass(frozen=True)
class KernelMap:
    """One head on one sequence, without its padding; `share` is None for softmax and for layers without landmarks."""

    name: str
    kind: str
    head: int
    matrix: Tensor  # (N, N)
    share: Tensor | None  # (N, landmarks), rows sum to 1


@torch.no_grad()
def kernel_map(model: nn.Module, inputs: Any, layer: int = -1, head: int = 0, case: int = 0) -> KernelMap:
    """The map of a head in the layer of this number (negative: from the end), on one case of a batch."""
    found: dict[str, tuple[nn.Module, Matrix]] = {}
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with watching(model, lambda name, module, matrix: found.__setitem__(name, (module, matrix))) as names:
            call(model, next(iter(batches(inputs))))
    finally:
        for module, training in was_training.items():
            module.training = training
    names = [name for name in names if name in found]
    if not -len(names) <= layer < len(names):
        raise ValueError(f"layer {layer} is asked for, but the model shows {len(names)} attentions, from 0")
    name = names[layer]
    module, matrix = found[name]
    dense = matrix.dense()
    cases, heads = dense.shape[:2]
    if not 0 <= head < heads:
        raise ValueError(f"head {head} is asked for, but {name} has {heads} heads, from 0")
    if not 0 <= case < cases:
        raise ValueError(f"case {case} is asked for, but the batch has {cases}, from 0")
    shown = dense[case, head]
    seen = shown.ne(0).any(dim=0)  # nobody looks at padding: its columns are zero
    share = None
    if isinstance(module, PrimalAttention) and module.data_dependent:
        assert matrix.left is not None
        assert matrix.right is not None
        share = landmark_share(module, matrix.left[case, head][seen], matrix.right[case, head][seen], head).cpu()
    return KernelMap(name, matrix.kind, head, shown[seen][:, seen].cpu(), share)


def landmark_share(layer: PrimalAttention, phi_q: Tensor, phi_k: Tensor, head: int) -> Tensor:
    """(N, n) from the kernel factors (N, n) of one head and sequence."""
    by_e, by_r = layer.score_proj.weight.split(layer.rank, dim=1)  # (p, s) each
    a, b = layer.w_e[head] @ by_e.T, layer.w_r[head] @ by_r.T  # (n, p): A_j, B_j
    squares = phi_q**2 * (a * a).sum(1) + phi_k**2 * (b * b).sum(1) + 2 * phi_q * phi_k * (a * b).sum(1)
    length = squares.clamp(min=0.0).sqrt()
    total = length.sum(1, keepdim=True)
    return length / torch.where(total > 0, total, torch.ones_like(total))
