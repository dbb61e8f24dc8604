"""GPU only: very long input, more than 2³¹ numbers, CUDA graphs, and 16-bit errors at typical sizes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from closeness import assert_close, rms_ratio
from kernel_cases import Layer, make, results, tokens, twin

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# One rounding of bfloat16 per step of a short chain; the same chain in another order of sums.
CLOSE_IN_BFLOAT16 = 1e-2


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def require_memory(gibibytes: float) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.mark.parametrize("mode", ["data_dependent", "causal", "learned_decay"])
def test_a_million_tokens_have_finite_outputs_and_gradients(mode: str) -> None:
    require_memory(24)
    layer = make(mode, head_dim=64, rank=30, heads=8, landmarks=300).to(DEVICE, torch.bfloat16)
    x = tokens(layer, 1, 1_048_576).requires_grad_()
    y = layer(x)
    loss = y.float().square().mean() + layer.objective.square().sum()
    names, inputs = zip(("x", x), *layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, inputs)
    for name, value in (("y", y), ("J", layer.objective), *zip(names, grads, strict=True)):
        assert torch.isfinite(value).all(), name
    # In the causal modes the first tokens do not depend on the rest.
    if layer.causal:
        with torch.no_grad():
            assert_close(y[:, :4096], layer(x[:, :4096]), CLOSE_IN_BFLOAT16, "first tokens")


@pytest.mark.parametrize("mode", ["data_dependent", "learned_decay"])
def test_inputs_of_more_than_two_to_the_31_numbers(mode: str) -> None:
    """The last sequence is beyond the range of 32-bit offsets; alone it must give the same results."""
    require_memory(48)
    layer = make(mode, head_dim=64, rank=5, heads=8, landmarks=30).to(DEVICE, torch.bfloat16)
    batch, length = 33, 131_072
    assert batch * length * layer.embed_dim > 2**31
    x = torch.empty(batch, length, layer.embed_dim, dtype=torch.bfloat16, device=DEVICE).normal_().requires_grad_()
    y, grad = output_and_gradient(layer, x)
    expected, expected_grad = output_and_gradient(layer, x[-1:].detach().requires_grad_())
    assert_close(y[-1:], expected, CLOSE_IN_BFLOAT16, "y")
    assert_close(grad[-1:], expected_grad, CLOSE_IN_BFLOAT16, "gradient of x")


def output_and_gradient(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = layer(x)
    return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]


@pytest.mark.parametrize("mode", ["data_dependent", "plain", "learned_decay", "causal_landmarks"])
def test_a_cuda_graph_replays_forward_and_backward(mode: str) -> None:
    layer = make(mode, head_dim=64, rank=30, max_length=500).to(DEVICE)
    x = tokens(layer, 2, 500).requires_grad_()

    def step() -> torch.Tensor:
        for value in (x, *layer.parameters()):
            value.grad = None
        y: torch.Tensor = layer(x)
        (y.square().sum() + layer.objective.square().sum()).backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    grads = {name: value.grad for name, value in (("x", x), *layer.named_parameters())}
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for length in range(1, 100):  # more lengths than tables are cached: the graph still reads its own
            layer(tokens(layer, 1, length))
    graph.replay()
    torch.cuda.synchronize()
    replayed = {"y": y.clone(), **{name: grad.clone() for name, grad in grads.items()}}
    again = step()
    assert torch.equal(replayed["y"], again)
    for name, value in (("x", x), *layer.named_parameters()):
        assert_close(replayed[name], value.grad, 1e-6, name)


@pytest.mark.parametrize(
    ("head_dim", "rank", "heads"), [(64, 30, 8), (64, 96, 4), (128, 96, 4), (60, 20, 2), (256, 200, 1)]
)
@pytest.mark.parametrize("mode", ["data_dependent", "plain", "two_sided", "causal", "learned_decay"])
def test_the_kernels_are_as_exact_as_the_equations_in_bfloat16(mode: str, head_dim: int, rank: int, heads: int) -> None:
    layer = make(mode, head_dim, rank, heads, landmarks=300).to(DEVICE, torch.bfloat16)
    x = tokens(layer, 2, 1500)
    each = (twin(layer), twin(layer, torch.bfloat16), layer)
    truth, eager, fused = (results(one, x) for one in each)
    for name, value in fused.items():
        # The ratio of two errors of few numbers varies widely.
        factor = 1.2 if value.numel() >= 32 else 3.0
        limit = max(factor * rms_ratio(eager[name], truth[name]), 0.1 * torch.finfo(torch.bfloat16).eps)
        assert_close(value, truth[name], limit, name)
