"""Small eager calls as replays of CUDA graphs.

A step of a small layer is twenty launches, and from Python each costs more than its kernel runs. So a shape that comes
again is recorded: one graph forward, and one for the way back that forms everything again from x. Inputs and weights
are copied into the recording's own memory and results out of it, hence

- nothing outlives a call but x, which autograd keeps: calls may follow one another in any order, and what a recording
  holds is shared by all layers of that shape;
- weights may move (sharded, cast by autocast) without a new recording.

The same kernels run on the same numbers: results are those of the plain call, bit for bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ..layer import Attended, Objective, Weights
from ..modes import Mode
from ..once import once

LARGEST = 2**22  # numbers in x beyond which the GPU, not the host, sets the pace; 0 turns recording off
AFTER = 3  # calls of one shape before it is recorded: the first ones compile and tune
MOST = 16  # recordings at a time; the one unused for longest goes

Given = Sequence[Tensor | None]
Run = Callable[[Given], tuple[Tensor, Tensor | None]]


def capture(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """What `work` returned, and how to run it again on the same memory."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the way back is recorded from autograd's thread, and other threads may go on allocating.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        results = work()
    return results, graph.replay


_first: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}


def _pool() -> Any:
    """Recordings of one stream run one after the other, so what they need in between they share.

    A pool lives as long as one of its graphs: the first of a stream, of nothing, stays for that.
    """
    if _stream() not in _first:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
        _first[_stream()] = graph
    return _first[_stream()].pool()


def _stream() -> tuple[int, int]:
    device = torch.cuda.current_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


class Recording:
    """A layer's pass over one shape, forward and back, in memory of its own."""

    def __init__(self, run: Run, given: Given, dtypes: Sequence[torch.dtype | None]) -> None:
        self.run, self.lock, self.fills = run, threading.Lock(), 0
        # Its memory belongs to no graph and to no inference mode: calls of all kinds share it.
        with torch.inference_mode(False), torch.no_grad():
            self.held = [
                None if t is None else torch.empty(t.shape, dtype=kind, device=t.device)
                for t, kind in zip(given, dtypes, strict=True)
            ]
            self._fill(given)
            (self.y, self.j), self.forward_again = capture(lambda: run(self.held))
        self.back: tuple[Any, ...] | None = None

    def _fill(self, given: Given) -> None:
        pairs = [(h, t) for h, t in zip(self.held, given, strict=True) if h is not None and t is not None]
        torch._foreach_copy_([h for h, _ in pairs], [t for _, t in pairs])
        self.fills += 1

    def forward(self, given: Given) -> tuple[Tensor, Tensor | None, int]:
        """y, J, and by which of the fills they came."""
        with self.lock:
            self._fill(given)
            self.forward_again()
            return self.y.clone(), None if self.j is None else self.j.clone(), self.fills

    def backward(self, given: Given, grads: Sequence[Tensor], fill: int) -> list[Tensor | None]:
        """Gradients of everything given, from those of y and, where there is one, J."""
        with self.lock:
            if fill != self.fills:  # another pass has come between
                self._fill(given)
            if self.back is None:
                self.back = self._record_the_way_back(given, grads)
            incoming, of_x, packed, replay = self.back
            # One by one: they differ in type, and the many-at-once copy then takes a slower way than this.
            for held, grad in zip(incoming, grads, strict=True):
                held.copy_(grad)
            replay()
            found: list[Tensor | None] = [of_x.clone(), *[None] * (len(given) - 1)]
            copies = [flat.clone() for flat in packed.values()]
        for places, flat in zip(packed, copies, strict=True):
            parts = _unflatten_dense_tensors(flat, [t for i in places if (t := given[i]) is not None])
            for i, part in zip(places, parts, strict=True):
                found[i] = part
        return found

    def _outputs(self) -> list[Tensor]:
        return [t for t in (self.y, self.j) if t is not None]

    def _record_the_way_back(self, given: Given, grads: Sequence[Tensor]) -> tuple[Any, ...]:
        incoming = [torch.empty_like(t).copy_(g) for t, g in zip(self._outputs(), grads, strict=True)]
        kinds = {t.dtype for t in given[1:] if t is not None}
        groups = [tuple(i for i, t in enumerate(given) if i and t is not None and t.dtype == kind) for kind in kinds]

        def work() -> tuple[Tensor, dict[tuple[int, ...], Tensor]]:
            leaves = [None if h is None else h.detach().requires_grad_() for h in self.held]
            with torch.enable_grad():
                outputs = [t for t in self.run(leaves) if t is not None]
            wanted = {i: t for i, t in enumerate(leaves) if t is not None}
            # Weights that have no part in y and J, a √Λ without J for one, have a gradient of zero.
            of = torch.autograd.grad(
                outputs, list(wanted.values()), incoming, allow_unused=True, materialize_grads=True
            )
            each = dict(zip(wanted, of, strict=True))
            # All of one type end to end: they leave the recording in one copy.
            packed = {g: torch.cat([each[i].reshape(-1).to(given[i].dtype) for i in g]) for g in groups}  # type: ignore[union-attr]
            return each[0].to(given[0].dtype), packed  # type: ignore[union-attr]

        (of_x, packed), replay = capture(work)
        return incoming, of_x, packed, replay


class Replay(torch.autograd.Function):
    """A recording as autograd sees it; what it keeps is its inputs."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *given: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ctx.recording = recording
        ctx.save_for_backward(*given)
        y, j, ctx.fill = recording.forward(given)
        return y, j

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.recording.backward(ctx.saved_tensors, [g for g in grads if g is not None], ctx.fill)


class Recordings:
    """By what makes two calls alike; the least used goes first."""

    def __init__(self) -> None:
        self.table: OrderedDict[Hashable, Recording | int] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Recording]) -> Recording | None:
        """The recording, once the key has come often enough; None before."""
        entry = self.table.pop(key, 0)
        if isinstance(entry, int):
            entry = entry + 1 if entry < AFTER else make()
        self.table[key] = entry
        while len(self.table) > MOST:
            self.table.popitem(last=False)
        return None if isinstance(entry, int) else entry


RECORDINGS = Recordings()


def worthwhile(x: Tensor) -> bool:
    """Whether a call on x may be recorded."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda
    return plain and 0 < x.numel() <= LARGEST and not torch.cuda.is_current_stream_capturing()


def _watched() -> bool:
    """Somebody looks at what is saved for the way back, activation checkpointing for one.

    It makes the pass a second time and refuses one that saves other tensors, as the first pass from a recording would.
    The first versions of torch that serve here cannot say it: with them nothing is replayed.
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is None or hooks(True) is not None


def replayed(
    attention: Callable[..., Attended],
    x: Tensor,
    weights: Weights,
    mode: Mode,
    decay: Tensor | None,
    objective: Objective | None,
    dtype: torch.dtype,
) -> Attended | None:
    """The call `attention(x, weights, mode, …)` from its recording, or None while there is none.

    dtype: of the kernels; x and the weights are cast to it as they are copied.
    """
    if _watched():
        return None
    asked = None if objective is None else (objective.form, objective.trace)
    given = [x, *weights, decay, None if objective is None else objective.sqrt_lambda]
    kinds = [None if t is None else (t.shape, t.dtype) for t in given]
    key = (mode, dtype, asked, *_stream(), *kinds)

    def run(held: Given) -> tuple[Tensor, Tensor | None]:
        its_x, *its_weights, its_decay, root = held
        goal = None if objective is None or root is None else Objective(root, objective.form, objective.trace)
        result = attention(its_x, Weights(*its_weights), mode, decay=its_decay, objective=goal)  # type: ignore[arg-type]
        return result.y, result.objective

    def make() -> Recording:
        # γ and √Λ are parameters of the sums and of J, which stay wide: they keep their own types.
        dtypes = [dtype] * (1 + len(weights)) + [t.dtype if t is not None else None for t in given[-2:]]
        return Recording(run, given, dtypes)

    recording = RECORDINGS.get(key, make)
    if recording is None:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        return Attended(*Replay.apply(recording, *given))  # type: ignore[no-untyped-call]
    return Attended(*recording.forward(given)[:2])
