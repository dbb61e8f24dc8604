"""Layers on a fast backend, and the reference with the same parameters."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor

from closeness import assert_close
from primal_attention import PrimalAttention
from primal_attention.nn.delta import DeltaPrimalAttention

# Mode → keywords.
MODES: dict[str, dict[str, Any]] = {
    "data_dependent": {},
    "plain": {"data_dependent": False},
    "two_sided": {"data_dependent": False, "decay": "learned"},
    "causal": {"data_dependent": False, "causal": True},
    "learned_decay": {"data_dependent": False, "causal": True, "decay": "learned"},
    "fixed_decay": {"data_dependent": False, "causal": True, "decay": 0.9},
    "causal_landmarks": {"causal": True},
    "causal_landmarks_decay": {"causal": True, "decay": "learned"},
}

# float32 with sums of a few hundred terms: only the order of rounding differs.
SAME = 2e-6
# Few numbers, each a sum whose terms nearly cancel: the reference in float32 has the same error.
CANCELLED = {"J": 1e-5, "gradient of decay_logit": 5e-5}

Results = dict[str, Tensor]
# Typed loosely: J and gradients are None before the first pass.
Layer = Any


def make(mode: str, head_dim: int = 16, rank: int = 5, heads: int = 2, max_length: int = 160, **keywords: Any) -> Layer:
    """Return a layer of the mode in training, on the kernels by default; its landmarks leave gaps in 63 tokens.

    max_length is used by the causal landmark modes only.
    """
    merged = {"rank": rank, "landmarks": 9, "backend": "fused", **MODES[mode], **keywords}
    if mode.startswith("causal_landmarks"):
        merged["max_length"] = max_length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank above the head width is allowed
        layer: Layer = PrimalAttention(heads * head_dim, heads, **merged)
    if merged.get("decay") == "learned":
        with torch.no_grad():
            # γ up to 0.95. Closer to 1 the rounding of γ to float32, 6e-8 / (1 − γ), would exceed that of the kernels.
            layer.decay_logit.copy_(torch.linspace(-1.0, 3.0, heads + 1)[1:])
    return layer


def make_delta(num_heads: int = 1, head_dim: int = 16, **settings: Any) -> Layer:
    """Return a layer with the delta rule, on the kernels by default, whose decay depends on the token."""
    layer: Layer = DeltaPrimalAttention(head_dim * num_heads, num_heads, **{"rank": 6, "backend": "fused", **settings})
    torch.nn.init.normal_(layer.decay_proj.weight, std=0.3)
    with torch.no_grad():
        layer.decay_logit.copy_(torch.linspace(2.5, 0.5, num_heads))
    return layer


def tokens(layer: Layer, *shape: int) -> Tensor:
    return torch.randn(*shape, layer.embed_dim, dtype=layer.w_e.dtype, device=layer.w_e.device)


def twin(layer: Layer, dtype: torch.dtype = torch.float64, backend: str = "reference") -> Layer:
    """Return the reference with the same parameters. Call it before the layer runs: a graph cannot be copied."""
    other = copy.deepcopy(layer).to(dtype)
    other.backend = backend
    return other


def results(layer: Layer, x: Tensor, *args: Any, scored: bool = True, **keywords: Any) -> Results:
    """Return y, e, r, J and the gradients of x and all parameters of a randomly weighted sum.

    scored: include e and r. Random landmarks are the same in all calls.
    """
    x = x.to(layer.w_e.dtype).detach().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if scored:
            y, scores = layer(x, *args, return_scores=True, **keywords)
            outputs = {"y": y, "e": scores.e, "r": scores.r, "J": layer.objective}
        else:
            outputs = {"y": layer(x, *args, **keywords), "J": layer.objective}
    draw = torch.Generator().manual_seed(1)
    loss = x.new_zeros((), dtype=torch.float64)
    for name, result in outputs.items():
        # Weights that every dtype holds exactly. J is a mean over the tokens: the factor makes it count.
        weight = torch.randn(result.shape, generator=draw).bfloat16().to(result.device, torch.float64)
        loss = loss + (result.double() * weight).sum() * (x.shape[-2] if name == "J" else 1)
    outputs |= gradients(layer, x, loss)
    return {name: value.detach() for name, value in outputs.items()}


def gradients(layer: Layer, x: Tensor, loss: Tensor, **keywords: bool) -> Results:
    """Return the gradients of x and of all parameters; zero where the loss does not depend on them."""
    names, inputs = zip(("x", x), *layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True, **keywords)
    return {f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)}


def saved_bytes(module: torch.nn.Module, x: Tensor) -> int:
    """Return the bytes saved for backward, each storage once, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    saved: list[Tensor] = []  # references keep the addresses distinct

    def save(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        module(x.requires_grad_())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in storages.items() if address not in own)


def assert_same(actual: Results, expected: Results, ratio: float = SAME) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, max(ratio, CANCELLED.get(name, 0.0)), name)


def assert_as_truth(layer: Layer, x: Tensor, *args: Any, ratio: float = SAME, **keywords: Any) -> Results:
    """Compare all results of the layer with the reference in float64, and return them."""
    truth = twin(layer)
    outputs = results(layer, x, *args, **keywords)
    assert_same(outputs, results(truth, x, *args, **keywords), ratio)
    return outputs
