"""torch.compile traces the fused layer without graph breaks, and one graph serves all lengths. GPU only: interpreted
kernels cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from closeness import assert_close
from kernel_cases import SAME, assert_same, make, results, tokens, twin

pytestmark = pytest.mark.gpu


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
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        *((mode, "full") for mode in ("data_dependent", "learned_decay", "causal_landmarks_decay")),
        *((mode, "recomputed") for mode in ("data_dependent", "learned_decay")),
        *((mode, "packed") for mode in ("data_dependent", "causal_landmarks")),
        ("data_dependent", "padded"),
    ],
)
def test_one_graph_serves_all_lengths(device: torch.device, mode: str, layout: str) -> None:
    layer = make(mode, heads=1, recompute=layout == "recomputed").to(device)
    plain = twin(layer, torch.float32, "fused")
    plain.recompute = False
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = Compiled(layer, counter)
    graphs = set()
    for batch, length in [(2, 7), (3, 12), (2, 5)]:
        x, keywords = tokens(layer, batch, length), {"scored": layout != "recomputed"}
        if layout == "packed":
            bounds = [0, 3, 3, length] if batch == 2 else [0, 1, 5, length]
            x = tokens(layer, length)
            keywords |= {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device), "max_seqlen": 12}
        elif layout == "padded":
            keywords["key_padding_mask"] = torch.arange(length, device=device).expand(batch, -1) < batch - 1
        assert_same(results(compiled, x, **keywords), results(plain, x, **keywords))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, "another length was compiled again"


def test_autocast_compiles(device: torch.device) -> None:
    layer = make("data_dependent", heads=1).to(device)
    x = tokens(layer, 2, 7)
    with torch.autocast(device.type, torch.float16):
        assert torch.equal(Compiled(layer, "aot_eager")(x), layer(x))


@torch.no_grad()
def test_a_decoding_step_compiles(device: torch.device) -> None:
    layer = make("learned_decay", heads=1).to(device).eval()
    x, state = tokens(layer, 2), layer.initial_state(2)
    expected, expected_state = layer.step(x, state)
    y, state = torch.compile(layer.step, fullgraph=True, backend="aot_eager")(x, state)
    assert_close(y, expected, SAME)
    assert_close(state.query_sum, expected_state.query_sum, SAME)
