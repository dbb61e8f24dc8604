"""Steps as CUDA graphs, one for each batch shape: what a recording needs, whatever the step does.

The first steps of a shape run as usual (they are steps of the training like any other), then one is recorded, and from
there on a step is: fill the inputs, replay. What a step draws at random it draws anew in each replay. Where a step
cannot be recorded, or on a CPU, the same work runs kernel by kernel.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARMUP = 3  # steps of a shape before it is recorded: what is set up on first use must be set up before
SHAPES = 4  # further shapes run as usual; each recording holds the memory of a step


def parts(batch: Any) -> tuple[Sequence[Any], tuple[str, ...] | bool]:
    """The tensors of a batch (a tensor, a tuple of them or a dict), and what `whole` puts them together by."""
    if isinstance(batch, Tensor):
        return (batch,), False
    return (tuple(batch.values()), tuple(batch)) if isinstance(batch, Mapping) else (batch, True)


def whole(tensors: Sequence[Tensor], form: tuple[str, ...] | bool) -> Any:
    if isinstance(form, bool):
        return tuple(tensors) if form else tensors[0]
    return dict(zip(form, tensors, strict=True))


class Number:
    """A number on the device that a recorded step reads. Most stay for many steps: it is written where it changes."""

    def __init__(self, device: torch.device) -> None:
        self.held, self.value = torch.zeros((), device=device), 0.0

    def put(self, value: float) -> None:
        if value != self.value:
            self.held.fill_(value)
            self.value = value


class Recording(NamedTuple):
    """A graph and the tensors that it reads its batch from."""

    graph: Any
    inputs: Sequence[Tensor]

    def replay(self, batch: Sequence[Tensor]) -> None:
        for held, given in zip(self.inputs, batch, strict=True):
            held.copy_(given, non_blocking=True)
        self.graph.replay()


def recordable(device: torch.device) -> bool:
    return device.type == "cuda"


def capture(work: Callable[[], Any], stream: Any, pool: Any = None) -> Any:
    """A graph of the work, of which nothing has run yet; `replay` runs it."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may be pinning the next batches, and the backward pass has threads of its own.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


class Recorder:
    """The steps of one training, by batch shape. Subclasses say what a step does (`work`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: dict[Any, Recording] = {}
        self.seen: dict[Any, int] = {}
        self.on_gpu = device.type == "cuda"
        self.records = recordable(device)
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def work(self, batch: Any) -> None:
        """The step itself: everything that a replay repeats."""
        raise NotImplementedError

    def steady(self) -> bool:
        """Whether coming steps do what this one does, other numbers aside: only such a step is recorded."""
        return True

    def clear(self) -> None:
        """Drop what a step that was not finished left on the host."""

    def step(self, batch: Any) -> None:
        """One step, replayed or run; within `beside`."""
        if not self.records:
            self.work(batch)
            return
        recording = self._recording(batch)
        if recording is None:
            self.work(batch)
        else:
            recording.replay(parts(batch)[0])

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """All steps on one stream of their own: a recording must not depend on what another stream has begun."""
        if self.stream is None:
            yield
            return
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            usual.wait_stream(self.stream)

    def _recording(self, batch: Any) -> Recording | None:
        """The recording of the batch's shape, made now if it is time for it; None runs the step as usual."""
        tensors, form = parts(batch)
        if not all(isinstance(t, Tensor) for t in tensors):
            return None
        shape = (form, *((tuple(t.shape), t.dtype) for t in tensors))
        if shape not in self.recordings:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.seen[shape] <= WARMUP or len(self.recordings) >= SHAPES or not self.steady():
                return None
            try:
                self.recordings[shape] = self._record(batch)
            except Exception as error:  # whatever a model does that a graph cannot hold: looking at the device
                self._give_up(error)
                return None
        return self.recordings[shape]

    def _record(self, batch: Any) -> Recording:
        tensors, form = parts(batch)
        inputs = [t.to(self.device, copy=True) for t in tensors]
        held = whole(inputs, form)
        return Recording(capture(lambda: self.work(held), self.stream, self.pool), inputs)

    def _give_up(self, error: Exception) -> None:
        """Nothing of a failed recording has run: clear what it left on the host, and go on without recordings."""
        first = error.__context__ or error  # what broke the recording, not what its end says about it
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=2)
        self.clear()
        del first
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            # A broken capture leaves the random generator thinking that it is still captured; one that ends mends it.
            capture(lambda: torch.zeros((), device=self.device).add_(1), self.stream)
        self.recordings.clear()
        self.records = False


@contextlib.contextmanager
def rates_on_device(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """The optimiser sees its learning rates as tensors meanwhile; schedules and checkpoints see numbers."""
    groups = optimizer.param_groups
    numbers = [group["lr"] for group in groups]
    for group, held in zip(groups, rates, strict=False):
        group["lr"] = held
    try:
        yield
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number
