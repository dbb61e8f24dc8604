"""One stage of a distillation: a short Lightning run that lowers an error over batches without labels.

Weights that start from nothing learn at the full rate, those trained before at a part of it; both rise over the first
tenth of the steps and fall along a cosine. The student is no part of Lightning's module: it stays where it is. A turn
of Lightning's loop is several steps (`fitting_steps`) on a GPU, since a turn costs the host as much as one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.convert.fitting_steps import Steps

NEW = ("w_e", "w_r", "sqrt_lambda", "score_proj", "decay_logit")
WARM_UP = 0.1
TURN = 20  # steps between two looks at the errors on a GPU, which each look waits for


def fit(
    chosen: nn.Module,
    allowed: Mapping[nn.Parameter, bool],
    data: Iterable[Any],
    error: Callable[[Any], Tensor],
    steps: int,
    *,
    lr: float,
    kept_rate: Callable[[nn.Parameter], float],
    what: str,
    precision: str = "32-true",
    graph: bool = True,
    progress: bool = True,
) -> list[float]:
    """Train those parameters of `chosen` that are allowed to learn; the error at every step.

    An error that is not finite is a ValueError, and the weights are then what they were before the stage.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise ValueError(f"precision must be '32-true' or 'bf16-mixed' (got {precision!r})")
    if steps < 1:
        return []
    groups: dict[float, list[nn.Parameter]] = {}  # by the highest rate
    for name, parameter in chosen.named_parameters():
        new = any(part in NEW for part in name.split("."))
        top = lr if new else lr * kept_rate(parameter)
        if allowed.get(parameter) and top > 0:
            parameter.requires_grad_(True)
            groups.setdefault(top, []).append(parameter)
    if not groups:
        raise ValueError(f"nothing can learn {what}: every weight has requires_grad False or rate 0")
    before = {p: p.detach().clone() for group in groups.values() for p in group}
    rates = [rate(step, steps) for step in range(steps)]
    try:
        work = Steps(chosen, groups, error, rates, half=precision == "bf16-mixed", graph=graph)
        return _run(work, repeated(data, steps), steps, what, progress)
    except NotFiniteError as problem:
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)
        raise ValueError(str(problem)) from None
    finally:
        for parameter in before:
            parameter.grad = None


class NotFiniteError(ArithmeticError):
    """The error of a step is infinite or no number."""


def rate(step: int, steps: int) -> float:
    """The share of the highest learning rate at a step counted from 0."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / max(1, steps - warm + 1)))


def repeated(data: Iterable[Any], steps: int) -> Iterator[Any]:
    """`steps` batches, from the beginning again where the data end."""
    done = 0
    while done < steps:
        before = done
        for batch in data:
            yield batch
            done += 1
            if done == steps:
                return
        if done == before:
            raise ValueError(
                f"data gave no batch after {done} of {steps} steps: give a list or a loader, to read again"
            )


def _run(work: Steps, batches: Iterator[Any], steps: int, what: str, progress: bool) -> list[float]:
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.environments import LightningEnvironment
    except ImportError as missing:
        raise ImportError("distill needs lightning: pip install 'primal-attention[train]'") from missing
    device, turn = work.device, TURN if work.on_gpu else 1
    history: list[float] = []

    class Stage(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False  # the steps bring their optimiser along

        def training_step(self, number: int) -> None:
            coming = itertools.islice(batches, min(turn, steps - work.done))
            work.run(self.transfer_batch_to_device(batch, device, 0) for batch in coming)
            for value in work.losses(len(history)):
                history.append(value)
                if not math.isfinite(value):
                    raise NotFiniteError(
                        f"the error is no longer a finite number at step {len(history)} {what}: lower lr"
                    )
                show(history)

        def configure_optimizers(self) -> None:
            return None

    with _quiet(), _shown(steps, what, progress) as show:
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="gpu" if device.type == "cuda" else device.type,
            devices=[device.index or 0] if device.type == "cuda" else 1,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Stage(), train_dataloaders=range(-(-steps // turn)))
    return history


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning speaks about devices, loaders and loggers; none of it is about a stage."""
    logs = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [log.level for log in logs]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)


@contextlib.contextmanager
def _shown(steps: int, what: str, progress: bool) -> Iterator[Callable[[list[float]], None]]:
    """Ten lines, or a bar that moves ten times: a line per step would fill a log."""
    if not progress:
        yield lambda history: None
        return
    from primal_attention.utils.progress import Progress

    marks = sorted({max(1, steps * i // 10) for i in range(1, 11)})
    with Progress(len(marks), what) as bar:

        def show(history: list[float]) -> None:
            if len(history) in marks:
                bar.advance(f"{what}: step {len(history)} of {steps}, error {history[-1]:.4f}")

        yield show
