"""Record a training step as a CUDA graph, one graph per batch shape, and replay it.

The first steps of a shape run eagerly and count as steps of the training. Then one step is captured. From there on a
step copies its batch into the graph's inputs and replays. Random numbers are drawn anew in each replay. If a step
cannot be captured, or on a CPU, the same work runs eagerly.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARMUP = 3  # eager steps per shape: whatever is set up on first use must exist before the capture
SHAPES = 4  # graphs per training; each one holds the memory of a step, and further shapes run eagerly


def parts(batch: Any) -> tuple[Sequence[Any], tuple[str, ...] | bool]:
    """Return the tensors of a batch (a tensor, a tuple or a dict) and the structure that `whole` needs."""
    if isinstance(batch, Tensor):
        return (batch,), False
    return (tuple(batch.values()), tuple(batch)) if isinstance(batch, Mapping) else (batch, True)


def whole(tensors: Sequence[Tensor], structure: tuple[str, ...] | bool) -> Any:
    """Rebuild a batch from its tensors; the inverse of `parts`."""
    if isinstance(structure, bool):
        return tuple(tensors) if structure else tensors[0]
    return dict(zip(structure, tensors, strict=True))


class Number:
    """A scalar on the device that a captured step reads. It is written only when its value changes."""

    def __init__(self, device: torch.device) -> None:
        self.tensor, self.value = torch.zeros((), device=device), 0.0

    def put(self, value: float) -> None:
        if value != self.value:
            self.tensor.fill_(value)
            self.value = value


class Recording(NamedTuple):
    """A captured graph and its input tensors."""

    graph: Any
    inputs: Sequence[Tensor]

    def replay(self, batch: Sequence[Tensor]) -> None:
        for target, source in zip(self.inputs, batch, strict=True):
            target.copy_(source, non_blocking=True)
        self.graph.replay()


def recordable(device: torch.device) -> bool:
    return device.type == "cuda"


def capture(work: Callable[[], Any], stream: Any, pool: Any = None) -> Any:
    """Capture a function as a CUDA graph. Nothing has run yet when this returns."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may pin the next batches, and the backward pass has threads of its own.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


class Recorder:
    """The recorded steps of one training, by batch shape. Subclasses define the step in `work`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: dict[Any, Recording] = {}
        self.seen: dict[Any, int] = {}
        self.on_gpu = device.type == "cuda"
        self.records = recordable(device)
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def work(self, batch: Any) -> None:
        """Run one step: everything that a replay repeats."""
        raise NotImplementedError

    def steady(self) -> bool:
        """Return True if all later steps launch the kernels of this one. Only such a step is recorded."""
        return True

    def clear(self) -> None:
        """Drop host state that an unfinished capture left behind."""

    def step(self, batch: Any) -> None:
        """Run one step, replayed or eager, inside `own_stream`."""
        recording = self._recording(batch) if self.records else None
        if recording is None:
            self.work(batch)
        else:
            recording.replay(parts(batch)[0])

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Run all steps on one stream of their own, because a capture must not depend on work of another stream."""
        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def _recording(self, batch: Any) -> Recording | None:
        """Return the recording of the batch's shape, captured now if it is due; None for an eager step."""
        tensors, structure = parts(batch)
        if not all(isinstance(t, Tensor) for t in tensors):
            return None
        shape = (structure, *((tuple(t.shape), t.dtype) for t in tensors))
        if shape not in self.recordings:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.seen[shape] <= WARMUP or len(self.recordings) >= SHAPES or not self.steady():
                return None
            try:
                self.recordings[shape] = self._record(batch)
            except Exception as error:  # for example a model that reads a value from the device
                self._give_up(error)
                return None
        return self.recordings[shape]

    def _record(self, batch: Any) -> Recording:
        tensors, structure = parts(batch)
        inputs = [t.to(self.device, copy=True) for t in tensors]
        static_batch = whole(inputs, structure)
        return Recording(capture(lambda: self.work(static_batch), self.stream, self.pool), inputs)

    def _give_up(self, error: Exception) -> None:
        """Continue with eager steps. Nothing of a failed capture has run; clear what it left on the host."""
        first = error.__context__ or error  # the cause, not the error about the broken capture
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=2)
        self.clear()
        del first
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            # A broken capture leaves the random generator in capture mode; a complete one resets it.
            capture(lambda: torch.zeros((), device=self.device).add_(1), self.stream)
        self.recordings.clear()
        self.records = False


@contextlib.contextmanager
def rates_on_device(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Give the optimizer its learning rates as tensors. Outside the context they are floats."""
    groups = optimizer.param_groups
    floats = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=False):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate in zip(groups, floats, strict=True):
            group["lr"] = rate
