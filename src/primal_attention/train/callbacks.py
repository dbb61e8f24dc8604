"""What happens around an epoch: measuring, remembering, saving, stopping, and a bar to look at."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from primal_attention.train import distributed
from primal_attention.train.distributed import Notice
from primal_attention.train.experiment import Experiment
from primal_attention.train.module import TrainingModule
from primal_attention.utils.errors import Preempted
from primal_attention.utils.files import write_csv, write_error

Row = dict[str, Any]


class Remembers(Protocol):
    """Anything that keeps one row per epoch."""

    rows: list[Row]


class RunState(Checkpoint):
    """The memory of a run: one row per epoch, the chosen epoch, the time it took. It lives in the checkpoint.

    metrics.csv is always written from this memory, so a run that was killed and resumed has the same file as one that
    was not. It holds nothing that a second run of the same command would not repeat; times are kept apart.

    Asked to stop (SIGTERM), it saves where the training stands and raises `Preempted`: within an epoch after the step
    at hand, while it measures an epoch at once, and the measuring is then done by the run that goes on.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        self.experiment = experiment
        self.rows: list[Row] = []
        self.seconds: list[float] = []
        self.peak_bytes: int | None = None
        self.best: Row | None = None
        self.finished = False
        self._started = self._written = 0.0
        self.middle: dict[str, Any] | None = None  # of an epoch: batches done, and what each process stands at
        self.unmeasured: Row | None = None  # an epoch that was trained and not measured yet
        self.chosen: dict[str, torch.Tensor] | None = None  # weights of the chosen epoch
        self.notice = Notice()
        self._trainer: Any = None
        self._board: Any = None

    @property
    def state_key(self) -> str:
        return "RunState"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def state_dict(self) -> dict[str, Any]:
        keep = ("rows", "seconds", "best", "finished", "peak_bytes", "middle", "unmeasured", "chosen")
        return {name: getattr(self, name) for name in keep}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.seconds = list(state["rows"]), list(state["seconds"])
        self.best, self.finished, self.peak_bytes = state["best"], state["finished"], state["peak_bytes"]
        self.middle, self.unmeasured, self.chosen = state["middle"], state["unmeasured"], state["chosen"]

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self.experiment.module.watcher = trainer, self
        self.notice.listen()
        self.experiment.train.share(*self.experiment.module.share)
        for batches in (self.experiment.train, *self.experiment.watched.values()):
            batches.to(module.device)
        if trainer.is_global_zero and self.experiment.module.recipe.trainer.tensorboard:
            self._board = open_board(self.folder / "tensorboard", purge_after=trainer.global_step)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        self.finish_measuring(module)
        if self.middle is None:
            return
        middle, self.middle = self.middle, None
        module.go_on_from(middle["processes"], middle["steps"])
        self.experiment.train.skip = middle["batches"]
        self._started = time.perf_counter() - middle["seconds"]

    def after_batch(self, done: int) -> None:
        """Between two turns of an epoch, of which `done` are behind: save if it is time, stop if asked to."""
        module, often = self.experiment.module, self.experiment.module.recipe.trainer.checkpoint_steps
        asked = self.notice.anywhere(module.device)
        group = self.experiment.train.group  # a turn of the loop may be several steps
        due = often and done * group // often > (done - 1) * group // often
        if not asked and not due:
            return
        here = module.position()
        everyone = [here]
        if self._trainer.world_size > 1:
            everyone = [None] * self._trainer.world_size  # type: ignore[list-item]
            torch.distributed.all_gather_object(everyone, here)
        seconds = time.perf_counter() - self._started
        self.middle = {"batches": done, "steps": here["steps"], "seconds": seconds, "processes": everyone}
        self._save()
        self.middle = None
        if asked:
            raise Preempted(f"asked to stop: saved after batch {done} of epoch {self._trainer.current_epoch + 1}")

    def while_measuring(self) -> None:
        """Between two batches of an evaluation."""
        if self.notice.anywhere(self.experiment.module.device):
            self._save()
            raise Preempted("asked to stop: saved before the last epoch was measured")

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if module.device.type == "cuda":
            # The peak is the training's own: neither an evaluation nor an earlier run of this process counts.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        if module.device.type == "cuda":
            torch.cuda.synchronize()
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated())
        self.seconds.append(time.perf_counter() - self._started)
        epoch = trainer.current_epoch + 1
        row: Row = {"epoch": epoch, "step": trainer.global_step, "lr": trainer.optimizers[0].param_groups[0]["lr"]}
        row |= module.epoch_means()
        self.finished = False
        self.unmeasured = row
        self.finish_measuring(module)

    def finish_measuring(self, module: TrainingModule) -> None:
        """The scores of the epoch that was trained last, its row, its checkpoint; nothing where all that is done."""
        if self.unmeasured is None:
            return
        trainer, config, row = self._trainer, module.recipe.trainer, dict(self.unmeasured)
        epoch = row["epoch"]
        last = epoch == config.epochs
        if last or epoch % config.evaluate_every == 0:
            for name, batches in self.experiment.watched.items():
                row |= {f"{name}_{key}": value for key, value in module.evaluate(batches).items()}
            self._choose(row, module)
        self.rows.append(row)
        self.unmeasured = None
        self.finished = last or self._patience_spent(config.early_stop)
        asked = self.notice.anywhere(module.device)
        saved = self.finished or asked or epoch % config.checkpoint_every == 0
        if saved:
            self._save()
        if trainer.is_global_zero:
            if saved or time.monotonic() - self._written > 1:  # short epochs would spend their time on this file
                write_csv(self.folder / "metrics.csv", self.rows)
                self._written = time.monotonic()
            self._write_board(row)
        if asked and not self.finished:
            raise Preempted(f"asked to stop: saved after epoch {epoch}")
        if self.finished:
            trainer.should_stop = True

    def _write_board(self, row: Row) -> None:
        if self._board is None:
            return
        try:
            for key, value in row.items():
                self._board.add_scalar(key.replace("_", "/", 1), value, row["step"])
        except OSError as error:
            raise write_error(self.folder / "tensorboard", error) from error

    def _choose(self, row: Row, module: TrainingModule) -> None:
        """Remember the epoch with the best score on the selection set, the lower loss where scores tie."""
        if self.experiment.select is None:
            return
        name, score = self.experiment.select
        rank = [row[f"{name}_{score}"], -row[f"{name}_loss"]]
        if self.best is None or rank > self.best["rank"]:
            self.best = {"epoch": row["epoch"], "rank": rank}
            state = distributed.whole(module.final_model.state_dict())
            self.chosen = {name: t.detach().to("cpu", copy=True) for name, t in state.items()}

    def _save(self) -> None:
        """Write a checkpoint, with the weights of the chosen epoch: a checkpoint is complete without other files."""
        self._trainer.save_checkpoint(self.checkpoint)

    def _patience_spent(self, patience: int) -> bool:
        return bool(patience and self.best and len(self.rows) - self.best["epoch"] >= patience)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.notice.rest()
        if self._board is not None:
            with contextlib.suppress(OSError):  # a full disk: metrics.csv has the same numbers
                self._board.close()


def open_board(folder: Path, purge_after: int) -> Any:
    """A TensorBoard writer, or None where tensorboard is not installed: the CSV has the same numbers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    threading.excepthook = _thread_error
    return SummaryWriter(str(folder), purge_step=purge_after + 1 if purge_after else None)


def _thread_error(error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, except for TensorBoard's, whose error the next `add_scalar` raises again."""
    if not type(error.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(error)


class Bar(Callback):
    """One bar for the whole training, with the time that is left and the latest numbers."""

    def __init__(self, title: str, state: Remembers) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.state = state
        self.title = title
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}"),
        )
        self.task: Any = None
        self.steps = 1

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.task = self.progress.add_task(self.title, total=trainer.max_epochs, numbers="")
        self.progress.update(self.task, completed=trainer.current_epoch)
        self.steps = max(1, int(trainer.num_training_batches))
        self.progress.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        if self.task is not None:
            self.progress.update(self.task, advance=1 / self.steps)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=trainer.current_epoch + 1, numbers=latest(self.state.rows))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.task is not None:
            self.progress.update(self.task, numbers=latest(self.state.rows))
        self.progress.stop()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.progress.stop()


def latest(rows: list[Row]) -> str:
    """The last row in a few words."""
    if not rows:
        return ""
    row = rows[-1]
    parts = [f"loss {row['task_loss']:.3f}"]
    if "J" in row:
        parts.append(f"J {row['J']:+.3f}")
    parts += [f"{key.split('_')[0]} {100 * value:.1f} %" for key, value in row.items() if key.endswith("_accuracy")]
    parts += [f"{key.split('_')[0]} {value:.1f}" for key, value in row.items() if key.endswith("_score")]
    return "  ".join(parts)
