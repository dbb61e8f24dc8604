"""Adapters that turn attention modules of torch, timm and transformers into Primal-Attention.

An adapter (`find_torch`, `find_timm`, `find_transformers`) recognises a module, reads the q, k and output weights that
are kept (`Projections`), and wraps the new layer in a `Replacement`, which takes the calls of the replaced module and
reads their masks and rotary positions. Modules are recognised by structure and class name, so nothing here imports timm
or transformers. `READERS` takes further classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.primal import PrimalAttention, is_same
from ..ops.types import Weights

RELATIVE = "it adds a bias to every pair of tokens (relative positions), and Primal-Attention has no pairs"
CROSS = "it is cross-attention (queries and keys of different sequences); Primal-Attention is self-attention"
# Attributes of attention modules with relative positions.
RELATIVE_ATTRIBUTES = (
    "relative_attention_bias", "has_relative_attention_bias", "relative_position_bias_table", "relative_position_bias",
    "relative_attention", "rel_pos", "rel_pos_h", "distance_embedding", "pos_key_proj", "linear_pos", "r_r_bias",
)  # fmt: skip
Map = tuple[Tensor, Tensor | None]  # weight (out, in) and bias


class UnsupportedError(ValueError):
    """An attention module that Primal-Attention cannot replace; the message is the reason."""


@dataclass(frozen=True)
class Projections:
    """The linear maps of a softmax attention that its replacement keeps."""

    num_heads: int
    q: Map
    k: Map
    out: Map
    key_heads: int
    dropout: float = 0.0
    causal: bool | None = None  # None: it depends on the call, and primalize needs the argument
    rotary: bool = False  # calls pass cos and sin of the positions as `position_embeddings`

    def __post_init__(self) -> None:
        width, heads, key_heads = self.embed_dim, self.num_heads, self.key_heads
        if heads < 1 or width % heads:
            raise UnsupportedError(f"its width {width} is not divisible by its {heads} heads")
        if key_heads < 1 or heads % key_heads:
            raise UnsupportedError(f"its {heads} heads are not divisible by its {key_heads} key heads")
        if self.q[0].shape[0] != width or self.out[0].shape != (width, width):
            raise UnsupportedError(f"its heads have {self.q[0].shape[0]} features and its input {width}, not as many")
        expected = (width // heads * key_heads, width)
        if self.k[0].shape != expected:
            raise UnsupportedError(f"its key map has shape {tuple(self.k[0].shape)}, not {expected}")

    @property
    def embed_dim(self) -> int:
        return int(self.q[0].shape[1])

    def build(self, **primal_kwargs: Any) -> PrimalAttention:
        """Return a PrimalAttention with these maps; its other parameters are initialised as usual."""
        bias = any(b is not None for _, b in (self.q, self.k, self.out))
        where: dict[str, Any] = {"device": self.q[0].device, "dtype": self.q[0].dtype}
        kind = RotaryPrimalAttention if self.rotary else PrimalAttention
        layer = kind(self.embed_dim, self.num_heads, bias=bias, **where, **primal_kwargs)
        with torch.no_grad():
            _copy_maps(layer.qk_proj, self.q, self._repeat_keys())
            _copy_maps(layer.out_proj, self.out)
        layer.qk_proj.requires_grad_(self.q[0].requires_grad)
        layer.out_proj.requires_grad_(self.out[0].requires_grad)
        return layer

    def _repeat_keys(self) -> Map:
        """Return the key map with one block of rows per query head (grouped-query attention shares them)."""
        copies = self.num_heads // self.key_heads

        def repeat(t: Tensor) -> Tensor:
            return t.unflatten(0, (self.key_heads, -1)).repeat_interleave(copies, dim=0).flatten(0, 1)

        weight, bias = self.k
        return (weight, bias) if copies == 1 else (repeat(weight), None if bias is None else repeat(bias))


def _copy_maps(target: nn.Linear, *maps: Map) -> None:
    target.weight.copy_(torch.cat([weight for weight, _ in maps]))
    if target.bias is not None:
        target.bias.copy_(torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in maps]))


@dataclass(frozen=True)
class Site:
    """An attention module that can be replaced, its maps, and the function that wraps the new layer."""

    name: str
    module: nn.Module
    projections: Projections
    wrap: Callable[[PrimalAttention], nn.Module]


@dataclass(frozen=True)
class Refusal:
    """An attention module that cannot be replaced, and the reason."""

    name: str
    module: nn.Module
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__}) cannot be replaced: {self.reason}"


Rotation = tuple[Tensor, Tensor]  # cos and sin of the angles, (B or 1, N, head_dim) each
CALL = threading.local()  # its `rotation` is that of the layer that this thread is calling


class RotaryPrimalAttention(PrimalAttention):
    """PrimalAttention whose queries and keys are rotated by the positions of their tokens.

    The rotation comes first: features, running sums and states are those of rotated queries and keys.
    """

    def forward(self, x: Tensor, *args: Any, rotation: Rotation | None = None, **kwargs: Any) -> Any:
        """Attend as PrimalAttention does; `rotation` is cos and sin as the models of transformers compute them."""
        CALL.rotation = self._check_rotation(rotation)
        try:
            return super().forward(x, *args, **kwargs)
        finally:
            CALL.rotation = None

    def kernel_factors(
        self, x: Tensor, key_padding_mask: Tensor | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor]:
        CALL.rotation = self._check_rotation(rotation)
        try:
            return super().kernel_factors(x, key_padding_mask)
        finally:
            CALL.rotation = None

    def _check_rotation(self, rotation: Rotation | None) -> Rotation:
        self._check_not_sharded("a rotary position")
        if rotation is None:
            raise ValueError("this layer has rotary positions, and its call has none (position_embeddings)")
        if (width := rotation[0].shape[-1]) != self.head_dim:
            raise ValueError(f"position_embeddings rotate {width} of {self.head_dim} features of a head: not supported")
        return rotation

    def _weights(self) -> tuple[Weights, bool]:
        weights, applies_output = super()._weights()
        return Weights(None, None, *weights[2:]), applies_output  # `forward` then calls the map and passes q and k

    def _project_qk(self, x: Tensor) -> Tensor:
        """Return q and k, (B, N, 2d), with coordinates m and m + p/2 of every head rotated."""
        qk = super()._project_qk(x)
        cos, sin = (t.unsqueeze(-2) for t in CALL.rotation)
        z = qk.unflatten(-1, (2 * self.num_heads, -1))
        first, second = z.chunk(2, dim=-1)
        return (z * cos + torch.cat([-second, first], dim=-1) * sin).to(qk.dtype).flatten(-2)


class Replacement(nn.Module):
    """PrimalAttention behind the call signature of the module that it replaces."""

    batch_dim = 0  # of its input and output

    def __init__(self, primal: PrimalAttention) -> None:
        super().__init__()
        self.primal = primal

    def tokens(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the input (B, N, d) and the padding mask (B, N) of a call with these arguments."""
        raise NotImplementedError

    def positions(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword of a rotary layer from those of a call."""
        is_rotary = isinstance(self.primal, RotaryPrimalAttention)
        return {"rotation": kwargs.get("position_embeddings")} if is_rotary else {}

    def kernel_factors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kernel's factors of a call with these arguments."""
        return self.primal.kernel_factors(*self.tokens(*args, **kwargs), **self.positions(kwargs))


def find_site(name: str, module: nn.Module, parent: nn.Module | None) -> Site | Refusal | None:
    """Return the site of an attention that an adapter supports, the reason against it, or None for other modules."""
    for find in (find_torch, find_transformers, find_timm):
        try:
            site = find(name, module, parent)
        except UnsupportedError as reason:
            return Refusal(name, module, str(reason))
        if site is not None:
            return site
    return None


def read_linear(module: nn.Module) -> Map:
    """Return weight and bias of an nn.Linear, or of GPT-2's Conv1D, which stores the transposed weight."""
    is_transposed = type(module).__name__ == "Conv1D"
    if not isinstance(module, nn.Linear) and not is_transposed:  # its weight is not what it computes
        kind = type(module)
        raise UnsupportedError(f"it has a map of {kind.__module__}.{kind.__name__}: merge adapters before primalize")
    weight: Tensor = module.weight  # type: ignore[assignment]
    if type(weight) not in (nn.Parameter, Tensor):
        raise UnsupportedError(f"it has a weight of {type(weight).__name__}: quantise or shard after primalize")
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight.T if is_transposed else weight), bias


def read_maps(q: nn.Module, k: nn.Module, out: nn.Module) -> tuple[Map, Map, Map]:
    return read_linear(q), read_linear(k), read_linear(out)


def read_qk(weight: Tensor, bias: Tensor | None) -> tuple[Map, Map]:
    """Return the q and k maps of a stacked [q; k; v] map."""
    (q, k, _), (q_bias, k_bias, _) = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
    return (q, q_bias), (k, k_bias)


def check_parts(module: nn.Module, known: set[str]) -> None:
    """Refuse relative positions, and parts that Primal-Attention does not have."""
    if has_relative_positions(module):
        raise UnsupportedError(RELATIVE)
    parts = [name for name, child in module.named_children() if not isinstance(child, nn.Identity)]
    parts += [name for name, _ in module.named_parameters(recurse=False)]
    if extra := [name for name in parts if name not in known]:
        raise UnsupportedError(f"it has {', '.join(extra)}, which Primal-Attention does not have")


def has_relative_positions(module: object) -> bool:
    values = (getattr(module, name, None) for name in RELATIVE_ATTRIBUTES)
    return any(value is not None and value is not False for value in values)


# torch


def find_torch(name: str, module: nn.Module, parent: nn.Module | None) -> Site | None:
    """nn.MultiheadAttention, alone or inside nn.TransformerEncoderLayer and nn.TransformerDecoderLayer."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    is_cross = isinstance(parent, nn.TransformerDecoderLayer) and module is parent.multihead_attn
    if is_cross or is_transformers_attention(parent) or not module._qkv_same_embed_dim:  # SigLIP pools by such a module
        raise UnsupportedError(CROSS)
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError("it appends keys without tokens (add_bias_kv, add_zero_attn)")
    if type(module) is not nn.MultiheadAttention:
        raise UnsupportedError(f"{type(module).__name__} may change what nn.MultiheadAttention computes")
    heads, qk = module.num_heads, read_qk(module.in_proj_weight, module.in_proj_bias)
    projections = Projections(heads, *qk, read_linear(module.out_proj), heads, module.dropout)
    return Site(name, module, projections, lambda primal: PrimalMultihead(primal, module.batch_first))


class PrimalMultihead(Replacement):
    """Replaces nn.MultiheadAttention as self-attention; the returned weights are None."""

    # Read by nn.TransformerEncoderLayer, which then does not take its fused softmax path.
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
        if not all(other is None or is_same(other, query) for other in (key, value)):
            raise ValueError(f"query, key and value must be one tensor: otherwise {CROSS}")
        if is_causal and not self.primal.causal:
            raise ValueError("is_causal=True needs a causal layer: primalize(…, causal=True)")
        padding = padding_from_torch(key_padding_mask, attn_mask, self.primal.causal)
        if query.ndim == 2:
            return query[None], None if padding is None else padding[None]
        return (query if self.batch_first else query.transpose(0, 1)), padding

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        y = self.primal(*self.tokens(query, *args, **kwargs))
        if query.ndim == 2:
            return y[0], None
        return (y if self.batch_first else y.transpose(0, 1)), None


# timm


def find_timm(name: str, module: nn.Module, parent: nn.Module | None) -> Site | None:
    """timm's ViT and DeiT family, by structure: one map `qkv`, one map `proj`, `num_heads`."""
    qkv, proj, heads = (getattr(module, part, None) for part in ("qkv", "proj", "num_heads"))
    if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and isinstance(heads, int)):
        return None
    if "rope" in type(module).__name__.lower():
        raise UnsupportedError("its calls have rotary positions, which this adapter does not read")
    check_parts(module, {"qkv", "proj", "attn_drop", "proj_drop", "softmax"})
    if qkv.out_features != 3 * qkv.in_features:
        raise UnsupportedError(f"its qkv maps {qkv.in_features} to {qkv.out_features} features, not to three times")
    dropout = float(getattr(getattr(module, "attn_drop", None), "p", 0.0))
    projections = Projections(heads, *read_qk(*read_linear(qkv)), read_linear(proj), heads, dropout)
    proj_drop = getattr(module, "proj_drop", None) or nn.Identity()
    return Site(name, module, projections, lambda primal: PrimalImageAttention(primal, proj_drop))


class PrimalImageAttention(Replacement):
    """Replaces timm's Attention."""

    def __init__(self, primal: PrimalAttention, proj_drop: nn.Module) -> None:
        super().__init__(primal)
        self.num_heads, self.head_dim = primal.num_heads, primal.head_dim
        self.proj_drop = proj_drop

    def tokens(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and not self.primal.causal:
            raise ValueError("is_causal=True needs a causal layer: primalize(…, causal=True)")
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)].expand(len(x), -1, x.shape[1], -1)
        return x, padding_from_transformers(attn_mask, x.shape[1], self.primal.causal)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.proj_drop(self.primal(*self.tokens(x, *args, **kwargs)))


# transformers


def find_transformers(name: str, module: Any, parent: nn.Module | None) -> Site | None:
    """Attention modules of transformers by class name, and the classes that a caller has added to `READERS`."""
    kind = type(module)
    if not is_transformers_attention(module) and kind not in READERS:
        return None
    if is_cross_attention(module) or name.rpartition(".")[2].lower() == "encoder_attn":
        raise UnsupportedError(CROSS)
    read = READERS.get(kind) or READERS.get(kind.__name__)
    if read is None:
        if not any(hasattr(child, "weight") and child.weight.ndim == 2 for child in module.children()):
            return None  # a container of the attention itself
        if has_relative_positions(module) or has_relative_positions(getattr(module, "config", None)):
            raise UnsupportedError(RELATIVE)
        raise UnsupportedError(f"no adapter supports {kind.__name__} (supported: {known_names()})")
    try:
        projections, wrap = read(module)
    except AttributeError as missing:
        raise UnsupportedError(f"this version of transformers builds it differently ({missing})") from None
    return Site(name, module, projections, wrap)


def is_transformers_attention(module: nn.Module | None) -> bool:
    return type(module).__module__.startswith("transformers.") and "Attention" in type(module).__name__


def is_cross_attention(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__


Reading = tuple[Projections, Callable[[PrimalAttention], nn.Module]]


def _read_bert(module: Any) -> Reading:
    inner, output = module.self, module.output
    check_parts(inner, {"query", "key", "value", "dropout"})
    if getattr(inner, "position_embedding_type", None) not in (None, "absolute"):
        raise UnsupportedError(RELATIVE)
    maps, heads = read_maps(inner.query, inner.key, output.dense), inner.num_attention_heads
    causal = bool(getattr(inner, "is_causal", False) or getattr(inner, "is_decoder", False))
    projections = Projections(heads, *maps, heads, inner.dropout.p, causal)
    return projections, lambda primal: PrimalBert(primal, getattr(inner, "layer_idx", None), output)


def _read_distilbert(module: Any) -> Reading:
    check_parts(module, {"q_lin", "k_lin", "v_lin", "out_lin", "dropout"})
    maps = read_maps(module.q_lin, module.k_lin, module.out_lin)
    return Projections(module.n_heads, *maps, module.n_heads, module.dropout.p, False), PrimalHF


def _read_gpt2(module: Any) -> Reading:
    check_parts(module, {"c_attn", "c_proj", "attn_dropout", "resid_dropout"})
    heads, qk = module.num_heads, read_qk(*read_linear(module.c_attn))
    projections = Projections(heads, *qk, read_linear(module.c_proj), heads, module.attn_dropout.p, True)
    return projections, lambda primal: PrimalHF(primal, module.layer_idx, module.resid_dropout)


def _read_projected(module: Any, *, rotary: bool = False) -> Reading:
    """Modules with q_proj, k_proj, v_proj, and out_proj or o_proj. Key heads may be shared by query heads."""
    out = "out_proj" if hasattr(module, "out_proj") else "o_proj"
    check_parts(module, {"q_proj", "k_proj", "v_proj", out})
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    _check_window(window, "sliding_window=None")
    heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
    key_heads = heads // getattr(module, "num_key_value_groups", 1)
    dropout = float(getattr(module, "attention_dropout", getattr(module, "dropout", 0.0)))
    is_clip_text = getattr(module.config, "model_type", "") == "clip_text_model"  # its layers have no such attribute
    causal = is_clip_text or bool(getattr(module, "is_causal", False))
    maps = read_maps(module.q_proj, module.k_proj, getattr(module, out))
    projections = Projections(heads, *maps, key_heads, dropout, causal, rotary)
    return projections, lambda primal: PrimalHF(primal, getattr(module, "layer_idx", None))


def _read_modernbert(module: Any) -> Reading:
    check_parts(module, {"Wqkv", "Wo", "out_drop"})
    _check_window(module.sliding_window, 'layer_types=["full_attention"] * num_hidden_layers')
    heads, qk = module.config.num_attention_heads, read_qk(*read_linear(module.Wqkv))
    projections = Projections(
        heads, *qk, read_linear(module.Wo), heads, float(module.attention_dropout), False, rotary=True
    )
    return projections, lambda primal: PrimalHF(primal, module.layer_idx, module.out_drop)


def _check_window(window: int | None, setting: str) -> None:
    if window is not None:
        raise UnsupportedError(
            f"it attends within a window of {window} tokens, and Primal-Attention has no window: "
            f"load the model with from_pretrained(…, {setting}) to replace it by a layer without one"
        )


# By class, or by class name for those of transformers.
READERS: dict[str | type, Callable[[Any], Reading]] = {
    **dict.fromkeys(("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention"), _read_bert),
    "ElectraAttention": _read_bert,
    "DistilBertSelfAttention": _read_distilbert,
    "GPT2Attention": _read_gpt2,
    **dict.fromkeys(("ViTAttention", "DeiTAttention", "CLIPAttention", "WhisperAttention"), _read_projected),
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "Qwen2Attention"), partial(_read_projected, rotary=True)),
    "ModernBertAttention": _read_modernbert,
}


def known_names() -> str:
    return ", ".join(sorted(key if isinstance(key, str) else key.__name__ for key in READERS))


class PrimalHF(Replacement):
    """Replaces an attention that returns (output, weights); the weights are None.

    With a cache (generation) the state of the layer, whose size is constant, replaces keys and values.

    Args:
        primal: the new layer.
        layer_idx: the number of the layer in its model, which is its place in a cache.
        dropout: applied to the output, if the replaced attention had one.
    """

    # Of a weight of the replaced attention; one number is saved under it. `from_pretrained` of the plain model ignores
    # names that it does not know and draws missing weights at random, but a weight of another shape is an error.
    plain_name = ""
    is_loading = False  # its weights are being read: that weight is left out

    def __init__(self, primal: PrimalAttention, layer_idx: int | None = None, dropout: nn.Module | None = None) -> None:
        super().__init__(primal)
        self.layer_idx = layer_idx
        self.is_causal = primal.causal
        self.dropout = dropout or nn.Identity()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.plain_name and not self.is_loading:  # from_pretrained would look for the module of that name
            destination[prefix + self.plain_name] = torch.zeros(1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + self.plain_name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def tokens(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if any(kwargs.get(name) is not None for name in ("encoder_hidden_states", "key_value_states")):
            raise ValueError(f"a self-attention got the hidden states of an encoder: {CROSS}")
        return hidden_states, padding_from_transformers(attention_mask, hidden_states.shape[1], self.primal.causal)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        slot = None
        if past_key_values is not None and self.primal.causal:
            from .hf_cache import find_slot

            slot = find_slot(past_key_values, self.layer_idx)
        x, padding = self.tokens(hidden_states, attention_mask=attention_mask, **kwargs)
        rotation = self.positions(kwargs)
        if slot is None:
            return self.dropout(self.primal(x, padding, **rotation)), None
        y, slot.state = self.primal(x, padding, state=slot.state, return_state=True, **rotation)
        slot.length += x.shape[1]
        return self.dropout(y), None


class PrimalBert(PrimalHF):
    """Replaces BertAttention: self-attention, then dropout and LayerNorm of `output`; its linear map is `out_proj`."""

    def __init__(self, primal: PrimalAttention, layer_idx: int | None, output: nn.Module) -> None:
        super().__init__(primal, layer_idx)
        self.output = output
        del self.output.dense

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        y, _ = super().forward(hidden_states, *args, **kwargs)
        return self.output.LayerNorm(self.output.dropout(y) + hidden_states), None  # type: ignore[operator]


# Masks. Primal-Attention has no pairs of tokens: a mask must be padding, the causal order, or both. Others are refused.

OTHER_MASK = (
    "the attention mask is neither padding nor the causal order (packed sequences, a window, a bias?): "
    "Primal-Attention cannot apply it"
)
CAUSAL_MASK = "the attention mask is causal and the Primal-Attention is not: primalize(…, causal=True)"
HIDDEN = -1e4  # an added score that hides a pair


def _can_check(mask: Tensor) -> bool:
    """Return whether the values can be read: not under torch.compile or CUDA-graph capture."""
    return not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))


def visible_pairs(mask: Tensor) -> Tensor:
    """Return True at visible pairs, of a mask that is bool in this sense or added to the scores."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= HIDDEN
    if _can_check(mask) and bool((mask.masked_fill(hidden, 0) != 0).any()):
        raise ValueError("the attention mask adds a bias to the scores: Primal-Attention has no scores of pairs")
    return ~hidden


def padding_from_pairs(visible: Tensor, causal: bool) -> Tensor:
    """Return the padding among the last Nq keys, (B, Nq), of visible pairs (B, Nq, Nk)."""
    queries, keys = visible.shape[-2:]
    if queries > keys:
        raise ValueError(f"the attention mask has fewer keys than queries ({keys} and {queries}): {OTHER_MASK}")
    valid = visible[:, -1]  # the last token sees everything but padding, causal or not
    new_keys = valid[:, keys - queries :]
    if _can_check(visible):
        full = valid[:, None].expand_as(visible)
        order = torch.ones(queries, keys, dtype=torch.bool, device=visible.device).tril(keys - queries)
        # Rows of padding may see nothing or everything; those of an earlier packed sequence see their own keys.
        is_padding = ~new_keys[:, :, None] & (~visible.any(-1, keepdim=True) | visible.all(-1, keepdim=True))
        if not bool(((full & order if causal else full) == visible).logical_or(is_padding).all()):
            is_causal = not causal and bool(((full & order) == visible).logical_or(is_padding).all())
            raise ValueError(CAUSAL_MASK if is_causal else OTHER_MASK)
    return ~new_keys


def padding_from_transformers(mask: Any, tokens: int, causal: bool) -> Tensor | None:
    """Return the padding (B, N) of a mask of transformers: None, (B, Nk), or (B, 1, N, Nk)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"the attention mask is a {type(mask).__name__}: set the model's attention to sdpa or eager")
    if mask.ndim == 2:  # 1 at tokens
        return ~mask[:, -tokens:].bool()
    if mask.ndim != 4 or mask.shape[-2] != tokens:
        raise ValueError(f"the attention mask must have shape (B, N) or (B, 1, N, N) (got {tuple(mask.shape)})")
    visible = visible_pairs(mask)
    padding = padding_from_pairs(visible[:, 0], causal)
    if visible.shape[1] > 1 and _can_check(visible) and not bool((visible == visible[:, :1]).all()):
        raise ValueError(f"the heads have different masks: {OTHER_MASK}")
    return padding


def padding_from_torch(key_padding_mask: Tensor | None, attn_mask: Tensor | None, causal: bool) -> Tensor | None:
    """Return the padding of the two masks of nn.MultiheadAttention, where True hides."""
    if attn_mask is not None:
        visible = ~attn_mask if attn_mask.dtype == torch.bool else visible_pairs(attn_mask)
        hidden = padding_from_pairs(visible if visible.ndim == 3 else visible[None], causal)
        if _can_check(hidden) and bool(hidden.any()):
            raise ValueError(f"{OTHER_MASK}; padding goes into key_padding_mask")
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool:
        return key_padding_mask
    return ~visible_pairs(key_padding_mask)
