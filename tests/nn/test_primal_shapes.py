"""Parameters and sizes that do not fit together raise a ValueError with the name of the weight, in every backend.

The fast backends read memory by these shapes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from primal_attention import PrimalAttention
from primal_attention.ops.primal import is_interpreting

D, HEADS, RANK, LANDMARKS = 16, 2, 4, 6
P = D // HEADS

WRONG_PARAMETERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "one head in w_e": ("w_e", (1, LANDMARKS, RANK)),
    "one head in w_r": ("w_r", (1, LANDMARKS, RANK)),
    "fewer landmarks in w_e": ("w_e", (HEADS, LANDMARKS - 1, RANK)),
    "more landmarks in w_r": ("w_r", (HEADS, LANDMARKS + 1, RANK)),
    "another rank in w_r": ("w_r", (HEADS, LANDMARKS, RANK + 1)),
    "qk_proj of q alone": ("qk_proj.weight", (D, D)),
    "short bias of qk_proj": ("qk_proj.bias", (D,)),
    "score_proj of e alone": ("score_proj.weight", (P, RANK)),
    "score_proj of all heads": ("score_proj.weight", (D, 2 * RANK)),
    "one number as bias of score_proj": ("score_proj.bias", (1,)),
    "out_proj of one head": ("out_proj.weight", (D, P)),
    "one number as bias of out_proj": ("out_proj.bias", (1,)),
    "one head in sqrt_lambda": ("sqrt_lambda", (1, RANK)),
    "another rank in sqrt_lambda": ("sqrt_lambda", (HEADS, 3 * RANK)),
}
WRONG_SIZES = {"num_heads": 4, "landmarks": 400}  # attribute of the layer → value set after construction
# Names in the messages: those of the parameters, as arguments of the operation.
ARGUMENTS = {
    "qk_proj.weight": "qk_weight",
    "qk_proj.bias": "qk_bias",
    "score_proj.weight": "score_weight",
    "score_proj.bias": "score_bias",
    "out_proj.weight": "out_weight",
    "out_proj.bias": "out_bias",
}


@pytest.fixture(params=["reference", "cpu", "fused"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "fused" and (
        find_spec("triton") is None or not (torch.cuda.is_available() or is_interpreting())
    ):
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return str(request.param)


def make(backend: str, **keywords: Any) -> tuple[PrimalAttention, Tensor]:
    device = "cuda" if backend == "fused" and torch.cuda.is_available() else "cpu"
    keywords |= {"rank": RANK, "landmarks": LANDMARKS, "backend": backend, "device": device}
    layer = PrimalAttention(D, HEADS, **keywords)
    return layer, torch.randn(2, 9, D, device=device)


@pytest.mark.parametrize(("name", "shape"), WRONG_PARAMETERS.values(), ids=WRONG_PARAMETERS)
def test_parameter_of_another_shape_is_refused(backend: str, name: str, shape: tuple[int, ...]) -> None:
    layer, x = make(backend)
    wrong = {name: torch.zeros(shape, device=x.device)}
    with pytest.raises(ValueError, match=rf"^{ARGUMENTS.get(name, name)} must have shape \("):
        torch.func.functional_call(layer, wrong, (x,))


@pytest.mark.parametrize(("name", "value"), WRONG_SIZES.items(), ids=WRONG_SIZES)
def test_size_changed_after_construction_is_refused(backend: str, name: str, value: Any) -> None:
    layer, x = make(backend)
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=r"^w_e must have shape \("):
        layer(x)


def test_decay_of_another_number_of_heads_is_refused(backend: str) -> None:
    layer, x = make(backend, data_dependent=False, causal=True, decay="learned")
    with pytest.raises(ValueError, match=r"^decay must have shape \("):
        torch.func.functional_call(layer, {"decay_logit": torch.zeros(1, device=x.device)}, (x,))
