"""What a training reports: metrics.csv, loggers, the progress bar, the summary."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import primal_attention
from primal_attention.data.storage import one_line
from primal_attention.nn.objective import primal_layers
from primal_attention.train.config import FORMAT
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_csv, write_error

if TYPE_CHECKING:
    from primal_attention.train.checkpoint import State
    from primal_attention.train.config import Recipe, TrainerConfig
    from primal_attention.train.task import Experiment

Row = dict[str, Any]
Summary = dict[str, Any]


def make_loggers(names: Sequence[str], folder: Path, title: str, ids: dict[str, str], step: int) -> dict[str, Any]:
    """Return Lightning's loggers by name. metrics.csv is not among them: the loop writes it.

    Args:
        names: The recipe's `trainer.logger`.
        folder: TensorBoard, offline wandb and, without MLFLOW_TRACKING_URI, MLflow write here.
        title: Name of the run in wandb and MLflow.
        ids: Run ids of wandb and MLflow by logger; filled in, so that a resumed run continues them.
        step: The step to continue from; TensorBoard drops later points.
    """
    loggers: dict[str, Any] = {}
    about: dict[str, Any]
    for name in dict.fromkeys(names):
        try:
            if name == "tensorboard":
                from lightning.fabric.loggers import TensorBoardLogger

                purge = step + 1 if step else None
                loggers[name] = TensorBoardLogger(folder, name="tensorboard", version="", purge_step=purge)
            elif name == "wandb":
                from lightning.pytorch.loggers import WandbLogger

                ids.setdefault(name, uuid.uuid4().hex[:8])
                about = {"project": "primal-attention", "name": title, "id": ids[name], "resume": "allow"}
                loggers[name] = WandbLogger(save_dir=folder, **about)
                loggers[name].experiment  # noqa: B018 (starts the run now, before anything is trained)
            elif name == "mlflow":
                from lightning.pytorch.loggers import MLFlowLogger

                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # for runs without a server
                uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{(folder / 'mlruns').resolve()}"
                about = {"tracking_uri": uri, "run_name": title, "run_id": ids.get(name)}
                loggers[name] = MLFlowLogger("primal-attention", **about)
                ids[name] = str(loggers[name].run_id)
        except ModuleNotFoundError:
            raise RunError(f"trainer.logger {name} needs {name}: pip install {name}") from None
        except Exception as error:  # each service raises its own types
            raise RunError(f"trainer.logger {name} cannot start: {one_line(error)}") from error
    return loggers


class RunLog:
    """metrics.csv, the loggers, and a progress bar for the complete training, of the main process.

    Args:
        title: Name in the bar and the loggers.
        config: Epochs, loggers, and whether there is a bar.
        folder: The run folder; without one, only the bar is shown.
        state: Progress so far, and the run ids of the loggers.
        batches: Batches per epoch.
        step: Steps so far.
    """

    def __init__(
        self, title: str, config: TrainerConfig, folder: Path | None, state: State, batches: int, step: int
    ) -> None:
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # the default lock is a semaphore, which a killed worker would leak
        self.folder, self.loggers = folder, {}
        if folder is not None:
            self.loggers = make_loggers(config.logger, folder, title, state.logger_ids, step)
        total, done, is_hidden = config.epochs * batches, len(state.rows) * batches, None if config.progress else True
        self.bar = tqdm(desc=title, total=total, initial=done, unit="batch", disable=is_hidden)

    def write(self, rows: Sequence[Row], samples_per_second: float) -> None:
        """Log the last row, and write all rows to metrics.csv."""
        row = rows[-1]
        shown = {k: v for k, v in row.items() if k in ("task_loss", "J") or k.endswith(("_accuracy", "_score"))}
        self.bar.set_postfix(shown, refresh=False)
        if self.folder is None:
            return
        write_csv(self.folder / "metrics.csv", rows)
        for name, logger in self.loggers.items():
            try:
                logger.log_metrics({**row, "samples_per_second": samples_per_second}, row["step"])
            except OSError as error:
                raise write_error(self.folder / name, error) from error

    def close(self, *, finished: bool) -> None:
        self.bar.close()
        for logger in self.loggers.values():
            with contextlib.suppress(Exception):  # a full disk or a lost server: metrics.csv has the same numbers
                logger.finalize("success" if finished else "failed")


def summarize(
    recipe: Recipe, experiment: Experiment, state: State, test: Mapping[str, float], device: torch.device
) -> Summary:
    """Return the summary of one training."""
    model = experiment.module.model
    layers = primal_layers(model)
    return {
        "format": FORMAT,
        "version": primal_attention.__version__,
        "benchmark": recipe.benchmark,
        "label": recipe.label(),
        "seed": recipe.seed,
        "scores": scores(experiment, state, test),
        "test": test,
        "epochs": len(state.rows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "primal_layers": len(layers),
        "objective": {"first": state.rows[0]["J"], "last": state.rows[-1]["J"]} if layers else None,
        # The median: the first epoch includes warm-up.
        "seconds_per_epoch": statistics.median(state.seconds),
        "peak_memory_bytes": state.peak_bytes,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "data": dict(experiment.facts),
    }


def scores(experiment: Experiment, state: State, test: Mapping[str, float]) -> dict[str, Any]:
    """Return the scores by protocol: the last epoch, the best on test, the epoch that validation chose."""
    headline, last = experiment.module.headline, state.rows[-1]
    by_protocol: dict[str, Any] = {}
    tested = [row for row in state.rows if f"test_{headline}" in row]
    if tested:
        best = max(tested, key=lambda row: row[f"test_{headline}"])
        by_protocol["best_on_test"] = {"epoch": best["epoch"], headline: best[f"test_{headline}"]}
    if not experiment.chooses_epoch:
        validation = {f"validation_{k.removeprefix('val_')}": v for k, v in last.items() if k.startswith("val_")}
        return {**by_protocol, "last": {"epoch": last["epoch"], **validation, **test}}
    if tested:  # the saved weights are those of the chosen epoch
        by_protocol["last"] = {"epoch": last["epoch"], **{key: last[f"test_{key}"] for key in test}}
    assert state.best is not None
    chosen = {"epoch": state.best["epoch"], "validation_accuracy": state.best["rank"][0]}
    return {**by_protocol, "validation_chosen": {**chosen, **test}}


def merge(summaries: Sequence[Summary], rows: Sequence[Row], name: str) -> Summary:
    """Return one summary of a run's trainings: the first one's, with the scores of all.

    Args:
        summaries: Of the run's trainings.
        rows: Of the first training. At the chosen epoch it is a training on all samples up to that epoch.
        name: Name of the recipe.
    """
    summary = {"recipe": name, **summaries[0]}
    for other in summaries[1:]:
        summary["scores"] = {**summary["scores"], **other["scores"]}
    chosen = summary["scores"].get("validation_chosen")
    if chosen and "last" in summary["scores"] and len(summaries) > 1:
        accuracies = {row["epoch"]: row.get("test_accuracy") for row in rows}
        if (accuracy := accuracies.get(chosen["epoch"])) is not None:
            chosen["retrained_accuracy"] = accuracy
    return summary
