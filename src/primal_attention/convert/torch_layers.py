"""Adapter for torch: nn.MultiheadAttention, alone or inside nn.TransformerEncoderLayer or -DecoderLayer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.primal import PrimalAttention
from .masks import from_torch
from .sites import CROSS, Projections, Refusal, Site, StandIn, UnfitError


class PrimalMultihead(StandIn):
    """Stands in for nn.MultiheadAttention as self-attention. The weights that it returns are None: it has none."""

    # nn.TransformerEncoderLayer asks for these to decide about its fused softmax path; so it stays off it.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, primal: PrimalAttention, batch_first: bool) -> None:
        super().__init__(primal)
        self.batch_first = batch_first
        self.batch_dim = 0 if batch_first else 1
        self.embed_dim, self.num_heads = primal.embed_dim, primal.num_heads

    def tokens(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not all(other is None or _same(other, query) for other in (key, value)):
            raise ValueError(f"query, key and value must be one tensor: else {CROSS}")
        if is_causal and not self.primal.causal:
            raise ValueError("is_causal=True needs a causal layer: primalize(…, causal=True)")
        padding = from_torch(key_padding_mask, attn_mask, self.primal.causal)
        if query.ndim == 2:
            return query[None], None if padding is None else padding[None]
        return (query if self.batch_first else query.transpose(0, 1)), padding

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        y = self.primal(*self.tokens(query, *args, **kwargs))
        if query.ndim == 2:
            return y[0], None
        return (y if self.batch_first else y.transpose(0, 1)), None


def _same(a: Tensor, b: Tensor) -> bool:
    """One tensor, or two views of the same numbers."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def recognise(name: str, module: nn.Module, parent: nn.Module | None) -> Site | Refusal | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if isinstance(parent, nn.TransformerDecoderLayer) and module is parent.multihead_attn:
        return Refusal(name, module, CROSS)
    if not module._qkv_same_embed_dim:
        return Refusal(name, module, CROSS)
    if module.bias_k is not None or module.add_zero_attn:
        return Refusal(name, module, "it appends keys that no token has (add_bias_kv, add_zero_attn)")
    if type(module) is not nn.MultiheadAttention:
        return Refusal(name, module, f"{type(module).__name__} changes nn.MultiheadAttention in ways unknown here")
    q, k, _ = module.in_proj_weight.chunk(3)
    q_bias, k_bias, _ = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = module.num_heads
    try:
        kept = Projections(
            heads, (q, q_bias), (k, k_bias), (module.out_proj.weight, module.out_proj.bias), heads, module.dropout
        )
    except UnfitError as reason:
        return Refusal(name, module, str(reason))
    batch_first = module.batch_first
    return Site(name, module, kept, lambda primal: PrimalMultihead(primal, batch_first))


def prepare(model: nn.Module) -> None:
    """After a replacement: nn.TransformerEncoder must not turn padded batches into nested tensors."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, PrimalMultihead) for m in module.modules()):
            module.use_nested_tensor = False
