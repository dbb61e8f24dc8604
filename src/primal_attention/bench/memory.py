"""What a step needs: the peak on a GPU, and anywhere the bytes that the forward pass keeps for the backward pass."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from primal_attention.bench.step import Step


@dataclass(frozen=True)
class Memory:
    """In bytes. peak: the most that was allocated during a step, x, ∂y and the parameters included (GPU only).

    resident: what was there before the step, that is x, ∂y, the parameters and the libraries' own buffers.
    kept: storages that autograd holds between forward and backward, x included, parameters not.
    """

    kept: int
    peak: int | None = None
    resident: int | None = None


def measure(step: Step, device: torch.device) -> Memory:
    """Of an eager step. A CUDA graph's pool would count as used for as long as the graph lives: none may be alive."""
    step()  # compiles, tunes and allocates what stays
    kept = kept_bytes(step)
    if device.type != "cuda":
        return Memory(kept)
    free(device)
    step()  # the libraries take their workspaces back, outside the peak's count of what the layer does
    torch.cuda.synchronize(device)
    resident = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return Memory(kept, torch.cuda.max_memory_allocated(device), resident)


def kept_bytes(step: Step) -> int:
    """Each storage once, however many tensors look at it: a view of two columns keeps the whole alive."""
    parameters = {p.untyped_storage().data_ptr() for p in step.layer.parameters()}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.device == step.x.device:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # not t: a node that holds its own output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = step.forward()
    total = sum(size for address, size in storages.items() if address not in parameters)
    step.backward(outputs)
    return total


def free(device: torch.device) -> None:
    """Give back what earlier measurements left, so that the next one starts as if it were the first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:  # one per stream that ever multiplied, and each graph capture has its own stream
            clear()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


@contextlib.contextmanager
def refusing_too_much(device: torch.device) -> Iterator[None]:
    """On a CPU, make an allocation that cannot fit fail instead of having the process killed for it."""
    available = _available_bytes() if device.type == "cpu" else None
    if available is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    soft = _address_space() + int(0.9 * available)
    if before[1] != resource.RLIM_INFINITY:
        soft = min(soft, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _available_bytes() -> int | None:
    """What this process may still take, by the system and by its container; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else max(0, min(available, int(limit) - used))
    except (OSError, ValueError):
        return available


def _address_space() -> int:
    """Bytes of address space in use now."""
    import resource

    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
