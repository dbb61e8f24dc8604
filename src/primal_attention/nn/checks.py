"""Argument checks. Each raises one line that names the argument, its value and what is accepted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from ..ops.types import State


def positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer (got {value!r})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1 (got {value})")


def sequences(batch_size: int) -> None:
    if not isinstance(batch_size, (Integral, torch.SymInt)) or batch_size < 0:
        raise ValueError(f"batch_size must be an integer of at least 0 (got {batch_size!r})")


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False (got {value!r})")


def widths(embed_dim: int, num_heads: int) -> None:
    positive("embed_dim", embed_dim)
    positive("num_heads", num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be divisible by num_heads (embed_dim={embed_dim}, num_heads={num_heads})")


def probability(name: str, value: float) -> None:
    if not isinstance(value, Real) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1) (got {value!r})")


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))} (got {value!r})")


def rank(rank: int, head_dim: int, landmarks: int | None) -> None:
    """Warn if the rank exceeds the number of independent directions; some of the paper's settings do."""
    positive("rank", rank)
    independent = head_dim if landmarks is None else min(head_dim, landmarks)
    if rank > independent:
        source = f"head width {head_dim}" + ("" if landmarks is None else f", landmarks {landmarks}")
        message = f"rank={rank} exceeds the number of independent directions, at most {independent} ({source})"
        warnings.warn(message, stacklevel=3)


def tokens(x: Tensor, embed_dim: int, packed: bool) -> None:
    tensor("x", x)
    if x.is_nested:
        raise ValueError("x must be padded or packed (got a nested tensor; encoders need enable_nested_tensor=False)")
    shape, ndim = ("(total, embed_dim)", 2) if packed else ("(batch, tokens, embed_dim)", 3)
    if x.ndim != ndim or x.shape[-1] != embed_dim:
        raise ValueError(f"x must have shape {shape} with embed_dim={embed_dim} (got {tuple(x.shape)})")
    if not packed and x.shape[1] == 0:
        raise ValueError("x must have at least one token (got 0)")


def tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor (got {type(value).__name__})")


def device(name: str, value: Tensor, expected: torch.device) -> None:
    tensor(name, value)
    if value.device != expected:
        raise ValueError(f"{name} must be on the device of the layer, {expected} (got {value.device})")


def dtype(x: Tensor, expected: torch.dtype) -> None:
    is_cast = x.is_floating_point() and torch.float64 not in (x.dtype, expected)  # by autocast
    if x.dtype != expected and not (is_cast and torch.is_autocast_enabled(x.device.type)):
        raise TypeError(f"x must have the dtype of the layer's parameters, {expected} (got {x.dtype})")


def padding_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask as bool; a float mask has −inf at padding and 0 elsewhere, as torch's encoder layers pass it."""
    device("key_padding_mask", mask, x.device)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"key_padding_mask must have shape {tuple(x.shape[:2])}, as x (got {tuple(mask.shape)})")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be a bool tensor, True at padding (got {mask.dtype})")
    is_padding = mask == -torch.inf
    if not (torch.compiler.is_compiling() or mask.is_meta or (is_padding | (mask == 0)).all()):
        raise ValueError("key_padding_mask must be bool, or −inf at padding and 0 elsewhere (got other numbers)")
    return is_padding


def state(state: State, kind: type[State], batch: int, label: str, expected: torch.device) -> None:
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__}, as initial_state returns it (got {type(state).__name__})")
    if state.layer and state.layer != label:
        raise ValueError(f"state belongs to another kind of layer ({state.layer}); this layer is {label}")
    device("state", state[0], expected)
    if state[0].shape[0] != batch:
        raise ValueError(f"state must have as many sequences as x, {batch} (got {state[0].shape[0]})")
