"""torch.compile traces the fused layer without graph breaks, and one graph serves all lengths. GPU only: interpreted
kernels cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from closeness import assert_close
from kernel_cases import SAME, assert_same, make, results, tokens, twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Compiled:
    """A compiled layer with the attributes that `results` reads."""

    def __init__(self, layer: torch.nn.Module, backend: Any) -> None:
        self.layer, self.call = layer, torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.call(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.supports("compile", "cuda")
@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay", "causal_landmarks_decay"])
def test_one_graph_serves_all_lengths(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    plain = twin(layer, torch.float32, "fused")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = Compiled(layer, counter)
    graphs = set()
    for batch, length in [(2, 7), (3, 12), (2, 5)]:
        x = tokens(layer, batch, length)
        assert_same(results(compiled, x), results(plain, x))  # type: ignore[arg-type]
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, "a length was compiled anew"


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay"])
def test_a_layer_that_recomputes_compiles(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1, recompute=True).to(device)
    plain = twin(layer, torch.float32, "fused")
    plain.recompute = False
    x = tokens(layer, 2, 7)
    found = results(Compiled(layer, "aot_eager"), x, scored=False)  # type: ignore[arg-type]
    assert_same(found, results(plain, x, scored=False))


@pytest.mark.parametrize("mode", ["data_dependent", "causal_landmarks"])
def test_packed_input_compiles(device: torch.device, mode: str) -> None:
    layer = make(mode, heads=1).to(device)
    plain = twin(layer, torch.float32, "fused")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = Compiled(layer, counter)
    graphs = set()
    for bounds in ([0, 5, 5, 9], [0, 1, 3, 12]):
        cu_seqlens, x = torch.tensor(bounds, dtype=torch.int32, device=device), tokens(layer, bounds[-1])
        given = {"cu_seqlens": cu_seqlens, "max_seqlen": 12}
        assert_same(results(compiled, x, **given), results(plain, x, **given))  # type: ignore[arg-type]
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, "a length was compiled anew"


def test_padded_input_compiles(device: torch.device) -> None:
    layer = make("data_dependent", heads=1).to(device)
    plain = twin(layer, torch.float32, "fused")
    compiled = Compiled(layer, "aot_eager")
    x, mask = tokens(layer, 2, 9), torch.zeros(2, 9, dtype=torch.bool, device=device)
    mask[0, :4] = True
    assert_same(results(compiled, x, mask), results(plain, x, mask))  # type: ignore[arg-type]


def test_autocast_compiles(device: torch.device) -> None:
    layer = make("data_dependent", heads=1).to(device)
    plain = twin(layer, torch.float32, "fused")
    x = tokens(layer, 2, 7)

    def outputs(one: Any) -> Tensor:
        with torch.autocast(device.type, torch.float16):
            y: Tensor = one(x)
        return y

    assert torch.equal(outputs(Compiled(layer, "aot_eager")), outputs(plain))


@torch.no_grad()
def test_a_decoding_step_compiles(device: torch.device) -> None:
    layer = make("learned_decay", heads=1).to(device).eval()
    x, state = tokens(layer, 2), layer.initial_state(2)
    expected, after = layer.step(x, state)
    found, found_after = torch.compile(layer.step, fullgraph=True, backend="aot_eager")(x, state)
    assert_close(found, expected, SAME)
    assert_close(found_after.query_sum, after.query_sum, SAME)
