"""Where distillation starts: new Primal layers that are the best fit, in closed form, to the attention they replace.

With q, k and the output map kept, a head's output is linear in the products z of its features with the landmarks,

    o_i = M_qᵀ z_i^q + M_kᵀ z_i^k + b,    z_i^q = f(X)_h φ(q_i),   z_i^k = f(X)_h φ(k_i),

so M_q and M_k are a ridge regression of what the replaced head gave, and held-out batches choose its ridge. Then
W_e = M_q A, W_r = M_k B and W_o = [A; B]ᵀ, where A and B hold the s directions in which the fitted outputs vary most:
all of them, and no loss, from rank = head width on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.primal import PrimalAttention
from .sites import StandIn
from .spectrum import call

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4)  # of the features' mean variance; the last leaves a constant


class Moments:
    """Sums over tokens, per head, of [z; 1][z; 1]ᵀ and [z; 1] oᵀ."""

    def __init__(self, zz: Tensor, zo: Tensor, count: int) -> None:
        self.zz, self.zo, self.count = zz, zo, count

    @classmethod
    def of(cls, z: Tensor, o: Tensor) -> Moments:
        """z (T, H, f), o (T, H, p)."""
        z = torch.cat([z, torch.ones_like(z[..., :1])], -1).double()
        zz, zo = torch.einsum("thf,thg->hfg", z, z), torch.einsum("thf,thp->hfp", z, o.double())
        return cls(zz, zo, z.shape[0])

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.zz + other.zz, self.zo + other.zo, self.count + other.count)

    @property
    def covariance(self) -> Tensor:
        """Of the features, (H, f, f)."""
        mean = self.zz[:, :-1, -1] / self.count
        return self.zz[:, :-1, :-1] / self.count - mean[:, :, None] * mean[:, None, :]

    def solve(self, ridge: Tensor) -> Tensor:
        """The regression with one ridge per head, (H, f + 1, p); the last row holds the constants."""
        mean_z, mean_o = self.zz[:, :-1, -1] / self.count, self.zo[:, -1] / self.count
        covariance = self.covariance
        cross = self.zo[:, :-1] / self.count - mean_z[:, :, None] * mean_o[:, None, :]
        size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        factor = torch.linalg.cholesky(covariance + (ridge * size)[:, None, None] * eye)
        maps = torch.cholesky_solve(cross, factor)
        return torch.cat([maps, (mean_o - torch.einsum("hf,hfp->hp", mean_z, maps))[:, None]], 1)

    def error(self, maps: Tensor) -> Tensor:
        """Mean square error of a regression on these tokens, per head, but for what does not depend on it."""
        square = torch.einsum("hfp,hfg,hgp->h", maps, self.zz, maps)
        return (square - 2 * (maps * self.zo).sum((1, 2))) / self.count


def best_ridge(halves: tuple[Moments, Moments]) -> Tensor:
    """The ridge with which each head's fit on one half does best on the other, (H,).

    Tokens of one sequence share their landmarks, so there is less to learn from than there are tokens.
    """
    first, second = halves
    ridges = first.zz.new_tensor(RIDGES)
    errors = [
        second.error(first.solve(ridge.expand(len(first.zz)))) + first.error(second.solve(ridge.expand(len(first.zz))))
        for ridge in ridges
    ]
    return ridges[torch.stack(errors).argmin(0)]


@torch.no_grad()
def start(teacher: nn.Module, pairs: dict[str, tuple[StandIn, nn.Module]], batches: Iterable[Any]) -> list[str]:
    """Set the new weights of the replaced layers; the names of those whose heads could be read off the teacher."""
    moments: dict[str, dict[int, Moments]] = {name: {} for name in pairs}
    for number, batch in enumerate(batches):
        inputs: dict[str, Any] = {}
        heads: dict[str, Tensor] = {}
        hooks = []
        for name, (student, original) in pairs.items():
            out = output_map(original, student.primal)
            if out is not None:
                hooks.append(original.register_forward_pre_hook(_keep_call(inputs, name), with_kwargs=True))
                hooks.append(out.register_forward_pre_hook(_keep_input(heads, name)))
        try:
            call(teacher, batch)
        finally:
            for hook in hooks:
                hook.remove()
        for name in heads.keys() & inputs.keys():
            student, (args, kwargs) = pairs[name][0], inputs[name]
            x, padding = student.tokens(*args, **kwargs)
            if x.shape == heads[name].shape:
                new, halves = _moments(student.primal, x, padding, heads[name]), moments[name]
                half = number % 2
                halves[half] = halves[half] + new if half in halves else new
    fitted = [name for name, halves in moments.items() if len(halves) == 2]
    for name in fitted:
        first, second = moments[name][0], moments[name][1]
        whole = first + second
        _set(pairs[name][0].primal, whole.solve(best_ridge((first, second))), whole.covariance)
    return fitted


def _moments(layer: PrimalAttention, x: Tensor, padding: Tensor | None, heads: Tensor) -> Moments:
    q, k = layer.kernel_factors(x, padding)  # (B, H, N, f) each
    valid = torch.ones_like(x[..., 0], dtype=torch.bool) if padding is None else ~padding
    features = torch.cat([q, k], -1).transpose(1, 2)[valid]
    return Moments.of(features, heads.unflatten(-1, (layer.num_heads, -1))[valid])


def _set(layer: PrimalAttention, fit: Tensor, covariance: Tensor) -> None:
    maps, constants = fit[:, :-1], fit[:, -1]
    half, rank, width = maps.shape[1] // 2, layer.rank, layer.head_dim
    kept = min(rank, width)
    layer.score_proj.weight.zero_()
    for weights, part, columns in ((layer.w_e, slice(0, half), 0), (layer.w_r, slice(half, None), rank)):
        m, c = maps[:, part], covariance[:, part, part]
        basis = torch.linalg.eigh(torch.einsum("hfp,hfg,hgq->pq", m, c, m))[1].flip(-1)[:, :kept]  # (p, kept)
        weights[..., :kept].copy_(m @ basis)
        layer.score_proj.weight[:, columns : columns + kept].copy_(basis)
    if layer.score_proj.bias is not None and layer.out_proj.bias is not None:
        # The heads share one bias; what each needs goes through the output map into its bias.
        layer.score_proj.bias.zero_()
        layer.out_proj.bias.add_(layer.out_proj.weight @ constants.flatten().to(layer.out_proj.weight))


def output_map(original: nn.Module, layer: PrimalAttention) -> nn.Module | None:
    """The map behind the heads of the replaced attention: the one whose weights the new layer has kept."""
    weight = layer.out_proj.weight
    for module in original.modules():
        found = getattr(module, "weight", None)
        # torch's own attention has such a map but never calls it as a module.
        if isinstance(original, nn.MultiheadAttention) or not isinstance(found, Tensor) or found.shape != weight.shape:
            continue
        if torch.equal(found, weight) or torch.equal(found.T, weight):
            return module
    return None


def _keep_call(seen: dict[str, Any], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = args, {key: value for key, value in kwargs.items() if key != "past_key_values"}

    return hook


def _keep_input(seen: dict[str, Any], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[name] = args[0]

    return hook
