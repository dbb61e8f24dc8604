"""Streaming on the kernels: a stretch resumed from a state is the whole pass; gradients through states are refused."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close
from kernel_cases import SAME, Layer, make, tokens, twin
from primal_attention.ops.types import RunningState

RUNNING = ["causal", "learned_decay", "fixed_decay"]

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")


def assert_same_state(found: RunningState, expected: RunningState) -> None:
    for name in ("query_sum", "key_sum", "weight"):
        assert_close(getattr(found, name), getattr(expected, name), SAME, name)


@pytest.mark.parametrize("mode", RUNNING)
@torch.no_grad()
def test_a_pass_in_stretches_is_the_whole_pass(device: torch.device, mode: str) -> None:
    """Stretches of several chunks, of less than a block, and of one token, which has a kernel of its own."""
    layer = make(mode, rank=20).to(device).eval()
    truth = twin(layer)
    x = tokens(layer, 2, 80)
    expected, after = truth(x.double(), return_state=True)
    state = layer.initial_state(2)
    ys = []
    for stretch in x.split([70, 9, 1], dim=1):
        y, state = layer(stretch, state=state, return_state=True)
        ys.append(y)
    assert_close(torch.cat(ys, dim=1), expected, SAME, "y")
    assert_same_state(state, after)


@pytest.mark.parametrize("mode", ["causal", "learned_decay"])
@pytest.mark.parametrize(("head_dim", "rank", "bias"), [(60, 96, True), (16, 5, False)])
@torch.no_grad()
def test_decoding_token_by_token_is_the_whole_pass(
    device: torch.device, mode: str, head_dim: int, rank: int, bias: bool
) -> None:
    layer = make(mode, head_dim, rank, bias=bias).to(device).eval()
    truth = twin(layer)
    x = tokens(layer, 2, 5)
    expected, after = truth(x.double(), return_state=True)
    # The state of a pass is a slice of its sums, not memory of its own.
    y, state = layer(x[:, :3], return_state=True)
    ys = [*y.unbind(1)]
    for token in x[:, 3:].unbind(1):
        y, state = layer.step(token, state)
        ys.append(y)
    assert_close(torch.stack(ys, dim=1), expected, SAME, "y")
    assert_same_state(state, after)


@torch.no_grad()
def test_a_state_of_the_equations_resumes_on_the_kernels(device: torch.device) -> None:
    layer = make("learned_decay").to(device).eval()
    eager = twin(layer, torch.float32)
    x = tokens(layer, 2, 9)
    expected = twin(layer)(x.double())
    _, state = eager(x[:, :7], return_state=True)
    y, state = layer.step(x[:, 7], state)
    assert_close(y, expected[:, 7], SAME)
    assert_close(eager.step(x[:, 8], state)[0], expected[:, 8], SAME)


@pytest.mark.parametrize("mode", ["causal", "learned_decay"])
@pytest.mark.parametrize("rank", [5, 24], ids=["narrow", "wide"])
@torch.no_grad()
def test_padding_in_a_stretch_leaves_the_state_alone(device: torch.device, mode: str, rank: int) -> None:
    layer = make(mode, rank=rank).to(device).eval()
    truth = twin(layer)
    x, mask = tokens(layer, 3, 9), torch.zeros(3, 9, dtype=torch.bool, device=device)
    mask[0, :4] = mask[1, 6:] = mask[2] = True
    x[mask] = float("nan")
    state = layer(tokens(layer, 3, 5), return_state=True)[1]
    wide = RunningState(state.query_sum.double(), state.key_sum.double(), state.weight.double())
    y, after = layer(x, mask, state=state, return_state=True)
    expected, true_after = truth(x.double(), mask, state=wide, return_state=True)
    assert_close(y, expected, SAME, "y")
    assert_same_state(after, true_after)


@pytest.mark.parametrize("mode", ["causal", "causal_landmarks"])
def test_gradients_through_a_state_are_refused_in_one_line(device: torch.device, mode: str) -> None:
    layer = make(mode).to(device)
    x = tokens(layer, 2, 5).requires_grad_()
    with pytest.raises(ValueError, match="state need the equations") as raised:
        layer(x, state=layer.initial_state(2))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="state need the equations"):
        layer(x, return_state=True)


def test_auto_takes_gradients_through_a_state_by_the_equations(device: torch.device) -> None:
    layer = make("learned_decay", backend="auto").to(device)
    truth = twin(layer)
    x = tokens(layer, 2, 9)

    def gradient(one: Layer) -> torch.Tensor:
        rows = x.to(one.w_e.dtype).requires_grad_()
        _, state = one(rows[:, :4], return_state=True)
        y, _ = one(rows[:, 4:], state=state, return_state=True)
        return torch.autograd.grad(y.square().sum(), rows)[0]

    assert_close(gradient(layer), gradient(truth), SAME, "gradient of x")


@torch.no_grad()
def test_the_growing_mode_streams_by_the_equations(device: torch.device) -> None:
    layer = make("causal_landmarks").to(device).eval()
    with pytest.raises(ValueError, match="streams through the equations"):
        layer(tokens(layer, 2, 5), return_state=True)
    layer.backend = "auto"
    x = tokens(layer, 2, 9)
    _, state = layer(x[:, :8], return_state=True)
    assert_close(layer.step(x[:, 8], state)[0], twin(layer)(x.double())[:, 8], SAME)
