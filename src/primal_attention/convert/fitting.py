"""One stage of a distillation: a short Lightning run that lowers an error over batches without labels.

Weights that start from nothing learn at the full rate, those that were trained before at 0.3 of it; both rise over the
first tenth of the steps and fall along a cosine. The student is no part of Lightning's module: it stays where it is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NEW = ("w_e", "w_r", "sqrt_lambda", "score_proj", "decay_logit")
KEPT_RATE = 0.3
WARM_UP = 0.1
CLIP = 1.0
LOOKED_AT = 20  # steps between two looks at the errors: each look waits for the device


def fit(
    chosen: nn.Module,
    allowed: Mapping[nn.Parameter, bool],
    data: Iterable[Any],
    error: Callable[[Any], Tensor],
    steps: int,
    *,
    lr: float,
    what: str,
    precision: str = "32-true",
    progress: bool = True,
) -> list[float]:
    """Train those parameters of `chosen` that are allowed to learn; the error at every step.

    An error that is not finite is a ValueError, and the weights are then what they were before the stage.
    """
    if steps < 1:
        return []
    new: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in chosen.named_parameters():
        if allowed.get(parameter):
            parameter.requires_grad_(True)
            (new if any(part in NEW for part in name.split(".")) else kept).append(parameter)
    before = [p.detach().clone() for p in (*new, *kept)]
    try:
        return _run(new, kept, data, error, steps, lr, what, precision, progress)
    except NotFiniteError as problem:
        with torch.no_grad():
            for parameter, value in zip((*new, *kept), before, strict=True):
                parameter.copy_(value)
        raise ValueError(str(problem)) from None
    finally:
        for parameter in (*new, *kept):
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


class _Repeated:
    """`repeated`, with the length that spares Lightning from reading ahead."""

    def __init__(self, data: Iterable[Any], steps: int) -> None:
        self.data, self.steps = data, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return repeated(self.data, self.steps)


def _run(
    new: list[nn.Parameter],
    kept: list[nn.Parameter],
    data: Iterable[Any],
    error: Callable[[Any], Tensor],
    steps: int,
    lr: float,
    what: str,
    precision: str,
    progress: bool,
) -> list[float]:
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.environments import LightningEnvironment
    except ImportError as missing:
        raise ImportError("distill needs lightning: pip install 'primal-attention[train]'") from missing
    device = next(p.device for p in (*new, *kept))
    groups = [{"params": group, "lr": top} for group, top in ((new, lr), (kept, KEPT_RATE * lr)) if group]
    history: list[float] = []
    unseen: list[Tensor] = []

    def look(show: Callable[[list[float]], None]) -> None:
        for value in torch.stack(unseen).tolist():
            history.append(value)
            if not math.isfinite(value):
                raise NotFiniteError(f"the error is no longer a finite number at step {len(history)} {what}: lower lr")
            show(history)
        unseen.clear()

    class Stage(pl.LightningModule):
        def training_step(self, batch: Any, index: int) -> Tensor:
            torch.clear_autocast_cache()  # under a caller's autocast it would still hold the first step's weights
            loss = error(batch)
            unseen.append(loss.detach().float())
            if len(unseen) == LOOKED_AT or index == 0:
                look(show)
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            torch.nn.utils.clip_grad_norm_([*new, *kept], CLIP)

        def configure_optimizers(self) -> Any:
            optimiser = torch.optim.AdamW(groups, weight_decay=0.0, fused=device.type == "cuda")
            schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step, steps))
            return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with _quiet(), _shown(steps, what, progress) as show:
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=1,
            accelerator="gpu" if device.type == "cuda" else device.type,
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision=precision,  # type: ignore[arg-type]
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Stage(), train_dataloaders=_Repeated(data, steps))
        if unseen:
            look(show)
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
    from ..bench.progress import Progress

    marks = sorted({max(1, steps * i // 10) for i in range(1, 11)})
    with Progress(len(marks), what) as bar:

        def show(history: list[float]) -> None:
            if len(history) in marks:
                bar.advance(f"{what}: step {len(history)} of {steps}, error {history[-1]:.4f}")

        yield show
