"""What an adapter says about a module it knows: the weights worth keeping, how to stand in for it, or why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.primal import PrimalAttention

RELATIVE = "it adds a bias to every pair of tokens (relative positions), which Primal-Attention has no pairs for"
CROSS = "it is cross-attention (queries and keys of different sequences); Primal-Attention is self-attention"
# Attributes by which attentions of other libraries show relative positions.
RELATIVE_SIGNS = (
    "relative_attention_bias",
    "has_relative_attention_bias",
    "relative_position_bias_table",
    "relative_position_bias",
    "relative_attention",
    "rel_pos",
    "rel_pos_h",
    "distance_embedding",
    "pos_key_proj",
    "linear_pos",
    "r_r_bias",
)


class UnfitError(ValueError):
    """This attention cannot become Primal-Attention; the message is the reason, without the name."""


@dataclass(frozen=True)
class Projections:
    """The maps of a softmax attention that Primal-Attention keeps, as nn.Linear stores them: (out, in)."""

    num_heads: int
    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    key_heads: int
    dropout: float = 0.0
    causal: bool | None = None
    """None: the module learns it from each call, so the caller of primalize says it."""

    def __post_init__(self) -> None:
        width, heads, key_heads = self.embed_dim, self.num_heads, self.key_heads
        if heads < 1 or width % heads:
            raise UnfitError(f"its width {width} does not divide by its {heads} heads")
        if key_heads < 1 or heads % key_heads:
            raise UnfitError(f"its {heads} heads do not divide by its {key_heads} key heads")
        if self.q[0].shape[0] != width or self.out[0].shape != (width, width):
            inner = self.q[0].shape[0]
            raise UnfitError(
                f"its heads are {inner} wide together and its input {width}; Primal-Attention needs them equal"
            )
        if self.k[0].shape != (width // heads * key_heads, width):
            raise UnfitError(
                f"its key map has shape {tuple(self.k[0].shape)}, not {(width // heads * key_heads, width)}"
            )

    @property
    def embed_dim(self) -> int:
        return int(self.q[0].shape[1])

    @property
    def bias(self) -> bool:
        return any(b is not None for _, b in (self.q, self.k, self.out))


@dataclass(frozen=True)
class Site:
    """A place in a model where Primal-Attention can stand."""

    name: str
    module: nn.Module
    projections: Projections
    wrap: Callable[[PrimalAttention], nn.Module]
    note: str = ""
    """What is lost, to be said in the report."""


@dataclass(frozen=True)
class Refusal:
    """An attention that cannot be replaced, and why."""

    name: str
    module: nn.Module
    reason: str


class StandIn(nn.Module):
    """PrimalAttention behind the call of the module that it stands in for."""

    batch_dim = 0  # of what it takes and gives

    def __init__(self, primal: PrimalAttention) -> None:
        super().__init__()
        self.primal = primal

    def tokens(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The input (B, N, d) and its padding (B, N), True at padding, of a call with these arguments."""
        raise NotImplementedError


def linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an nn.Linear, or of GPT-2's Conv1D, which stores its weight the other way round."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    return (weight if isinstance(module, nn.Linear) else weight.T), bias


def build(kept: Projections, **primal_kwargs: Any) -> PrimalAttention:
    """PrimalAttention that starts from the kept weights; everything else starts as `PrimalAttention` starts it."""
    where: dict[str, Any] = {"device": kept.q[0].device, "dtype": kept.q[0].dtype}
    layer = PrimalAttention(kept.embed_dim, kept.num_heads, bias=kept.bias, **where, **primal_kwargs)
    with torch.no_grad():
        _fill(layer.qk_proj, [kept.q, _each_key_head(kept)])
        _fill(layer.out_proj, [kept.out])
    layer.qk_proj.requires_grad_(kept.q[0].requires_grad)
    layer.out_proj.requires_grad_(kept.out[0].requires_grad)
    return layer


def _each_key_head(kept: Projections) -> tuple[Tensor, Tensor | None]:
    """The key map with one block of rows per query head: heads that shared a key get a copy each."""
    weight, bias = kept.k
    copies = kept.num_heads // kept.key_heads
    if copies == 1:
        return weight, bias
    blocks = weight.unflatten(0, (kept.key_heads, -1)).repeat_interleave(copies, dim=0)
    if bias is not None:
        bias = bias.unflatten(0, (kept.key_heads, -1)).repeat_interleave(copies, dim=0).flatten()
    return blocks.flatten(0, 1), bias


def _fill(target: nn.Linear, maps: list[tuple[Tensor, Tensor | None]]) -> None:
    target.weight.copy_(torch.cat([weight for weight, _ in maps]))
    if target.bias is not None:
        parts = [w.new_zeros(w.shape[0]) if b is None else b for w, b in maps]
        target.bias.copy_(torch.cat(parts))


def relative_sign(module: object) -> str | None:
    """The attribute that shows relative positions, if there is one."""
    for sign in RELATIVE_SIGNS:
        value = getattr(module, sign, None)
        if value is not None and value is not False:
            return sign
    return None


def extra_parts(module: nn.Module, known: set[str]) -> list[str]:
    """Children that do something, and parameters of the module itself, beyond the known ones."""
    children = [n for n, child in module.named_children() if n not in known and not isinstance(child, nn.Identity)]
    own = [n for n, _ in module.named_parameters(recurse=False) if n not in known]
    return children + own
