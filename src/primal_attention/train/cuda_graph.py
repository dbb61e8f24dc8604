"""A whole training step as one CUDA graph: forward, losses, backward, clipping, optimiser, averaged weights, sums.

The models here are small, and started kernel by kernel their steps wait for the host. So the first steps of each batch
shape run as usual, then one is recorded (`recording`), and from there on a step is: fill the inputs and the few numbers
that change (learning rate, the average's share), replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from primal_attention.nn.baselines.random_buffers import RandomBuffers
from primal_attention.nn.objective import primal_layers
from primal_attention.train.config import Recipe, require
from primal_attention.train.module import Batch, TrainingModule, precision_context
from primal_attention.train.optimizer import average_share, update_average
from primal_attention.train.recording import Number, Recorder, rates_on_device

GROUP = 32  # steps in one turn of Lightning's loop, which costs as much as a few of them


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


class RecordedStep(Recorder):
    """The steps of one of the engine's trainings."""

    def __init__(self, module: TrainingModule, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(next(module.model.parameters()).device)
        self.module, self.optimizer = module, optimizer
        self.random = [m for m in module.model.modules() if isinstance(m, RandomBuffers) and m.redraw_every]
        self.rates: list[Number] = []
        self.share: Number | float = 0.0
        if self.on_gpu:
            if not hasattr(optimizer, "prepare"):
                self.rates = [Number(self.device) for _ in optimizer.param_groups]
            self.share = Number(self.device)

    def run(self, batches: list[Batch]) -> None:
        """One step for each batch."""
        with self.beside():
            for batch in batches:
                self._prepare()
                self.step(batch)
                self._finish(batch)

    def _prepare(self) -> None:
        """The numbers of the coming step, where the step reads them."""
        if hasattr(self.optimizer, "prepare"):
            self.optimizer.prepare()
        for held, group in zip(self.rates, self.optimizer.param_groups, strict=False):
            held.put(group["lr"])
        if self.module.averaged is not None:
            share = average_share(self.module.recipe.trainer.ema, self.module.global_step + 1)
            if isinstance(self.share, Number):
                self.share.put(share)
            else:
                self.share = share
        for layer in self.random:
            redraw_in_place(layer)

    def work(self, batch: Batch) -> None:
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
            with rates_on_device(self.optimizer, [rate.held for rate in self.rates]):
                self.optimizer.step()
            if module.averaged is not None:
                share = self.share.held if isinstance(self.share, Number) else self.share
                update_average(module.averaged, module.model, share)
        for layer in primal_layers(module.model).values():
            # The objective holds the step's graph, which holds on to the stream that it was made on.
            layer._objective = None if layer.objective is None else layer.objective.detach()

    def _finish(self, batch: Batch) -> None:
        module = self.module
        progress = module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        schedule: Any = module.lr_schedulers()
        if schedule is not None:
            schedule.step()
        module.count_step(batch)

    def steady(self) -> bool:
        return getattr(self.optimizer, "steady", True)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for layer in primal_layers(self.module.model).values():
            layer._objective = None


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
