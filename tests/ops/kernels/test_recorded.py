"""Small eager calls from a recording: the same numbers as a plain call, whatever order calls come in.

Without a GPU there is no graph to record: there the work itself is done again on the recording's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernel_cases import Layer, Results, make, tokens
from primal_attention.ops.fused import attention, recorded

MODES = ["data_dependent", "learned_decay", "growing"]


def run_again(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """`capture` without a GPU: a replay does the work once more and puts its results where the first ones are."""
    first = work()

    def flat(results: Any) -> list[torch.Tensor]:
        if isinstance(results, dict):
            return list(results.values())
        return [t for r in results if r is not None for t in (flat(r) if isinstance(r, (tuple, dict)) else [r])]

    def again() -> None:
        with torch.no_grad():
            for old, new in zip(flat(first), flat(work()), strict=True):
                old.copy_(new)

    return first, again


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(recorded, "RECORDINGS", recorded.Recordings())
    monkeypatch.setattr(recorded, "AFTER", 1)
    if device.type == "cpu":
        busy = []

        def capture(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            def guarded() -> Any:
                busy.append(1)
                try:
                    return work()
                finally:
                    busy.pop()

            return run_again(guarded)

        monkeypatch.setattr(recorded, "capture", capture)
        monkeypatch.setattr(recorded, "_stream", lambda: (0, 0))
        monkeypatch.setattr(attention, "worthwhile", lambda x: not busy and x.numel() <= recorded.LARGEST)


def plainly(layer: Layer, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Results:
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "LARGEST", 0)
        return step(layer, x)


def forward(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    return x, y, y.float().square().sum() + layer.objective.square().sum()


def backward(layer: Layer, x: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> Results:
    grads = torch.autograd.grad(loss, [x, *layer.parameters()])
    return {"y": y.detach(), **dict(zip(["x", *dict(layer.named_parameters())], grads, strict=True))}


def step(layer: Layer, x: torch.Tensor) -> Results:
    return backward(layer, *forward(layer, x))


def warm(layer: Layer, x: torch.Tensor) -> None:
    for _ in range(recorded.AFTER + 1):
        step(layer, x)
    assert any(isinstance(r, recorded.Recording) for r in recorded.RECORDINGS.table.values())


def assert_equal(found: Results, expected: Results) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_gives_what_a_plain_call_gives(
    device: torch.device, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(mode, max_length=12).to(device)
    warm(layer, tokens(layer, 2, 12))
    x = tokens(layer, 2, 12)
    assert_equal(step(layer, x), plainly(layer, x, monkeypatch))


def test_two_passes_may_wait_for_their_way_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And two layers of one shape share a recording: neither finds the other's numbers in it."""
    one, two = make("data_dependent").to(device), make("data_dependent").to(device)
    first, second = tokens(one, 2, 9), tokens(one, 2, 9)
    warm(one, first)
    waiting = [forward(layer, x) for layer, x in ((one, first), (one, second), (two, first))]
    objectives = backward(one, *waiting[0]), backward(one, *waiting[1]), backward(two, *waiting[2])
    assert sum(isinstance(r, recorded.Recording) for r in recorded.RECORDINGS.table.values()) == 1
    for found, (layer, x) in zip(objectives, ((one, first), (one, second), (two, first)), strict=True):
        assert_equal(found, plainly(layer, x, monkeypatch))


def test_a_replay_sees_weights_that_an_optimiser_changed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("data_dependent").to(device)
    x = tokens(layer, 2, 9)
    warm(layer, x)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1.5)
    assert_equal(step(layer, x), plainly(layer, x, monkeypatch))


def test_evaluation_is_recorded_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("data_dependent").to(device).eval()
    x = tokens(layer, 2, 9)
    with torch.no_grad():
        for _ in range(recorded.AFTER + 2):
            y = layer(x)
        monkeypatch.setattr(recorded, "LARGEST", 0)
        assert torch.equal(y, layer(x))


def test_a_recording_made_in_inference_mode_serves_training_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make("data_dependent").to(device).eval()
    x = tokens(layer, 2, 9)
    with torch.inference_mode():
        for _ in range(recorded.AFTER + 1):
            layer(x)
    (recording,) = recorded.RECORDINGS.table.values()
    assert isinstance(recording, recorded.Recording)
    assert not any(t.requires_grad or t.is_inference() for t in recording.held if t is not None)
    x.requires_grad_()
    (found,) = torch.autograd.grad(layer(x).square().sum(), x)
    monkeypatch.setattr(recorded, "LARGEST", 0)
    assert torch.equal(found, torch.autograd.grad(layer(x).square().sum(), x)[0])


@pytest.mark.parametrize("again", [False, True], ids=["checkpointed", "recompute"])
def test_a_pass_that_is_repeated_on_the_way_back_goes_the_way_it_went(
    device: torch.device, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that came between the two passes would save other tensors, which checkpointing refuses."""
    layer = make("data_dependent", recompute=again).to(device)
    x = tokens(layer, 2, 9)
    expected = plainly(layer, x, monkeypatch)
    for _ in range(3):
        rows = x.clone().requires_grad_()
        y = layer(rows) if again else checkpoint(layer, rows, use_reentrant=False)
        loss = y.float().square().sum() + layer.objective.square().sum()
        assert_equal(backward(layer, rows, y, loss), expected)


def test_autocast_casts_into_the_recording(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        pytest.skip("autocast of the recorded path is that of a GPU")
    layer = make("data_dependent").to(device)
    x = tokens(layer, 2, 9)
    with torch.autocast("cuda", torch.bfloat16):
        warm(layer, x)
        found, expected = step(layer, x), plainly(layer, x, monkeypatch)
    assert found["y"].dtype == torch.bfloat16
    assert_equal(found, expected)


def test_the_unused_recording_goes_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST", 2)
    layer = make("data_dependent").to(device)
    for length in (5, 6, 7):
        for _ in range(recorded.AFTER + 1):
            step(layer, tokens(layer, 1, length))
    assert len(recorded.RECORDINGS.table) == 2


def test_lengths_that_never_repeat_record_nothing(device: torch.device) -> None:
    layer = make("data_dependent").to(device)
    for length in range(1, 4):
        step(layer, tokens(layer, 1, length))
    assert not any(isinstance(r, recorded.Recording) for r in recorded.RECORDINGS.table.values())
