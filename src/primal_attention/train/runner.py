"""What a run does and writes.

    run folder    config.yaml         the recipe, resolved, with the command and the versions
                  metrics.csv         one row per epoch, nothing that a second run would not repeat
                  checkpoints/        last.ckpt and previous.ckpt
                  model.safetensors   the weights that the test number belongs to
                  summary.json        the result; written last, so its presence means the run is done
                  validation/         the same again for the training with held-out cases (protocol both)
                  .lock               the process that trains here, while it does

Files are written atomically. A run killed at any moment continues from its last intact checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import primal_attention
from primal_attention.nn.objective import primal_layers
from primal_attention.train import compiling, distributed
from primal_attention.train import cuda_graph as graphed
from primal_attention.train import distributed as preempt
from primal_attention.train import folder as run_folder
from primal_attention.train.batches import derive_seed
from primal_attention.train.callbacks import Bar, RunState
from primal_attention.train.checkpoint import AtomicCheckpointIO, check_fits, load_newest
from primal_attention.train.config import Recipe, TrainerConfig
from primal_attention.train.experiment import Experiment
from primal_attention.train.readers import read_metrics, read_weights
from primal_attention.train.readers import read_summary as read_summary_file
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_json, write_weights

Summary = dict[str, Any]


def train(
    recipe: Recipe, out: Path, *, name: str = "", resume: bool = False, command: str = "", commit: str | None = None
) -> Summary:
    """Run all trainings of a recipe in the folder `out` and return the summary that is also written there.

    The main process locks the folder meanwhile.
    commit: of the code, where git cannot say it.
    """
    locked = run_folder.lock(out, restarted=distributed.restarted()) if distributed.is_main() else nullcontext()
    with locked:
        return train_unlocked(recipe, out, name=name, resume=resume, command=command, commit=commit)


def train_unlocked(recipe: Recipe, out: Path, *, name: str, resume: bool, command: str, commit: str | None) -> Summary:
    """`train` in a folder whose lock this run holds."""
    recipe = recipe.resolved()
    run_folder.check(out, recipe, resume=resume or distributed.restarted() or not distributed.is_main())
    if (out / "summary.json").exists():
        return read_summary(out)
    if recipe.trainer.accelerator == "gpu" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise RunError("trainer.accelerator gpu: torch finds no GPU here (primal info says more)")
    title = name if recipe.label() in name else f"{name or recipe.benchmark} {recipe.label()}"
    parts = []
    for part, phase in recipe.phases():
        if part:
            place = out / part
            parts.append(train_unlocked(phase, place, name=name, resume=True, command=command, commit=commit))
            continue
        experiment = build(phase)  # before anything is written: a recipe that cannot be built leaves no folder behind
        if distributed.is_main():
            run_folder.write(out, recipe, name=name, command=command, commit=commit)
        parts.append(run_phase(phase, experiment, out, title))
    summary = {**merge(parts, out, name), **run_folder.origin(out)}
    if distributed.is_main():
        write_json(out / "summary.json", summary)
    return summary


def run_phase(recipe: Recipe, experiment: Experiment, folder: Path, title: str) -> Summary:
    """One training in one folder, from its last checkpoint if there is one."""
    module, config = experiment.module, recipe.trainer
    if config.early_stop and experiment.select is None:
        raise RunError("trainer.early-stop needs held-out cases to judge by: add --protocol validation")
    state = RunState(folder, experiment)
    checkpoint = restore(state, experiment)
    if not state.finished:
        callbacks: list[pl.Callback] = [state]
        if config.progress:
            with contextlib.suppress(ImportError):  # no rich on this machine: train without a bar
                callbacks.insert(0, Bar(title, state))
        trainer = trainer_for(recipe, experiment, callbacks, folder)
        distributed.rejoin(trainer.strategy.root_device)
        try:
            trainer.fit(module, train_dataloaders=experiment.train, ckpt_path=checkpoint)
            state.finish_measuring(module)  # where a run was stopped while it measured its last epoch
        except SystemExit as stop:
            if stop.code == preempt.CODE:
                raise
            raise KeyboardInterrupt from None  # Lightning's answer to Ctrl-C
        except Exception as error:
            if (why := compiling.failure(error)) is None:
                raise
            raise RunError(f"torch.compile cannot take this model here ({why}): add --trainer.compile off") from error
        module.watcher = None
        if config.strategy == "fsdp":  # the trained module is in pieces: take the whole one from the checkpoint
            layout = module.layout
            experiment = build(recipe)
            module = experiment.module
            restore(state, experiment)
            module.adopt(layout)
    if experiment.select is not None:
        assert state.chosen is not None
        module.final_model.load_state_dict(state.chosen)
    module.to(pick_device(config))
    summary = summarise(recipe, experiment, state)
    if distributed.is_main():
        write_weights(folder / "model.safetensors", module.final_model.state_dict())
    return summary


def build(recipe: Recipe) -> Experiment:
    """The recipe's experiment; a value that the model or the memory does not allow is an error of one line."""
    torch.manual_seed(derive_seed("weights", recipe.seed))
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if recipe.trainer.tf32 else "highest")
    try:
        return recipe.build()
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:  # torch: out of memory
        if type(error).__module__.startswith("primal_attention"):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"this recipe cannot be built: {reason}") from error


def restore(state: RunState, experiment: Experiment) -> Path | None:
    """The checkpoint to continue from; a training that had ended is loaded at once."""
    module, folder = experiment.module, state.checkpoint.parent
    found = load_newest(folder, lambda c, path: check_fits(c, module, path), main=distributed.is_main())
    if found is None:
        if distributed.is_main() and (state.folder / "metrics.csv").exists():
            warnings.warn(f"{folder} has no checkpoint: the training starts again", stacklevel=2)
        return None
    place, content = found
    memory = content["callbacks"][state.state_key]
    if memory["finished"]:
        state.load_state_dict(memory)
        module.load_state_dict(content["state_dict"])
    return place


def trainer_for(
    recipe: Recipe, experiment: Experiment, callbacks: Sequence[pl.Callback], folder: Path | None
) -> pl.Trainer:
    """The trainer of an experiment, whose steps are recorded where that is possible."""
    recorded = graphed.suits(recipe, experiment.module)
    if recorded:
        experiment.module.record_steps(experiment.train, graphed.GROUP)
    return make_trainer(recipe, callbacks, folder, clip=not recorded)


def make_trainer(
    recipe: Recipe, callbacks: Sequence[pl.Callback], folder: Path | None, *, clip: bool = True
) -> pl.Trainer:
    """Lightning's trainer with this library's checkpoints and its silence. Without a folder nothing is written.

    clip: off where the module clips its gradients itself.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    config = recipe.trainer
    devices, nodes = distributed.machines(config)
    if config.devices > 1 and config.strategy == "auto":
        raise RunError(f"trainer.devices {config.devices} needs --trainer.strategy ddp or fsdp")
    try:
        trainer = pl.Trainer(
            max_epochs=config.epochs,
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=make_strategy(config),
            precision=config.precision,
            gradient_clip_val=(recipe.optim.clip or None) if clip else None,
            accumulate_grad_batches=config.accumulate,
            callbacks=list(callbacks),
            plugins=[AtomicCheckpointIO()],
            enable_checkpointing=folder is not None,
            deterministic=config.deterministic,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        # Lightning's own handler of SIGTERM starts a broadcast wherever the process happens to be; see `preempt`.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        return trainer
    except pl.utilities.exceptions.MisconfigurationException as error:
        raise RunError(" ".join(str(error).split())) from error


def make_strategy(config: TrainerConfig) -> Any:
    """Lightning's strategy; fsdp is PyTorch's second version, which also runs on CPU."""
    if config.strategy != "fsdp":
        return config.strategy
    from primal_attention.train.sharded import ShardedStrategy

    return ShardedStrategy(config.devices)


def pick_device(config: TrainerConfig) -> torch.device:
    """The device of a single-process evaluation with this configuration."""
    wants_gpu = config.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if wants_gpu else torch.device("cpu")


def summarise(recipe: Recipe, experiment: Experiment, state: RunState) -> Summary:
    """Measure the final model on test once more and gather what the run's readers need."""
    module = experiment.module
    device = next(module.final_model.parameters()).device
    test = module.evaluate(experiment.test.to(device))
    scores: dict[str, Any] = {}
    watched = f"test_{module.headline}"
    seen = [row for row in state.rows if watched in row]
    if seen:
        best = max(seen, key=lambda row: row[watched])
        scores["best_on_test"] = {"epoch": best["epoch"], module.headline: best[watched]}
    if experiment.select is None:
        last = state.rows[-1]
        held_out = {f"validation_{k.removeprefix('val_')}": v for k, v in last.items() if k.startswith("val_")}
        scores["last"] = {"epoch": last["epoch"], **held_out, **test}
    else:
        if seen:  # one training is read in all three ways; the weights that are kept are the chosen epoch's
            scores["last"] = {"epoch": seen[-1]["epoch"], **{key: seen[-1][f"test_{key}"] for key in test}}
        assert state.best is not None
        chosen = {"epoch": state.best["epoch"], "validation_accuracy": state.best["rank"][0]}
        scores["validation_chosen"] = {**chosen, **test}
    layers = primal_layers(module.model)
    return {
        "format": run_folder.FORMAT,
        "version": primal_attention.__version__,
        "benchmark": recipe.benchmark,
        "label": recipe.label(),
        "seed": recipe.seed,
        "scores": scores,
        "test": test,
        "epochs": len(state.rows),
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "primal_layers": len(layers),
        "objective": {"first": state.rows[0]["J"], "last": state.rows[-1]["J"]} if layers else None,
        # The median: the first epoch also pays for warming up.
        "seconds_per_epoch": statistics.median(state.seconds),
        "peak_memory_bytes": state.peak_bytes,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "data": dict(experiment.facts),
    }


def merge(parts: list[Summary], folder: Path, name: str) -> Summary:
    """One summary of a run's trainings: the first one's, with the scores of all.

    Training again on all cases up to the chosen epoch needs no third training: with the same seed and schedule it is
    the first training at that epoch.
    """
    summary = {"recipe": name, **parts[0]}
    for other in parts[1:]:
        summary["scores"] = {**summary["scores"], **other["scores"]}
    chosen = summary["scores"].get("validation_chosen")
    if chosen and "last" in summary["scores"] and len(parts) > 1:
        table = read_metrics(folder / "metrics.csv")
        accuracies = dict(zip(table.get("epoch", []), table.get("test_accuracy", []), strict=False))
        if (accuracy := accuracies.get(chosen["epoch"])) is not None:
            chosen["retrained_accuracy"] = accuracy
    return summary


def read_summary(folder: Path) -> Summary:
    """The summary of a finished run."""
    return read_summary_file(folder / "summary.json")


def evaluate(folder: Path) -> dict[str, dict[str, float]]:
    """Measure a finished run's weights on the test set again: scores by training ("" or "validation")."""
    read_summary(folder)
    _, recipe = run_folder.read(folder)
    scores = {}
    for part, phase in recipe.phases():
        experiment = build(phase)
        module = experiment.module
        device = pick_device(phase.trainer)
        load_weights(module.final_model, folder / part / "model.safetensors")
        module.to(device)
        scores[part] = module.evaluate(experiment.test.to(device))
    return scores


def load_weights(model: torch.nn.Module, file: Path) -> None:
    """Load a safetensors file into a model that it fits."""
    try:
        model.load_state_dict(read_weights(file))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()[:200]
        raise RunError(f"{file} does not fit the model of its config.yaml ({reason})") from error
