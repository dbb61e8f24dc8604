"""Adapter for transformers: BERT, RoBERTa and kin, DistilBERT, GPT-2, ViT, DeiT, and Llama-style decoders.

Known by class name, so nothing here imports transformers before a model of it is in hand. Rotary positions of a
replaced layer are left out: they turn a query against a key, and Primal-Attention never compares two tokens; its causal
modes know the order by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..nn.primal import PrimalAttention
from .masks import from_transformers
from .sites import CROSS, RELATIVE, Projections, Refusal, Site, StandIn, UnfitError, extra_parts, linear, relative_sign

ROTARY = "rotary positions of this layer are left out: Primal-Attention compares no two tokens"


class PrimalHF(StandIn):
    """Stands in for an attention that returns (output, weights); the weights are None: Primal-Attention has none.

    With a cache (generation), the layer's state, whose size does not grow, takes the place of keys and values.
    """

    def __init__(self, primal: PrimalAttention, layer_idx: int | None = None) -> None:
        super().__init__(primal)
        self.layer_idx = layer_idx
        self.is_causal = primal.causal

    def tokens(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("encoder_hidden_states") is not None:
            raise ValueError(f"encoder_hidden_states came to a self-attention: {CROSS}")
        return hidden_states, from_transformers(attention_mask, hidden_states.shape[1], self.primal.causal)

    def attend(
        self, hidden_states: Tensor, attention_mask: Any, past_key_values: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        x, padding = self.tokens(hidden_states, attention_mask=attention_mask, **kwargs)
        if past_key_values is None or not self.primal.causal:
            return self.primal(x, padding)
        from .hf_cache import slot

        held = slot(past_key_values, self.layer_idx)
        y, held.state = self.primal(x, padding, state=held.state, return_state=True)
        held.length += x.shape[1]
        return y

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return self.attend(hidden_states, attention_mask, past_key_values, kwargs), None


class PrimalBert(PrimalHF):
    """BertAttention: self-attention, then `output`, whose own map has moved into Primal-Attention's `out_proj`."""

    def __init__(self, primal: PrimalAttention, layer_idx: int | None, output: nn.Module) -> None:
        super().__init__(primal, layer_idx)
        self.output = output
        self.output.dense = nn.Identity()

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        y = self.attend(hidden_states, attention_mask, past_key_values, kwargs)
        return self.output(y, hidden_states), None


class PrimalGPT2(PrimalHF):
    """GPT2Attention, whose second argument is the cache and whose output passes a dropout."""

    def __init__(self, primal: PrimalAttention, layer_idx: int | None, resid_dropout: nn.Module) -> None:
        super().__init__(primal, layer_idx)
        self.resid_dropout = resid_dropout

    def tokens(  # type: ignore[override]
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().tokens(hidden_states, attention_mask, **kwargs)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        y = self.attend(hidden_states, attention_mask, past_key_values, kwargs)
        return self.resid_dropout(y), None


def _bert(name: str, module: Any) -> Site:
    inner, output = module.self, module.output
    _nothing_else(inner, {"query", "key", "value", "dropout"})
    if getattr(inner, "position_embedding_type", None) not in (None, "absolute"):
        raise UnfitError(RELATIVE)
    heads = inner.num_attention_heads
    causal = bool(getattr(inner, "is_causal", False) or getattr(inner, "is_decoder", False))
    kept = Projections(
        heads, linear(inner.query), linear(inner.key), linear(output.dense), heads, inner.dropout.p, causal
    )
    layer_idx = getattr(inner, "layer_idx", None)
    return Site(name, module, kept, lambda primal: PrimalBert(primal, layer_idx, output))


def _distilbert(name: str, module: Any) -> Site:
    _nothing_else(module, {"q_lin", "k_lin", "v_lin", "out_lin", "dropout"})
    maps = linear(module.q_lin), linear(module.k_lin), linear(module.out_lin)
    kept = Projections(module.n_heads, *maps, module.n_heads, module.dropout.p, False)
    return Site(name, module, kept, PrimalHF)


def _gpt2(name: str, module: Any) -> Site:
    _nothing_else(module, {"c_attn", "c_proj", "attn_dropout", "resid_dropout"})
    weight, bias = linear(module.c_attn)
    (q, k, _), biases = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
    heads, drop = module.num_heads, module.attn_dropout.p
    kept = Projections(heads, (q, biases[0]), (k, biases[1]), linear(module.c_proj), heads, drop, True)
    return Site(name, module, kept, lambda primal: PrimalGPT2(primal, module.layer_idx, module.resid_dropout))


def _projected(name: str, module: Any) -> Site:
    """q_proj, k_proj, v_proj, o_proj: ViT and DeiT, and the decoders after Llama, whose keys may be shared by heads."""
    _nothing_else(module, {"q_proj", "k_proj", "v_proj", "o_proj"})
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    if window is not None:
        raise UnfitError(f"it sees a window of {window} tokens only, which Primal-Attention cannot carry")
    heads, groups = module.config.num_attention_heads, getattr(module, "num_key_value_groups", 1)
    causal, drop = bool(getattr(module, "is_causal", False)), float(getattr(module, "attention_dropout", 0.0))
    maps = linear(module.q_proj), linear(module.k_proj), linear(module.o_proj)
    kept = Projections(heads, *maps, heads // groups, drop, causal)
    layer_idx = getattr(module, "layer_idx", None)
    return Site(name, module, kept, lambda primal: PrimalHF(primal, layer_idx), ROTARY if causal else "")


READERS: dict[str, Callable[[str, Any], Site]] = {
    **dict.fromkeys(("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention"), _bert),
    **dict.fromkeys(("DistilBertSelfAttention",), _distilbert),
    **dict.fromkeys(("GPT2Attention",), _gpt2),
    **dict.fromkeys(("ViTAttention", "DeiTAttention"), _projected),
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "Qwen2Attention"), _projected),
}


def recognise(name: str, module: nn.Module, parent: nn.Module | None) -> Site | Refusal | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.") or "Attention" not in kind.__name__:
        return None
    last = name.rpartition(".")[2].lower()
    if getattr(module, "is_cross_attention", False) or "Cross" in kind.__name__ or last in ("encoder_attn",):
        return Refusal(name, module, CROSS)
    reader = READERS.get(kind.__name__)
    if reader is None:
        if not any(hasattr(child, "weight") and child.weight.ndim == 2 for child in module.children()):
            return None  # only a frame around the attention itself
        if relative_sign(module) or relative_sign(getattr(module, "config", None)):
            return Refusal(name, module, RELATIVE)
        return Refusal(name, module, f"no adapter knows {kind.__name__} ({', '.join(sorted(READERS))} are known)")
    try:
        return reader(name, module)
    except UnfitError as reason:
        return Refusal(name, module, str(reason))
    except AttributeError as missing:
        return Refusal(name, module, f"this version of transformers builds it in another way ({missing})")


def _nothing_else(module: nn.Module, known: set[str]) -> None:
    if relative_sign(module):
        raise UnfitError(RELATIVE)
    extra = extra_parts(module, known)
    if extra:
        raise UnfitError(f"it has {', '.join(extra)}, which Primal-Attention has no place for")
