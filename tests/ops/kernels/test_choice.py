"""Which calls the kernels take: "fused" says in one line why not, "auto" falls back without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from kernel_cases import SAME, make, tokens, twin
from primal_attention import PrimalAttention
from primal_attention.ops import backends
from primal_attention.ops.modes import COSINE, FeatureMap, Mode

PLAIN = Mode(heads=2, landmarks=4, data_dependent=False)
GROWING = Mode(heads=2, landmarks=4, causal=True, max_length=8)
SOFTMAX = FeatureMap(lambda z: z, normalised=True)


def call(dtype: torch.dtype = torch.float32, width: int = 32, rank: int = 5, **keywords: Any) -> dict[str, Any]:
    """The arguments of `choose` after the backend."""
    given = {"x": torch.zeros(1, 3, width, dtype=dtype), "rank": rank, "mode": PLAIN, "feature_map": COSINE}
    return {**given, "state": None, **keywords}


REFUSED = {
    "float64": (call(torch.float64), "float64 is not one of"),
    "rank": (call(rank=257), "rank 257 must not exceed 256"),
    "head_dim": (call(width=2 * 257), "head width 257"),
    "growing_rank": (call(rank=257, mode=GROWING), "must not exceed 256"),
    "softmax": (call(feature_map=SOFTMAX), "only the cosine feature map"),
    "state": (call(need_state=True), "gradients through a streaming state"),
}


@pytest.fixture
def _interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "interpreting", lambda: True)


@pytest.mark.usefixtures("_interpreting")
@pytest.mark.parametrize("case", REFUSED)
def test_fused_says_in_one_line_why_it_cannot(case: str) -> None:
    arguments, why = REFUSED[case]
    with pytest.raises(ValueError, match=why) as raised:
        backends.choose("fused", **arguments)
    message = str(raised.value)
    assert message.startswith("backend='fused' cannot serve this call: ")
    assert "\n" not in message
    assert "auto" in message


@pytest.mark.usefixtures("_interpreting")
@pytest.mark.parametrize("arguments", [call(), call(torch.float16), call(torch.bfloat16), call(rank=256, width=512)])
def test_fused_takes_what_the_kernels_serve(arguments: dict[str, Any]) -> None:
    assert backends.choose("fused", **arguments) == "fused"


@pytest.mark.usefixtures("_interpreting")
@pytest.mark.parametrize("case", REFUSED)
def test_auto_falls_back_where_the_kernels_cannot(case: str) -> None:
    assert backends.choose("auto", **REFUSED[case][0]) in ("reference", "lean")


def test_fused_on_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"x is on 'cpu', the kernels run on 'cuda'"):
        backends.choose("fused", **call())
    layer = make("data_dependent", backend="auto")
    x = tokens(layer, 1, 3)
    assert_close(layer(x), twin(layer)(x.double()), SAME)


@pytest.mark.usefixtures("_interpreting")
def test_fused_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "TRITON_MISSING", "Triton is not installed")
    with pytest.raises(ValueError, match="Triton is not installed"):
        backends.choose("fused", **call())
    assert backends.choose("auto", **call()) != "fused"


@pytest.mark.usefixtures("_interpreting")
def test_transforms_and_forward_derivatives_are_left_to_the_equations() -> None:
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


def test_the_layer_refuses_before_it_computes(device: torch.device) -> None:
    layer = PrimalAttention(32, 2, rank=5, landmarks=4, backend="fused", device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64 is not one of bfloat16, float16, float32"):
        layer(tokens(layer, 1, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_takes_the_kernels_on_a_gpu() -> None:
    assert backends.choose("auto", **{**call(), "x": torch.zeros(1, 3, 32, device="cuda")}) == "fused"


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert isinstance(backends.current(torch.device("cuda", 1)), torch.cuda.device)
    for here in (torch.device("cuda", 0), torch.device("cpu")):
        assert not isinstance(backends.current(here), torch.cuda.device)
