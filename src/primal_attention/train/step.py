"""One training step: forward, losses, backward, clipping, optimizer, averaged weights; on one GPU as a CUDA graph.

The models here are small, and launched kernel by kernel their steps wait for the host. The first steps of each batch
shape run eagerly and count as steps of the training. Then one step is captured. From there on a step fills the graph's
inputs and the few numbers that change (learning rate, the average's share) and replays. Random numbers are drawn anew
in each replay. If a step cannot be captured, the same work runs eagerly.
"""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines.random_buffers import RandomBuffers, drawn_buffers
from primal_attention.nn.objective import primal_layers
from primal_attention.train.config import OptimConfig, TrainerConfig, require
from primal_attention.train.task import Batch, TrainingModule, precision_context

WARMUP = 3  # eager steps per shape: whatever is set up on first use must exist before the capture
GATHERED = 32  # batches that are gathered at once: for small models a gather costs as much as a step
Pairs = list[tuple[Tensor, Tensor]]
SHAPES = 4  # graphs per training; each one holds the memory of a step, and further shapes run eagerly


def make_optimizer(model: nn.Module, config: OptimConfig, *, recordable: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe. Weight decay applies to matrices only, not to biases, norms and other vectors.

    Args:
        model: Its trainable parameters are optimized.
        config: Name and settings.
        recordable: Steps can be captured in a CUDA graph.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    betas = (0.9, config.beta2)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    options = {"capturable": True, "foreach": config.name == "radam"} if recordable else {}
    is_plain_cpu = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in weights)  # no shards
    if config.name != "radam" and (recordable or is_plain_cpu):
        options["fused"] = True
    optimizer = kinds[config.name](groups, lr=config.lr, betas=betas, eps=config.eps, **options)
    # The eager steps before the capture are intended; torch would warn about them.
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return optimizer


def learning_rate(config: OptimConfig, total: int, warmup_total: int = 0) -> Callable[[int], float]:
    """Return the learning rate as a function of the step.

    Args:
        config: Peak rate and schedule.
        total: Steps of the training.
        warmup_total: Steps that `warmup` is a part of, if not `total`: those of a run before it was extended.
    """
    warmup = max(1, round((warmup_total or total) * config.warmup))

    def shape(part: float) -> float:
        return part if config.schedule == "onecycle-linear" else (1 - math.cos(math.pi * part)) / 2

    def factor(step: int) -> float:
        if config.schedule == "constant":
            return 1.0
        if config.schedule == "warmup":
            return min(1.0, (step + 1) / warmup)
        if config.schedule == "inverse-sqrt":
            return min((step + 1) / warmup, math.sqrt(warmup / max(step + 1, warmup)))
        if step < warmup:  # one cycle: from 1/25 of the peak
            return 1 / 25 + (1 - 1 / 25) * shape(step / warmup)
        return 1 - shape(min(1.0, (step - warmup) / max(1, total - warmup)))

    return lambda step: config.lr * factor(step)


def records_steps(config: TrainerConfig, device: torch.device) -> bool:
    """Return True if the steps of a training are recorded."""
    if config.graph == "off":
        return False
    needs = {
        "one device": config.devices == 1 and config.strategy == "auto",
        "a precision without loss scaling": config.precision != "16-mixed",
    }
    if config.graph == "on":
        for need, holds in needs.items():
            require(holds, f"trainer.graph on needs {need}: use --trainer.graph auto")
    return device.type == "cuda" and all(needs.values())


class Recording(NamedTuple):
    """A captured graph and its input tensors."""

    graph: Any
    inputs: list[Tensor]

    def replay(self, batch: Batch) -> None:
        for target, source in zip(self.inputs, batch, strict=True):
            target.copy_(source, non_blocking=True)
        self.graph.replay()


class TrainingStep:
    """The steps of one training, recorded by batch shape.

    Args:
        fabric: For the backward pass, clipping and the update, which scale the loss in 16-mixed precision.
        module: The model in training.
        wrapped: What is called: the module, or DDP around it.
        optimizer: Made with `recordable` if steps are recorded.
        rate: Learning rate by step.
        records: Record the steps; needs a GPU.
    """

    def __init__(
        self,
        fabric: Any,
        module: TrainingModule,
        wrapped: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        *,
        records: bool,
    ) -> None:
        self.fabric, self.module, self.wrapped = fabric, module, wrapped
        self.optimizer, self.rate, self.device = optimizer, rate, module.device
        self.on_gpu = self.records = records
        self.averages: tuple[Pairs, Pairs] | None = None
        self.recordings: dict[Any, Recording] = {}
        self.seen: dict[Any, int] = {}
        layers = [layer for layer in module.model.modules() if isinstance(layer, RandomBuffers)]
        self.redraws = {layer: layer.redraw_every for layer in layers if layer.redraw_every is not None}
        for layer in self.redraws:  # `_prepare` redraws, because compiled and captured layers do not
            layer.redraw_every = None
        # What changes between steps; on a GPU in tensors, which a captured step reads.
        self.lr: Tensor | float = 0.0
        self.share: Tensor | float = 0.0
        if self.on_gpu:
            self.stream = torch.cuda.Stream(self.device)
            self.pool = torch.cuda.graph_pool_handle()
            self.lr, self.share = (torch.zeros((), device=self.device) for _ in range(2))

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Run all steps on one stream of their own, because a capture must not depend on work of another stream."""
        if not self.on_gpu:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def run(self, batch: Batch) -> None:
        """Run one step, replayed or eager, inside `own_stream`."""
        self._prepare()
        recording = self._recording(batch) if self.records else None
        if recording is None:
            self.work(batch)
        else:
            recording.replay(batch)
        self.module.global_step += 1
        self.module.count_step()

    def _prepare(self) -> None:
        """Set the numbers of the next step."""
        module, config = self.module, self.module.recipe
        lr, step = self.rate(module.global_step), module.global_step + 1
        share = 1 - min(config.trainer.ema, (1 + step) / (10 + step))  # larger at first: discard the initial weights
        if isinstance(self.lr, Tensor) and isinstance(self.share, Tensor):
            self.lr.fill_(lr)
            self.share.fill_(share)
        else:
            self.lr, self.share = lr, share
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        for layer, every in self.redraws.items():
            redraw_in_place(layer, every)

    def work(self, batch: Batch) -> None:
        """Run one step eagerly: everything that a replay repeats."""
        module, fabric, config = self.module, self.fabric, self.module.recipe
        self.optimizer.zero_grad(set_to_none=True)
        # No autocast cache: a weight cast inside a capture is filled by replays only.
        with precision_context(config.trainer.precision, self.device, cache=False):
            loss = self.wrapped(batch)
        fabric.backward(loss)
        if config.optim.clip:
            fabric.clip_gradients(module, self.optimizer, max_norm=config.optim.clip, error_if_nonfinite=False)
        fabric.strategy.optimizer_step(self.optimizer)
        if module.averaged is not None:
            if self.averages is None:
                self.averages = pair_states(module.averaged, module.model)
            update_average(*self.averages, self.share)
        for layer in primal_layers(module.model).values():
            # The objective's graph would pin the stream that it was made on.
            layer._objective = None if layer.objective is None else layer.objective.detach()

    def _recording(self, batch: Batch) -> Recording | None:
        """Return the recording of the batch's shape, captured now if it is due; None for an eager step."""
        shape = tuple((tuple(t.shape), t.dtype) for t in batch)
        if shape not in self.recordings:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.seen[shape] <= WARMUP or len(self.recordings) >= SHAPES:
                return None
            try:
                inputs = [t.to(self.device, copy=True) for t in batch]
                self.recordings[shape] = Recording(self._capture(lambda: self.work(tuple(inputs))), inputs)
            except Exception as error:  # for example a model that reads a value from the device
                self._give_up(error)
                return None
        return self.recordings[shape]

    def _capture(self, work: Callable[[], Any]) -> Any:
        """Capture a function as a CUDA graph. Nothing has run yet when this returns."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may pin the next batches, and the backward pass has threads of its own.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph

    def _give_up(self, error: Exception) -> None:
        """Continue with eager steps. Nothing of a failed capture has run; clear what it left on the host."""
        first = error.__context__ or error  # the cause, not the error about the broken capture
        reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=2)
        del first
        self.recordings.clear()
        self.records = False
        self.optimizer.zero_grad(set_to_none=True)
        for layer in primal_layers(self.module.model).values():
            layer._objective = None
        gc.collect()
        torch.cuda.synchronize(self.device)
        # A broken capture leaves the random generator in capture mode; a complete one resets it.
        self.pool = torch.cuda.graph_pool_handle()
        self._capture(lambda: torch.zeros((), device=self.device).add_(1))


def redraw_in_place(layer: RandomBuffers, every: int) -> None:
    """Count a forward pass in training; new random buffers are copied into the tensors that recordings read."""
    before = dict(layer.named_buffers(recurse=False))
    layer.redraw_every = every
    layer.count_forward()
    layer.redraw_every = None
    for name, old in before.items():
        new = getattr(layer, name)
        if new is not old:
            setattr(layer, name, old.copy_(new))


def pair_states(averaged: nn.Module, model: nn.Module) -> tuple[Pairs, Pairs]:
    """Return pairs (average, new) of what is averaged, and of what is copied: counts and random draws.

    A mean of independent draws is not a draw.
    """
    drawn = drawn_buffers(model)
    means, copies = Pairs(), Pairs()
    for (name, mean), new in zip(averaged.state_dict().items(), model.state_dict().values(), strict=True):
        (copies if name in drawn or not mean.is_floating_point() else means).append((mean, new))
    return means, copies


@torch.no_grad()
def update_average(means: Pairs, copies: Pairs, share: float | Tensor) -> None:
    """Move the averages towards the new values by `share`, which is a tensor in captured steps."""
    for copy, new in copies:
        copy.copy_(new)
    if not isinstance(share, Tensor):
        for mean, new in means:
            mean.lerp_(new, share)
        return
    averages, news = ([pair[i] for pair in means] for i in (0, 1))
    steps = torch._foreach_sub(news, averages)
    torch._foreach_mul_(steps, share)
    torch._foreach_add_(averages, steps)
