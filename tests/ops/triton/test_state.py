"""Streaming on the kernels: segments equal one pass; gradients through states are refused."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close
from kernel_cases import SAME, Layer, make, tokens, twin
from primal_attention.ops.types import RunningState

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")


def assert_same_state(actual: RunningState, expected: RunningState) -> None:
    for name in ("query_sum", "key_sum", "weight"):
        assert_close(getattr(actual, name), getattr(expected, name), SAME, name)


SEGMENTS = [(mode, 16, 20, True, (70, 9, 1)) for mode in ("causal", "learned_decay", "fixed_decay")]
SEGMENTS += [("causal", 60, 96, True, (3, 1, 1)), ("learned_decay", 16, 5, False, (3, 1, 1))]
PADDED = [("causal", 24), ("learned_decay", 5)]
if torch.cuda.is_available():  # the interpreter is slow: each mode and each size, not all pairs
    SEGMENTS += [("learned_decay", 60, 96, True, (3, 1, 1)), ("causal", 16, 5, False, (3, 1, 1))]
    PADDED += [("causal", 5), ("learned_decay", 24)]


@pytest.mark.parametrize(("mode", "head_dim", "rank", "bias", "segments"), SEGMENTS)
@torch.no_grad()
def test_segments_equal_one_pass(
    device: torch.device, mode: str, head_dim: int, rank: int, bias: bool, segments: tuple[int, ...]
) -> None:
    """Segments of several chunks, of less than a block, and of one token, which has a kernel of its own."""
    layer = make(mode, head_dim, rank, bias=bias).to(device).eval()
    truth, x = twin(layer), tokens(layer, 2, sum(segments))
    expected, expected_state = truth(x.double(), return_state=True)
    # The state after a first call without one is a view of its sums.
    ys, state = [], layer.initial_state(2) if segments[0] > 3 else None
    for segment in x.split(segments, dim=1):
        y, state = layer(segment, state=state, return_state=True)
        ys.append(y)
    assert_close(torch.cat(ys, dim=1), expected, SAME, "y")
    assert_same_state(state, expected_state)


@torch.no_grad()
def test_a_state_of_the_equations_continues_on_the_kernels(device: torch.device) -> None:
    layer = make("learned_decay").to(device).eval()
    eager = twin(layer, torch.float32)
    x = tokens(layer, 2, 9)
    expected = twin(layer)(x.double())
    _, state = eager(x[:, :7], return_state=True)
    y, state = layer.step(x[:, 7], state)
    assert_close(y, expected[:, 7], SAME)
    assert_close(eager.step(x[:, 8], state)[0], expected[:, 8], SAME)


@pytest.mark.parametrize(("mode", "rank"), PADDED)
@torch.no_grad()
def test_padding_in_a_segment_does_not_change_the_state(device: torch.device, mode: str, rank: int) -> None:
    layer = make(mode, rank=rank).to(device).eval()
    truth = twin(layer)
    x, mask = tokens(layer, 3, 9), torch.zeros(3, 9, dtype=torch.bool, device=device)
    mask[0, :4] = mask[1, 6:] = mask[2] = True
    x[mask] = float("nan")
    state = layer(tokens(layer, 3, 5), return_state=True)[1]
    exact_state = RunningState(state.query_sum.double(), state.key_sum.double(), state.weight.double())
    y, after = layer(x, mask, state=state, return_state=True)
    expected, expected_state = truth(x.double(), mask, state=exact_state, return_state=True)
    assert_close(y, expected, SAME, "y")
    assert_same_state(after, expected_state)


def test_gradients_through_a_state_need_the_equations(device: torch.device) -> None:
    for mode in ("causal", "causal_landmarks"):
        layer = make(mode).to(device)
        x = tokens(layer, 2, 5).requires_grad_()
        for keywords in ({"state": layer.initial_state(2)}, {"return_state": True}):
            with pytest.raises(ValueError, match="state need the equations") as raised:
                layer(x, **keywords)
            assert "\n" not in str(raised.value)
    layer = make("learned_decay", backend="auto").to(device)
    x = tokens(layer, 2, 9)

    def gradient(one: Layer) -> torch.Tensor:
        rows = x.to(one.w_e.dtype).requires_grad_()
        _, state = one(rows[:, :4], return_state=True)
        y, _ = one(rows[:, 4:], state=state, return_state=True)
        return torch.autograd.grad(y.square().sum(), rows)[0]

    assert_close(gradient(layer), gradient(twin(layer)), SAME, "gradient of x")


@torch.no_grad()
def test_the_causal_landmark_mode_streams_by_the_equations(device: torch.device) -> None:
    layer = make("causal_landmarks").to(device).eval()
    with pytest.raises(ValueError, match="streams through the equations"):
        layer(tokens(layer, 2, 5), return_state=True)
    layer.backend = "auto"
    x = tokens(layer, 2, 9)
    _, state = layer(x[:, :8], return_state=True)
    assert_close(layer.step(x[:, 8], state)[0], twin(layer)(x.double())[:, 8], SAME)
