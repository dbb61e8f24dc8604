"""The modes of PrimalAttention as small float64 layers, for most tests of the layer."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal_attention import PrimalAttention
from primal_attention.ops.primal import device_problem

EMBED, HEADS = 12, 3
MAX_LENGTH = 24

# Name of the mode → the keywords that make it. Landmarks are few enough to leave gaps and to repeat on short input.
MODES: dict[str, dict[str, Any]] = {
    "plain": {"data_dependent": False},
    "two_sided": {"data_dependent": False, "decay": "learned"},
    "data_dependent": {},
    "causal": {"data_dependent": False, "causal": True},
    "causal_data_dependent": {"causal": True, "max_length": MAX_LENGTH},
}
CPU_MODES = ["plain", "data_dependent", "causal"]  # of the CPU backend
CAUSAL = [name for name, keywords in MODES.items() if keywords.get("causal")]

# (mode, decay). The causal modes also exist without decay.
MODES_AND_DECAYS = [(name, None) for name in MODES] + [(name, "learned") for name in CAUSAL]
CAUSAL_AND_DECAYS = [(mode, decay) for mode, decay in MODES_AND_DECAYS if mode in CAUSAL]


def make(mode: str, decay: Any = None, **keywords: Any) -> PrimalAttention:
    """Return a layer of the mode, in float64 by default, with every parameter away from zero."""
    merged = {"rank": 4, "landmarks": 6, "dtype": torch.float64, **MODES[mode], **keywords}
    if decay is not None:
        merged["decay"] = decay
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a large rank has a test of its own
        layer = PrimalAttention(EMBED, HEADS, **merged)
    with torch.no_grad():
        layer.w_e.mul_(2.0)
        layer.w_r.mul_(2.0)
    return layer


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, EMBED, dtype=dtype)


def tensors(state: Any) -> list[Tensor]:
    """The tensors of a streaming state."""
    return [part for part in state if isinstance(part, Tensor)]


def padding_mask(lengths: list[int], width: int, where: str) -> Tensor:
    """(B, N) bool, True at the padding of sequences of the lengths: at the "right", at the "left", or in "gaps"."""
    mask = torch.ones(len(lengths), width, dtype=torch.bool)
    for row, n in zip(mask, lengths, strict=True):
        if where == "right":
            row[:n] = False
        elif where == "left":
            row[width - n :] = False
        else:
            row[torch.randperm(width)[:n]] = False
    return mask


def pad(sequences: list[Tensor], where: str, filler: float) -> tuple[Tensor, Tensor]:
    """Sequences of tokens as one (B, N, d) batch and its mask, with the padding at the named place."""
    mask = padding_mask([len(x) for x in sequences], max(map(len, sequences)) + 2, where)
    x = torch.full((*mask.shape, EMBED), filler, dtype=sequences[0].dtype)
    x[~mask] = torch.cat(sequences)
    return x, mask


def gradients(layer: nn.Module, loss: Tensor, *, keep_graph: bool = False) -> dict[str, Tensor]:
    """The gradient of every trained parameter; zero where the loss does not depend on it."""
    names, parameters = zip(*((n, p) for n, p in layer.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep_graph)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, grads, strict=True)}


def backend_options(backend: str) -> dict[str, Any]:
    """The keywords of a layer on a backend: float64 on "reference", float32 on the fast ones."""
    device = torch.device("cuda" if backend == "fused" and torch.cuda.is_available() else "cpu")
    if backend == "fused" and (problem := device_problem(device)) is not None:
        pytest.skip(problem)
    return {"backend": backend, "dtype": torch.float64 if backend == "reference" else torch.float32, "device": device}
