"""Other libraries' masks in Primal-Attention's terms: which tokens are padding, and whether the order is causal.

Primal-Attention has no pairs of tokens to hide from each other, so a mask must be one of the two, or both; anything
else is refused instead of being ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OTHER = (
    "the attention mask is neither padding nor the causal order (packed sequences, a window, a bias?): "
    "Primal-Attention cannot obey it"
)
HIDDEN = -1e4  # added to a score, this or less leaves nothing of it after the softmax
NOT_CAUSAL = "the attention mask is causal and the Primal-Attention is not: primalize(…, causal=True)"


def _looks(mask: Tensor) -> bool:
    """Whether the mask's values can be checked: not by the compiler, and not while a CUDA graph is recorded."""
    return not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))


def allowed(mask: Tensor) -> Tensor:
    """True where attention may look, of a mask that is bool in this sense or is added to the scores."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= HIDDEN
    if _looks(mask) and bool((mask.masked_fill(hidden, 0) != 0).any()):
        raise ValueError("the attention mask adds a bias to the scores: Primal-Attention has no scores per pair")
    return ~hidden


def padding_of(seen: Tensor, causal: bool) -> Tensor:
    """Padding among the last Nq keys, (B, Nq), of a pattern (B, Nq, Nk) that is True where attention may look."""
    queries, keys = seen.shape[-2:]
    if queries > keys:
        raise ValueError(f"the attention mask has fewer keys than queries ({keys} and {queries}): {OTHER}")
    valid = seen[:, -1]  # the last token looks at everything but padding, causal or not
    own = valid[:, keys - queries :]
    if _looks(seen):
        whole = valid[:, None].expand_as(seen)
        order = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).tril(keys - queries)
        rows = own[:, :, None]  # what padding looks at is nobody's business
        if not bool((((whole & order) if causal else whole) == seen).logical_or(~rows).all()):
            is_causal = not causal and bool(((whole & order) == seen).logical_or(~rows).all())
            raise ValueError(NOT_CAUSAL if is_causal else OTHER)
    return ~own


def from_transformers(mask: Any, tokens: int, causal: bool) -> Tensor | None:
    """Padding (B, N) from what transformers hands to an attention: None, (B, Nk), or (B, 1, N, Nk)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"the attention mask is a {type(mask).__name__}: set the model's attention to sdpa or eager")
    if mask.ndim == 2:  # 1 at tokens
        return ~mask[:, -tokens:].bool()
    if mask.ndim != 4 or mask.shape[-2] != tokens:
        raise ValueError(f"the attention mask must have shape (B, N) or (B, 1, N, N) (got {tuple(mask.shape)})")
    seen = allowed(mask)
    padding = padding_of(seen[:, 0], causal)
    if seen.shape[1] > 1 and _looks(seen) and not bool((seen == seen[:, :1]).all()):
        raise ValueError(f"each head has its own mask: {OTHER}")
    return padding


def from_torch(key_padding_mask: Tensor | None, attn_mask: Tensor | None, causal: bool) -> Tensor | None:
    """Padding from nn.MultiheadAttention's two masks, whose bools are True where attention must not look."""
    if attn_mask is not None:
        pattern = ~attn_mask if attn_mask.dtype == torch.bool else allowed(attn_mask)
        hidden = padding_of(pattern if pattern.ndim == 3 else pattern[None], causal)
        if _looks(hidden) and bool(hidden.any()):
            raise ValueError(f"{OTHER}; padding goes into key_padding_mask")
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool:
        return key_padding_mask
    return ~allowed(key_padding_mask)
