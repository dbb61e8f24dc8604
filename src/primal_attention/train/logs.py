"""What a training reports: loggers and the summary."""

from __future__ import annotations

import importlib.util
import os
import statistics
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import primal_attention
from primal_attention.data.storage import one_line
from primal_attention.nn.objective import primal_layers
from primal_attention.train.checkpoint import State
from primal_attention.train.config import FORMAT, Recipe
from primal_attention.train.task import Experiment
from primal_attention.utils.errors import RunError

Summary = dict[str, Any]


def check_loggers(names: Sequence[str]) -> None:
    """Raise if the package of a logger is missing."""
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise RunError(f"trainer.logger {name} needs {name}: pip install {name}")


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
        except Exception as error:  # each service raises its own types
            raise RunError(f"trainer.logger {name} cannot start: {one_line(error)}") from error
    return loggers


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
