"""Causal modes: the future does not reach the past, and streaming is the full pass cut into pieces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from primal_cases import CAUSAL, CAUSAL_AND_DECAYS, MAX_LENGTH, inputs, make

# float64: the recurrence adds in another order than the full pass, over as many as 2,000 tokens.
SAME = 1e-12

every_case = pytest.mark.parametrize(
    ("mode", "decay", "feature_map"),
    [(*case, feature_map) for case in CAUSAL_AND_DECAYS for feature_map in ("cosine", "softmax")],
)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_the_future_changes_nothing_in_the_past_bit_for_bit(
    mode: str, decay: Any, feature_map: str, dtype: torch.dtype
) -> None:
    layer = make(mode, decay, feature_map=feature_map, dtype=dtype)
    x = inputs(2, MAX_LENGTH, dtype=dtype)
    y = layer(x)
    for cut in (1, 7, 16, MAX_LENGTH - 1):
        changed = x.clone()
        changed[:, cut:] = 100.0 * torch.randn_like(changed[:, cut:])
        assert torch.equal(layer(changed)[:, :cut], y[:, :cut])
        changed[:, cut:] = float("nan")
        assert torch.equal(layer(changed)[:, :cut], y[:, :cut])


@every_case
def test_no_output_has_a_gradient_to_a_later_input(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map)
    n = 9
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0].sum(-1), inputs(n))  # (i, j, d)
    reached = jacobian.abs().sum(-1)
    assert (reached.triu(1) == 0).all()
    assert (reached.diagonal() > 0).all()


def stream(layer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    ys = []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        ys.append(y_t)
    return torch.stack(ys, 1), state


@pytest.mark.parametrize(("feature_map", "tokens"), [("cosine", 2000), ("softmax", 300)])
@pytest.mark.parametrize(("mode", "decay"), CAUSAL_AND_DECAYS)
def test_step_equals_the_full_pass_over_thousands_of_tokens(
    mode: str, decay: Any, feature_map: str, tokens: int
) -> None:
    keywords = {"max_length": tokens, "landmarks": 50} if mode == "causal_data_dependent" else {}
    layer = make(mode, decay, feature_map=feature_map, **keywords).eval()
    x = inputs(2, tokens)
    with torch.no_grad():
        full, after_full = layer(x, return_state=True)
        streamed, after_steps = stream(layer, x, layer.initial_state(2))
    assert_close(streamed, full, SAME, "outputs")
    worst = ((streamed - full).abs().amax((0, 2)) / full.abs().amax((0, 2))).max()
    assert worst <= SAME, f"one of the steps is off by {worst:.1e}"
    for ours, theirs in zip(tensors(after_steps), tensors(after_full), strict=True):
        assert_close(ours, theirs, SAME, "state")


def tensors(state: Any) -> list[Tensor]:
    return [part for part in state if isinstance(part, Tensor)]


@every_case
def test_the_state_does_not_grow(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    state = layer.initial_state(2)
    shapes = [part.shape for part in tensors(state)]
    for _ in range(5):
        _, state = layer.step(inputs(2), state)
        assert [part.shape for part in tensors(state)] == shapes
    _, state = layer(inputs(2, 15), state=state, return_state=True)
    assert [part.shape for part in tensors(state)] == shapes


@pytest.mark.parametrize("mode", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_state_is_float32_for_narrow_layers(mode: str, dtype: torch.dtype) -> None:
    layer = make(mode, dtype=dtype).eval()
    sums = [part for part in tensors(layer.initial_state(1)) if part.is_floating_point()]
    _, after = layer.step(inputs(1, dtype=dtype), layer.initial_state(1))
    assert {part.dtype for part in sums} == {torch.float32}
    assert [part.dtype for part in tensors(after)] == [part.dtype for part in tensors(layer.initial_state(1))]


@every_case
@settings(max_examples=6, deadline=None)
@given(pieces=st.lists(st.integers(1, 9), min_size=2, max_size=4).filter(lambda p: sum(p) <= MAX_LENGTH))
def test_splitting_anywhere_and_resuming_from_the_state_equals_one_pass(
    mode: str, decay: Any, feature_map: str, pieces: list[int]
) -> None:
    layer = make(mode, decay, feature_map=feature_map)
    x = inputs(2, sum(pieces)).requires_grad_()
    full = layer(x)
    weigh = torch.randn_like(full)
    expected = torch.autograd.grad((full * weigh).sum(), [x, *layer.parameters()], allow_unused=True)

    state, ys = layer.initial_state(2), []
    for piece in x.split(pieces, dim=1):
        y, state = layer(piece, state=state, return_state=True)
        ys.append(y)
    resumed = torch.cat(ys, 1)
    assert_close(resumed, full, SAME, "outputs")
    found = torch.autograd.grad((resumed * weigh).sum(), [x, *layer.parameters()], allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            assert_close(ours, theirs, 1e-11, "gradients through the state")  # a longer chain of the same sums


@every_case
def test_prefill_then_step_equals_the_full_pass(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    x = inputs(2, MAX_LENGTH)
    _, state = layer(x[:, :10], return_state=True)
    streamed, _ = stream(layer, x[:, 10:], state)
    assert_close(streamed, layer(x)[:, 10:], SAME)


@every_case
@pytest.mark.parametrize("where", ["left", "right"])
def test_prompts_of_many_lengths_prefill_together(mode: str, decay: Any, feature_map: str, where: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    prompts, more = [inputs(n) for n in (3, 8, 5)], inputs(3, 6)
    batch = torch.full((3, 8, prompts[0].shape[-1]), float("nan"), dtype=torch.float64)
    mask = torch.ones(3, 8, dtype=torch.bool)
    for row, hidden, prompt in zip(batch, mask, prompts, strict=True):
        place = slice(8 - len(prompt), None) if where == "left" else slice(len(prompt))
        row[place], hidden[place] = prompt, False
    _, state = layer(batch, mask, return_state=True)
    together, _ = stream(layer, more, state)
    for b, prompt in enumerate(prompts):
        alone = layer(torch.cat([prompt, more[b]])[None])[:, len(prompt) :]
        assert_close(together[b : b + 1], alone, SAME, f"prompt {b}")


@every_case
def test_a_sequence_may_sit_out_a_step(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    x = inputs(2, 6)
    absent = torch.tensor([[False] * 6, [False, True, True, False, True, False]])
    state, ys = layer.initial_state(2), []
    for x_t, out in zip(x.unbind(1), absent.unbind(1), strict=True):
        y_t, state = layer.step(x_t, state, out)
        ys.append(y_t)
    assert_close(torch.stack(ys, 1), layer(x, absent), SAME)


@every_case
def test_a_state_may_be_kept_and_continued_twice(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    _, state = layer(inputs(1, 5), return_state=True)
    before = [part.clone() for part in tensors(state)]
    first, second = (layer.step(x_t, state)[0] for x_t in inputs(2, 1))
    assert not torch.equal(first, second)
    assert all(itertools.starmap(torch.equal, zip(tensors(state), before, strict=True)))


def test_a_full_state_refuses_more_tokens_than_max_length() -> None:
    layer = make("causal_data_dependent").eval()
    _, state = layer(inputs(1, MAX_LENGTH), return_state=True)
    with pytest.raises(
        ValueError, match=f"max_length={MAX_LENGTH} is exceeded by a sequence of {MAX_LENGTH + 1} tokens"
    ):
        layer.step(inputs(1), state)


def test_skipped_steps_do_not_count_towards_max_length() -> None:
    layer = make("causal_data_dependent").eval()
    _, state = layer(inputs(1, MAX_LENGTH - 1), return_state=True)
    for _ in range(3):
        _, state = layer.step(inputs(1), state, torch.tensor([True]))
    layer.step(inputs(1), state)


def test_an_empty_batch_streams() -> None:
    for mode in CAUSAL:
        layer = make(mode).eval()
        y, _ = layer.step(inputs(0), layer.initial_state(0))
        assert y.shape == (0, layer.embed_dim)
