"""A whole training step as one CUDA graph: forward, losses, backward, clipping, optimiser, averaged weights, sums.

The models here are small, and started kernel by kernel their steps wait for the host. So the first steps of each batch
shape run as usual (they are steps of the training like any other), then one is recorded, and from there on a step is:
fill the inputs and the few numbers that change (learning rate, the average's share), replay. What a step draws at
random it draws anew in each replay. Where a step cannot be recorded, or on a CPU, the same steps run kernel by kernel.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.engine.config import Recipe, require
from primal_attention.engine.module import Batch, TrainingModule, average_share, precision_context, update_average
from primal_attention.nn.objective import primal_layers
from primal_attention.nn.rivals.draws import RandomBuffers

GROUP = 32  # steps in one turn of Lightning's loop, which costs as much as a few of them
WARMUP = 3  # steps of a shape before it is recorded: what is set up on first use must be set up before
SHAPES = 4  # further shapes run as usual; each recording holds the memory of a step


def suits(recipe: Recipe, module: TrainingModule) -> bool:
    """Whether a training's steps go through `RecordedStep`. "on" also means it on a CPU, where nothing is recorded."""
    config = recipe.trainer
    if config.graph == "off":
        return False
    reasons = {
        "one device": config.devices == 1 and config.strategy == "auto",
        "trainer.accumulate 1": config.accumulate == 1,
        "a precision without loss scaling": config.precision != "16-mixed",
        "a module with the usual training_step": type(module).training_step is TrainingModule.training_step,
    }
    if config.graph == "on":
        for reason, holds in reasons.items():
            require(holds, f"trainer.graph on needs {reason}: use --trainer.graph auto")
        return True
    wants_gpu = config.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    return wants_gpu and not config.deterministic and all(reasons.values())


class Recording(NamedTuple):
    """A graph and the tensors that it reads its batch from."""

    graph: Any
    inputs: tuple[Tensor, ...]

    def replay(self, batch: Batch) -> None:
        for held, given in zip(self.inputs, batch, strict=True):
            held.copy_(given, non_blocking=True)
        self.graph.replay()


class RecordedStep:
    """The steps of one training, by batch shape."""

    def __init__(self, module: TrainingModule, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.device = next(module.model.parameters()).device
        self.recordings: dict[Any, Recording] = {}
        self.seen: dict[Any, int] = {}
        self.on_gpu = self.device.type == "cuda"
        self.records = self.on_gpu
        self.random = [m for m in module.model.modules() if isinstance(m, RandomBuffers) and m.redraw_every]
        self.rates: list[Tensor] = []
        self.share: Tensor | float = 0.0
        if self.on_gpu:
            self.stream = torch.cuda.Stream(self.device)
            self.pool = torch.cuda.graph_pool_handle()
            if not hasattr(optimizer, "prepare"):
                self.rates = [torch.zeros((), device=self.device) for _ in optimizer.param_groups]
            self.share = torch.zeros((), device=self.device)

    def run(self, batches: list[Batch]) -> None:
        """One step for each batch."""
        with self._beside():
            for batch in batches:
                self._prepare()
                recording = self._recording(batch)
                if recording is None:
                    self.work(batch)
                else:
                    recording.replay(batch)
                self._finish(batch)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """All steps on one stream of their own: a recording must not depend on what another stream has begun."""
        if not self.on_gpu:
            yield
            return
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            yield
        usual.wait_stream(self.stream)

    def _prepare(self) -> None:
        """The numbers of the coming step, where the step reads them."""
        if hasattr(self.optimizer, "prepare"):
            self.optimizer.prepare()
        for held, group in zip(self.rates, self.optimizer.param_groups, strict=False):
            held.fill_(group["lr"])
        if self.module.averaged is not None:
            share = average_share(self.module.recipe.trainer.ema, self.module.global_step + 1)
            self.share = self.share.fill_(share) if isinstance(self.share, Tensor) else share
        for layer in self.random:
            redraw_in_place(layer)

    def work(self, batch: Batch) -> None:
        """The step itself: everything that a replay repeats."""
        module, config = self.module, self.module.recipe
        self.optimizer.zero_grad(set_to_none=True)
        # Lightning's autocast is around all of this, and the backward pass and the optimiser must not stand in it. A
        # weight cast inside a recording must not be kept for later: only a replay fills it.
        with torch.autocast(self.device.type, enabled=False), frozen_draws(self.random):
            with precision_context(config.trainer.precision, self.device, cache=False):
                parts = module.losses(batch)
            module.add_to_sums(parts)
            parts["loss"].backward()
            if config.optim.clip:
                weights = [p for group in self.optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(weights, config.optim.clip)
            with self._rates_on_device():
                self.optimizer.step()
            if module.averaged is not None:
                update_average(module.averaged, module.model, self.share)
        for layer in primal_layers(module.model).values():
            # The objective holds the step's graph, which holds on to the stream that it was made on.
            layer._objective = None if layer.objective is None else layer.objective.detach()

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """The optimiser sees its learning rates as tensors during a step; schedules and checkpoints see numbers."""
        groups = self.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, held in zip(groups, self.rates, strict=False):
            group["lr"] = held
        try:
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number

    def _finish(self, batch: Batch) -> None:
        module = self.module
        progress = module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        schedule: Any = module.lr_schedulers()
        if schedule is not None:
            schedule.step()
        module.count_step(batch)

    # Recording

    def _recording(self, batch: Batch) -> Recording | None:
        """The recording of the batch's shape, made now if it is time for it; None runs the step as usual."""
        if not self.records:
            return None
        shape = tuple((tuple(t.shape), t.dtype) for t in batch)
        if shape not in self.recordings:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.seen[shape] <= WARMUP or len(self.recordings) >= SHAPES:
                return None
            try:
                self.recordings[shape] = self._record(batch)
            except Exception as error:  # whatever a model does that a graph cannot hold: looking at the device
                self._give_up(error)
                return None
        return self.recordings[shape]

    def _record(self, batch: Batch) -> Recording:
        inputs = tuple(t.clone() for t in batch)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be pinning the next batches, and the backward pass has threads of its own.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            self.work(inputs)
        return Recording(graph, inputs)

    def _give_up(self, error: Exception) -> None:
        """Nothing of a failed recording has run: clear what it left on the host, and go on without recordings."""
        first = error.__context__ or error  # what broke the recording, not what its end says about it
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=2)
        self.optimizer.zero_grad(set_to_none=True)
        for layer in primal_layers(self.module.model).values():
            layer._objective = None
        del first
        gc.collect()
        torch.cuda.synchronize(self.device)
        # A broken capture leaves the random generator thinking that it is still captured; one that ends mends it.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros((), device=self.device).add_(1)
        self.recordings.clear()
        self.records = False


def redraw_in_place(layer: RandomBuffers) -> None:
    """Count a training forward; where the random buffers are due, new numbers go into the tensors that are there."""
    before, draws = dict(layer.named_buffers(recurse=False)), layer.draws
    layer.count_forward()
    if layer.draws == draws:
        return
    for name, held in before.items():
        drawn = getattr(layer, name)
        if drawn is not held:
            setattr(layer, name, held.copy_(drawn))


@contextlib.contextmanager
def frozen_draws(layers: list[RandomBuffers]) -> Iterator[None]:
    """Layers do not redraw by themselves meanwhile."""
    every = [layer.redraw_every for layer in layers]
    for layer in layers:
        layer.redraw_every = None
    try:
        yield
    finally:
        for layer, number in zip(layers, every, strict=True):
            layer.redraw_every = number
