"""The choice of the backend: "fused" and "cpu" refuse with a one-line reason, "auto" falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import make, tokens
from primal_attention.ops import primal
from primal_attention.ops.feature_maps import COSINE, FeatureMap
from primal_attention.ops.primal import choose_backend
from primal_attention.ops.types import Mode, Weights

PLAIN = Mode(heads=2, landmarks=4, data_dependent=False)
CAUSAL_LANDMARKS = Mode(heads=2, landmarks=4, causal=True, max_length=8)
SOFTMAX = FeatureMap(lambda z: z, is_normalised=True)


def call(dtype: torch.dtype = torch.float32, width: int = 32, rank: int = 5, **keywords: Any) -> dict[str, Any]:
    """The arguments of `choose_backend` after the backend."""
    w, one = torch.zeros(2, width // 2, rank), torch.zeros(1)
    weights = Weights(one, None, w, w, one, None, one, None)
    arguments = {"x": torch.zeros(1, 3, width, dtype=dtype), "weights": weights, "mode": PLAIN, "feature_map": COSINE}
    return {**arguments, **keywords}


REFUSED = {
    "float64": (call(torch.float64), "float64 is not one of"),
    "rank": (call(rank=257), "rank 257 must not exceed 256"),
    "head_dim": (call(width=2 * 257), "head width 257"),
    "landmark_rank": (call(width=128, rank=200, mode=CAUSAL_LANDMARKS), "do not fit the registers"),
    "softmax": (call(feature_map=SOFTMAX), "only the cosine feature map"),
    "state": (call(need_state=True), "gradients through a streaming state"),
    "empty": ({**call(), "x": torch.zeros(0, 3, 32)}, "x is empty"),
}


@pytest.fixture
def _has_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primal, "device_problem", lambda device: None)


@pytest.mark.usefixtures("_has_device")
@pytest.mark.parametrize("reason", REFUSED)
def test_fused_refuses_with_the_reason_and_auto_falls_back(reason: str) -> None:
    arguments, why = REFUSED[reason]
    with pytest.raises(ValueError, match=why) as raised:
        choose_backend("fused", **arguments)
    message = str(raised.value)
    assert message.startswith("backend='fused' does not support this call: ")
    assert "\n" not in message
    assert "auto" in message
    assert choose_backend("auto", **arguments) in ("reference", "cpu")


@pytest.mark.usefixtures("_has_device")
def test_fused_takes_what_the_kernels_serve() -> None:
    for arguments in (call(), call(torch.float16), call(torch.bfloat16), call(rank=256, width=512)):
        assert choose_backend("fused", **arguments) == "fused"


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"mode": CAUSAL_LANDMARKS}, "it has no causal data-dependent mode"),
        ({"decay": torch.ones(2)}, "it has no decay in both directions"),
        ({"qk": torch.zeros(1, 3, 64)}, "it reads the weights of plain nn.Linear maps only"),
        ({"feature_map": SOFTMAX}, "only the cosine feature map has a fast path"),
        ({"x": torch.empty(1, 3, 32, device="meta")}, "x is on 'meta'"),
    ],
)
def test_cpu_refuses_with_the_reason_and_auto_falls_back(keywords: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"backend='cpu' does not support this call: {why}"):
        choose_backend("cpu", **call(**keywords))
    large = {"x": torch.zeros(1, 2**12, 32), **keywords}
    assert choose_backend("auto", **call(**large)) == "reference"


def test_auto_takes_the_cpu_backend_for_large_inputs_without_transforms() -> None:
    large = call(x=torch.zeros(1, 2**12, 32))
    assert choose_backend("auto", **large) == "cpu"
    assert choose_backend("auto", **call()) == "reference"
    with torch.autograd.forward_ad.dual_level():
        assert choose_backend("auto", **large) == "reference"
    chosen = []
    torch.func.vmap(lambda one: chosen.append(choose_backend("auto", **large)) or one)(torch.zeros(2))
    assert chosen == ["reference"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("is_interpreting", lambda: False, "x is on 'cpu', the kernels run on 'cuda'"),
        ("HAS_TRITON", False, "Triton is not installed"),
        ("MIN_TRITON", (99, 0), "is older than 99.0"),
    ],
)
def test_fused_needs_a_gpu_and_triton(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str) -> None:
    monkeypatch.setattr(primal, name, value)
    with pytest.raises(ValueError, match=why):
        choose_backend("fused", **call())
    assert choose_backend("auto", **call()) != "fused"


@pytest.mark.usefixtures("_has_device")
def test_fused_refuses_transforms_and_forward_derivatives() -> None:
    layer = make("plain", backend="fused")

    def output(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y

    attempts: list[Callable[[], Any]] = [
        lambda: torch.func.vmap(output)(tokens(layer, 2, 1, 3)),
        lambda: torch.func.jvp(output, (tokens(layer, 1, 3),), (tokens(layer, 1, 3),)),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="need the equations"):
            attempt()


@pytest.mark.gpu
def test_auto_takes_the_kernels_on_a_gpu() -> None:
    assert choose_backend("auto", **{**call(), "x": torch.zeros(1, 3, 32, device="cuda")}) == "fused"
