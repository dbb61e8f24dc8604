"""A training step as one CUDA graph: forward, losses, backward, clipping, optimizer, averaged weights, sums.

The models here are small, and launched kernel by kernel their steps wait for the host. The first steps of each batch
shape run eagerly, then one is captured (`utils.cuda_graph`). From there on a step fills its inputs and the few numbers
that change (learning rate, the average's share) and replays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from primal_attention.nn.baselines.random_buffers import RandomBuffers
from primal_attention.nn.objective import primal_layers
from primal_attention.train.config import Recipe, require
from primal_attention.train.optimizer import average_share, set_learning_rate, update_average
from primal_attention.train.task import Batch, TrainingModule, precision_context
from primal_attention.utils.cuda_graph import Number, Recorder, rates_on_device

GROUP = 32  # batches that are gathered at once: for small models a gather costs as much as a step


def records_steps(recipe: Recipe, module: TrainingModule) -> bool:
    """Return True if a training runs through `RecordedStep`. With "on" it does on a CPU too, without recording."""
    config = recipe.trainer
    if config.graph == "off":
        return False
    needs = {
        "one device": config.devices == 1 and config.strategy == "auto",
        "trainer.accumulate 1": config.accumulate == 1,
        "a precision without loss scaling": config.precision != "16-mixed",
        "a module with the usual training_step": type(module).training_step is TrainingModule.training_step,
    }
    if config.graph == "on":
        for need, holds in needs.items():
            require(holds, f"trainer.graph on needs {need}: use --trainer.graph auto")
        return True
    wants_gpu = config.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    return wants_gpu and not config.deterministic and all(needs.values())


class RecordedStep(Recorder):
    """The steps of one training.

    Args:
        module: The model in training.
        optimizer: Made with `recordable` on a GPU.
        rate: Learning rate by step; None leaves it as it is.
    """

    def __init__(
        self,
        module: TrainingModule,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(module.device)
        self.module, self.optimizer, self.rate = module, optimizer, rate
        self.random = [m for m in module.model.modules() if isinstance(m, RandomBuffers) and m.redraw_every]
        self.rates: list[Number] = []
        self.share: Number | float = 0.0
        if self.on_gpu:
            if not hasattr(optimizer, "prepare"):
                self.rates = [Number(self.device) for _ in optimizer.param_groups]
            self.share = Number(self.device)

    def run(self, batches: list[Batch]) -> None:
        """Run one step for each batch."""
        with self.own_stream():
            for batch in batches:
                self._prepare()
                self.step(batch)
                self.module.global_step += 1
                self.module.count_step(batch)

    def _prepare(self) -> None:
        """Write the numbers of the next step to the device."""
        module = self.module
        if self.rate is not None:
            set_learning_rate(self.optimizer, self.rate(module.global_step))
        if hasattr(self.optimizer, "prepare"):
            self.optimizer.prepare()
        for number, group in zip(self.rates, self.optimizer.param_groups, strict=False):
            number.put(group["lr"])
        if module.averaged is not None:
            share = average_share(module.recipe.trainer.ema, module.global_step + 1)
            if isinstance(self.share, Number):
                self.share.put(share)
            else:
                self.share = share
        for layer in self.random:
            redraw_in_place(layer)

    def work(self, batch: Batch) -> None:
        module, config = self.module, self.module.recipe
        self.optimizer.zero_grad(set_to_none=True)
        with frozen_draws(self.random):
            # No autocast cache: a weight cast inside a capture is filled by replays only.
            with precision_context(config.trainer.precision, self.device, cache=False):
                parts = module.losses(batch)
            module.add_to_sums(parts)
            parts["loss"].backward()
            if config.optim.clip:
                weights = [p for group in self.optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(weights, config.optim.clip)
            with rates_on_device(self.optimizer, [rate.tensor for rate in self.rates]):
                self.optimizer.step()
            if module.averaged is not None:
                share = self.share.tensor if isinstance(self.share, Number) else self.share
                update_average(module.averaged, module.model, share)
        for layer in primal_layers(module.model).values():
            # The objective's graph would pin the stream that it was made on.
            layer._objective = None if layer.objective is None else layer.objective.detach()

    def steady(self) -> bool:
        return getattr(self.optimizer, "steady", True)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for layer in primal_layers(self.module.model).values():
            layer._objective = None


def redraw_in_place(layer: RandomBuffers) -> None:
    """Count a forward pass in training; new random buffers are copied into the tensors that recordings read."""
    before, draws = dict(layer.named_buffers(recurse=False)), layer.draws
    layer.count_forward()
    if layer.draws == draws:
        return
    for name, old in before.items():
        new = getattr(layer, name)
        if new is not old:
            setattr(layer, name, old.copy_(new))


@contextlib.contextmanager
def frozen_draws(layers: list[RandomBuffers]) -> Iterator[None]:
    """Keep layers from redrawing by themselves."""
    intervals = [layer.redraw_every for layer in layers]
    for layer in layers:
        layer.redraw_every = None
    try:
        yield
    finally:
        for layer, interval in zip(layers, intervals, strict=True):
            layer.redraw_every = interval
