"""Causal modes: outputs do not depend on later tokens, and streaming equals the full pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_cases import CAUSAL_AND_DECAYS, MAX_LENGTH, inputs, make, pad, tensors

# float64: the recurrence adds in another order than the full pass, over hundreds of tokens.
SAME = 1e-12

every_decay = pytest.mark.parametrize(("mode", "decay"), CAUSAL_AND_DECAYS)
every_map = pytest.mark.parametrize("feature_map", ["cosine", "softmax"])


def stream(layer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    ys = []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        ys.append(y_t)
    return torch.stack(ys, 1), state


@every_map
@every_decay
def test_later_tokens_do_not_change_a_bit_of_earlier_outputs(mode: str, decay: Any, feature_map: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        layer = make(mode, decay, feature_map=feature_map, dtype=dtype)
        x = inputs(2, MAX_LENGTH, dtype=dtype)
        y = layer(x)
        for cut, later in itertools.product((1, 16, MAX_LENGTH - 1), (100.0 * torch.randn_like(x), x * torch.nan)):
            changed = torch.cat([x[:, :cut], later[:, cut:]], dim=1)
            assert torch.equal(layer(changed)[:, :cut], y[:, :cut])


@every_map
@every_decay
def test_steps_equal_the_full_pass_with_a_state_of_constant_size(mode: str, decay: Any, feature_map: str) -> None:
    tokens = 400 if mode == "causal" else 60
    keywords = {"max_length": tokens, "landmarks": 25} if mode == "causal_data_dependent" else {}
    layer, x = make(mode, decay, feature_map=feature_map, **keywords).eval(), inputs(2, tokens)
    initial = layer.initial_state(2)
    with torch.no_grad():
        full, after_full = layer(x, return_state=True)
        streamed, after_steps = stream(layer, x, initial)
    error = ((streamed - full).abs().amax((0, 2)) / full.abs().amax((0, 2))).max()
    assert error <= SAME, f"one of the steps is off by {error:.1e}"
    for start, actual, expected in zip(*map(tensors, (initial, after_steps, after_full)), strict=True):
        assert start.shape == actual.shape
        assert_close(actual, expected, SAME, "state")


@every_map
@every_decay
@pytest.mark.parametrize("pieces", [(1, 9, 3), (7, 1, 2, 8)], ids=str)
def test_pieces_equal_one_pass_in_outputs_and_gradients(
    mode: str, decay: Any, feature_map: str, pieces: tuple[int, ...]
) -> None:
    layer = make(mode, decay, feature_map=feature_map)
    x = inputs(2, sum(pieces)).requires_grad_()
    full = layer(x)
    weight = torch.randn_like(full)
    expected = torch.autograd.grad((full * weight).sum(), [x, *layer.parameters()], allow_unused=True)

    state, ys = None, []
    for piece in x.split(pieces, dim=1):
        y, state = layer(piece, state=state, return_state=True)
        ys.append(y)
    resumed = torch.cat(ys, 1)
    assert_close(resumed, full, SAME, "outputs")
    grads = torch.autograd.grad((resumed * weight).sum(), [x, *layer.parameters()], allow_unused=True)
    for grad, other in zip(grads, expected, strict=True):
        if other is not None:
            assert_close(grad, other, 1e-11, "gradients through the state")  # a longer chain of the same sums


@every_map
@every_decay
@pytest.mark.parametrize("where", ["left", "right"])
def test_prompts_of_different_lengths_prefill_together(mode: str, decay: Any, feature_map: str, where: str) -> None:
    layer = make(mode, decay, feature_map=feature_map).eval()
    prompts, more = [inputs(n) for n in (3, 8, 5)], inputs(3, 6)
    _, state = layer(*pad(prompts, where, torch.nan), return_state=True)
    together, _ = stream(layer, more, state)
    for b, prompt in enumerate(prompts):
        expected = layer(torch.cat([prompt, more[b]])[None])[:, len(prompt) :]
        assert_close(together[b : b + 1], expected, SAME, f"prompt {b}")


@every_map
@every_decay
def test_a_sequence_may_skip_steps_and_a_state_may_be_used_twice(mode: str, decay: Any, feature_map: str) -> None:
    layer, x = make(mode, decay, feature_map=feature_map).eval(), inputs(2, 6)
    skips = torch.tensor([[False] * 6, [False, True, True, False, True, False]])
    state, ys = layer.initial_state(2), []
    for x_t, skip in zip(x.unbind(1), skips.unbind(1), strict=True):
        y_t, state = layer.step(x_t, state, skip)
        ys.append(y_t)
    assert_close(torch.stack(ys, 1), layer(x, skips), SAME)
    before = [part.clone() for part in tensors(state)]
    first, second = (layer.step(inputs(2), state)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert all(itertools.starmap(torch.equal, zip(tensors(state), before, strict=True)))
