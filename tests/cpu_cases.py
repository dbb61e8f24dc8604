"""Layers and comparisons for the tests of the CPU path."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss

# The same sums in another order. float32: some gradients are sums over all tokens that nearly cancel.
SAME = {torch.float64: 1e-12, torch.float32: 4e-6}

MODES: dict[str, dict[str, Any]] = {
    "plain": {"data_dependent": False},
    "data_dependent": {},
    "causal": {"data_dependent": False, "causal": True},
    "causal_decay": {"data_dependent": False, "causal": True, "decay": "learned"},
}


def make(mode: str, d: int = 24, heads: int = 3, **keywords: Any) -> PrimalAttention:
    merged = {"rank": 5, "landmarks": 20, "dtype": torch.float64, "backend": "cpu", **MODES[mode], **keywords}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank above the head width is allowed
        return PrimalAttention(d, heads, **merged)


def holes(b: int, n: int) -> Tensor:
    """A padding mask with holes; the last sequence is padding altogether."""
    mask = torch.rand(b, n) < 0.4
    mask[-1] = True
    return mask


def results(
    layer: PrimalAttention, backend: str, x: Tensor, mask: Tensor | None = None, **keywords: Any
) -> dict[str, Tensor]:
    """What a training pass gives, with a loss that every output enters."""
    layer.backend = backend
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y, scores = layer(x, mask, return_scores=True, **keywords)
    loss = (y * torch.randn_like(y)).sum() + ksvd_loss(layer) + scores.e.pow(3).sum() + scores.r.sin().sum()
    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)
    found = {"y": y, "J": layer.objective, "e": scores.e, "r": scores.r}
    inputs = dict(zip(names, [x, *layer.parameters()], strict=True))
    return found | {
        f"gradient of {name}": torch.zeros_like(inputs[name]) if grad is None else grad
        for name, grad in zip(names, grads, strict=True)
    }


def assert_same(layer: PrimalAttention, x: Tensor, mask: Tensor | None = None, **keywords: Any) -> None:
    ours, theirs = (results(layer, backend, x, mask, **keywords) for backend in ("cpu", "reference"))
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        room = 10 if name in ("J", "gradient of sqrt_lambda") else 1  # J, which scales its gradient, is a difference
        assert_close(value, theirs[name], room * SAME[x.dtype], name)
