"""Adapter for timm's ViT/DeiT family, known by its structure: one map `qkv`, one map `proj`, `num_heads`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.primal import PrimalAttention
from .masks import allowed, padding_of
from .sites import RELATIVE, Projections, Refusal, Site, StandIn, UnfitError, extra_parts, linear, relative_sign

KNOWN = {"qkv", "proj", "attn_drop", "proj_drop", "softmax"}


class PrimalImageAttention(StandIn):
    """Stands in for timm's Attention: images in, tokens of the same shape out."""

    def __init__(self, primal: PrimalAttention, proj_drop: nn.Module) -> None:
        super().__init__(primal)
        self.num_heads, self.head_dim = primal.num_heads, primal.head_dim
        self.proj_drop = proj_drop

    def tokens(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and not self.primal.causal:
            raise ValueError("is_causal=True needs a causal layer: primalize(…, causal=True)")
        if attn_mask is None:
            return x, None
        seen = allowed(attn_mask)
        seen = seen.reshape(-1, *seen.shape[-2:]).expand(x.shape[0], -1, -1) if seen.ndim < 4 else seen[:, 0]
        return x, padding_of(seen.expand(x.shape[0], -1, -1), self.primal.causal)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.proj_drop(self.primal(*self.tokens(x, *args, **kwargs)))


def recognise(name: str, module: nn.Module, parent: nn.Module | None) -> Site | Refusal | None:
    qkv, proj, heads = (getattr(module, part, None) for part in ("qkv", "proj", "num_heads"))
    if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and isinstance(heads, int)):
        return None
    if relative_sign(module):
        return Refusal(name, module, RELATIVE)
    if "rope" in type(module).__name__.lower():
        return Refusal(name, module, "its calls bring rotary positions, which this adapter does not take")
    extra = extra_parts(module, KNOWN)
    if extra:
        return Refusal(name, module, f"it has {', '.join(extra)}, which Primal-Attention has no place for")
    if qkv.out_features != 3 * qkv.in_features:
        return Refusal(
            name, module, f"its qkv maps {qkv.in_features} to {qkv.out_features}, not to three times as many"
        )
    weight, bias = linear(qkv)
    (q, k, _), biases = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
    dropout = float(getattr(getattr(module, "attn_drop", None), "p", 0.0))
    try:
        kept = Projections(heads, (q, biases[0]), (k, biases[1]), linear(proj), heads, dropout)
    except UnfitError as reason:
        return Refusal(name, module, str(reason))
    proj_drop = getattr(module, "proj_drop", None) or nn.Identity()
    return Site(name, module, kept, lambda primal: PrimalImageAttention(primal, proj_drop))
