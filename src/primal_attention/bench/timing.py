"""How long a step takes. On a GPU: replays of a CUDA graph between events; on a CPU: torch.utils.benchmark."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

GRAPH, EVENTS, HOST = "CUDA graph", "CUDA events, eager", "torch.utils.benchmark"
WARMUP = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: the median of `runs`, the distance between the quartiles, and how they were taken."""

    median: float
    iqr: float
    runs: int
    method: str
    note: str = ""


def measure(
    step: Callable[[], object], device: torch.device, *, eager: bool = False, repeats: int = 20, seconds: float = 0.5
) -> Timing:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _on_gpu(step, eager, repeats)
    return _on_cpu(step, seconds)


def _on_cpu(step: Callable[[], object], seconds: float) -> Timing:
    from torch.utils.benchmark import Timer

    step()  # the first call allocates, and compiles where there is something to compile
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    # A handful of runs at least, or the quartiles say nothing; slow steps have to do with fewer.
    once = timer.timeit(1).median
    found = timer.blocked_autorange(min_run_time=max(seconds, min(6 * once, 8 * seconds)))
    return Timing(found.median, found.iqr, len(found.times) * found.number_per_run, HOST)


def _on_gpu(step: Callable[[], object], eager: bool, repeats: int) -> Timing:
    # Capture demands a stream of its own, and whatever is set up on first use must be set up before it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if eager:
        return _between_events(step, repeats, EVENTS)
    step()  # once more outside that stream: the layer may still hold what the last step there left
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: the backward pass runs in autograd's own thread, whose first steps may allocate.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a layer does that a graph cannot hold: looking at the device, drawing seeds
        del graph
        gc.collect()
        torch.cuda.synchronize()
        _capture_nothing()
        first = error.__context__ or error  # what broke the capture, not what its end says about it
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        return _between_events(step, repeats, EVENTS, note=f"no CUDA graph: {reason}")
    graph.replay()
    return _between_events(graph.replay, repeats, GRAPH)


def _capture_nothing() -> None:
    """A capture that failed leaves the random generator thinking that it is still captured; one that ends mends it."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda").add_(1)


def _between_events(work: Callable[[], object], repeats: int, method: str, note: str = "") -> Timing:
    """Back to back without waiting, so that a fast host runs ahead and a slow one shows."""
    work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]
    return Timing(statistics.median(times), spread(times), repeats, method, note)


def spread(times: list[float]) -> float:
    """The distance between the quartiles."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return high - low
