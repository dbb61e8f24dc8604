"""Train a recipe in a run folder: build, resume, epochs, steps, evaluation, checkpoints, summary.

`checkpoint` describes the files of a run folder. They are written atomically, and a run that was killed at any moment
resumes from its last intact checkpoint.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from primal_attention.data.storage import one_line
from primal_attention.nn.baselines.random_buffers import draw_counts, restore_draw_counts
from primal_attention.train import checkpoint, distributed
from primal_attention.train.checkpoint import State, load_weights, read_summary
from primal_attention.train.config import Recipe
from primal_attention.train.logs import Summary, check_loggers, make_loggers, summarize
from primal_attention.train.step import GATHERED, TrainingStep, learning_rate, make_optimizer, records_steps
from primal_attention.train.task import Experiment, compile_failure, derive_seed
from primal_attention.utils.errors import Preempted, RunError
from primal_attention.utils.files import write_csv, write_error, write_json, write_text, write_weights

Row = dict[str, Any]  # of metrics.csv


def train(
    recipe: Recipe,
    folder: Path,
    *,
    name: str = "",
    resume: bool = False,
    command: str = "",
    commit: str | None = None,
    new_schedule: bool = False,
) -> Summary:
    """Run all trainings of a recipe in a folder, which the main process locks.

    Args:
        recipe: What to train.
        folder: The run folder.
        name: Name of the recipe.
        resume: Continue the run in the folder. More epochs than before extend it, if its schedule allows that.
        command: The command line, for config.yaml.
        commit: Commit of the code, if git is not available.
        new_schedule: The user gave --optim.schedule, which may then replace that of an extended run.

    Returns:
        The content of summary.json.
    """
    import lightning.fabric  # noqa: F401 (before anything is written: it takes seconds, and may be missing)

    check_loggers(recipe.trainer.logger)
    main = distributed.is_main()
    about = {"name": name, "command": command, "commit": commit}
    with checkpoint.lock_folder(folder) if main else nullcontext():
        return _train_in(folder, recipe, resume, new_schedule, about)


def _train_in(folder: Path, recipe: Recipe, resume: bool, new_schedule: bool, about: dict[str, Any]) -> Summary:
    """Run all trainings of a recipe in a folder that is locked."""
    recipe, name = recipe.resolved(), about["name"]
    resume = resume or distributed.restarted() or not distributed.is_main()
    plan = checkpoint.check_config(folder, recipe, resume=resume, new_schedule=new_schedule)
    if (folder / "summary.json").exists() and not plan.extends:
        return read_summary(folder)
    if recipe.trainer.accelerator == "gpu" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise RunError("trainer.accelerator gpu: torch finds no GPU here (primal info says more)")
    title = name if recipe.label() in name else f"{name or recipe.benchmark} {recipe.label()}"
    summaries = []
    for part, phase in recipe.phases():
        if part:
            summaries.append(_train_in(folder / part, phase, True, new_schedule, about))
            continue
        experiment = build(phase)  # before anything is written: a recipe that cannot be built leaves no folder
        data_sha256 = experiment.facts.get("sha256")
        if checkpoint.has_other_data(folder, data_sha256):
            raise RunError(f"the data has changed since the run in {folder} started: start a new run")
        if distributed.is_main():
            checkpoint.write_config(folder, recipe, plan, **about, data_sha256=data_sha256)
        training = Training(phase, experiment, folder, plan.schedule_epochs, title)
        training.fit()
        summaries.append(training.finish())
    scores = {protocol: score for each in summaries for protocol, score in each["scores"].items()}
    summary = {"recipe": name, **summaries[0], "scores": scores, **checkpoint.run_origin(folder)}
    if distributed.is_main():
        write_json(folder / "summary.json", summary)
    return summary


def build(recipe: Recipe) -> Experiment:
    """Return the recipe's experiment; values that the model or the memory does not allow are a one-line error."""
    torch.manual_seed(derive_seed("weights", recipe.seed))
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if recipe.trainer.tf32 else "highest")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "rank=.* exceeds")  # expected: some of the paper's settings do
            return recipe.build()
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's memory
        if type(error).__module__.startswith("primal_attention"):
            raise
        raise RunError(f"this recipe cannot be built: {one_line(error)}") from error


class Training:
    """One training in one folder.

    Args:
        recipe: The resolved recipe of this training.
        experiment: What the recipe builds.
        folder: Without one, nothing is written and SIGTERM keeps its handler.
        schedule_epochs: Epochs that the schedule's warmup is a part of.
        title: Name in the progress bar and the loggers.
    """

    def __init__(
        self,
        recipe: Recipe,
        experiment: Experiment,
        folder: Path | None = None,
        schedule_epochs: int = 0,
        title: str = "",
    ) -> None:
        self.recipe, self.config, self.folder = recipe, recipe.trainer, folder
        self.experiment, self.module, self.batches = experiment, experiment.module, experiment.train
        if not recipe.test:
            experiment.watched = {name: batches for name, batches in experiment.watched.items() if name != "test"}
        self.schedule_epochs = schedule_epochs or self.config.epochs
        self.state = State()
        self.got_sigterm = False
        self.step: Any = None
        self.title = title
        self.bar: Any = None
        self.loggers: dict[str, Any] = {}  # of the main process

    def fit(self) -> None:
        """Train from the last checkpoint, or from the start, to the last epoch."""
        self.fabric = distributed.make_fabric(self.config)
        try:
            self.set_up()
            self.resume()
            self.start()
            with nullcontext() if self.folder is None else distributed.handle_signal(signal.SIGTERM, self.request_stop):
                while not self.is_finished:
                    self.finish_epoch(self.train_epoch())
        except BaseException as error:
            if not isinstance(error, Preempted):  # the other ranks would wait for this one
                for process in getattr(self.fabric.strategy.launcher, "procs", ()):
                    process.kill()
            if isinstance(error, Exception) and (reason := compile_failure(error)) is not None:
                message = f"torch.compile cannot compile this model here ({reason}): add --trainer.compile off"
                raise RunError(message) from error
            raise
        finally:
            self.module.poll = None
            self.step = None  # the recordings hold the memory of a step
            if self.bar is not None:
                self.bar.close()
            for logger in self.loggers.values():
                with suppress(Exception):  # a full disk or a lost server: metrics.csv has the same numbers
                    logger.finalize("success" if self.is_finished else "failed")

    def request_stop(self, *_: Any) -> None:
        """Save and stop after this batch."""
        self.got_sigterm = True

    # Build and resume

    def set_up(self) -> None:
        """Launch the other processes; place the model, its shards, the optimizer and the data."""
        fabric, module, config = self.fabric, self.module, self.config
        distributed.rejoin(fabric.device)
        fabric.launch()
        self.device, self.is_main = fabric.device, fabric.is_global_zero
        module.to(self.device).train()
        module.global_rank = fabric.global_rank
        if fabric.world_size > 1:
            shape = fabric.world_size // config.context, config.context
            module.adopt(init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context")))
        if config.strategy == "fsdp":
            for model in (module.model, module.averaged):
                if model is not None:
                    distributed.shard(model, self.device.type)
        self.records = records_steps(config, self.device)
        self.optimizer = make_optimizer(module.model, self.recipe.optim, recordable=self.records)
        steps = len(self.batches)
        self.rate = learning_rate(self.recipe.optim, steps * config.epochs, steps * self.schedule_epochs)
        self.batches.group = GATHERED if self.records else 1
        self.batches.rank, self.batches.world = module.share
        for batches in (self.batches, *self.experiment.watched.values()):
            batches.to(self.device)

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one."""
        if self.folder is None:
            return
        newest = checkpoint.load_newest(self.folder / "checkpoints", is_main=self.is_main)
        if newest is None:
            if self.is_main and (self.folder / "metrics.csv").exists():
                warnings.warn(f"{self.folder / 'checkpoints'} is empty: the training starts again", stacklevel=2)
            return
        place, content = newest
        checkpoint.restore(place, content, self.module, self.optimizer)
        self.module.global_step = content["global_step"]
        restore_draw_counts(self.module.model, content.get("draws", {}))
        if content.get("precision"):
            self.fabric.strategy.precision.load_state_dict(content["precision"])
        self.state = State(**{key: value for key, value in content["run"].items() if key in vars(self.state)})

    def start(self) -> None:
        """Wrap the model for DDP, open the loggers, and show a progress bar of the complete training."""
        from tqdm import tqdm

        module, state, config = self.module, self.state, self.config
        is_ddp = config.strategy == "ddp"
        wrapped = self.fabric.strategy.setup_module(module) if is_ddp else module
        self.step = TrainingStep(self.fabric, module, wrapped, self.optimizer, self.rate, records=self.records)
        if self.folder is not None:
            module.poll = lambda: self.save_within_epoch(len(self.batches))
            if self.is_main:
                for name, text in self.experiment.files.items():
                    write_text(self.folder / name, text)
                self.loggers = make_loggers(
                    config.logger, self.folder, self.title, state.logger_ids, module.global_step
                )
        steps, is_hidden = len(self.batches), None if config.progress and self.is_main else True
        tqdm.set_lock(threading.RLock())  # the default lock is a semaphore, which a killed worker would leak
        shape = {"total": config.epochs * steps, "initial": len(state.rows) * steps, "unit": "batch"}
        self.bar = tqdm(desc=self.title, disable=is_hidden, **shape)

    # Epochs and steps

    def train_epoch(self) -> Row:
        """Train one epoch, or the rest of an interrupted one; return its row of metrics.csv without scores."""
        state, module, batches = self.state, self.module, self.batches
        batches.epoch = len(state.rows)
        module.start_epoch(len(state.rows))
        done, self.seconds = 0, 0.0
        if state.middle is not None:
            middle, state.middle = state.middle, None
            done, self.seconds = middle["steps"], middle["seconds"]
            module.restore_epoch_state(middle["processes"], done, self.fabric.world_size)
            batches.skip = done
        if self.device.type == "cuda":  # the peak is that of training, without evaluations
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter() - self.seconds
        with self.step.own_stream():
            for batch in batches:
                if module.mesh is not None:
                    module.batch_weight = batches.part(done)
                self.step.run(batch)
                done += 1
                self.bar.update()
                self.seconds = time.perf_counter() - started
                self.save_within_epoch(done)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - started
            state.peak_bytes = max(state.peak_bytes or 0, torch.cuda.max_memory_allocated())
        row = {"epoch": len(state.rows) + 1, "step": module.global_step, "lr": self.rate(module.global_step - 1)}
        return {**row, **module.epoch_means()}

    # Evaluate, save and stop

    def finish_epoch(self, row: Row) -> None:
        """Evaluate an epoch if it is due, log its row, and save a checkpoint."""
        state, config = self.state, self.config
        if row["epoch"] == config.epochs or row["epoch"] % config.evaluate_every == 0:
            for name, batches in self.experiment.watched.items():
                row |= {f"{name}_{key}": value for key, value in self.module.evaluate(batches).items()}
            self.choose(row)
        state.rows.append(row)
        state.seconds.append(self.seconds)
        if self.is_finished or row["epoch"] % config.checkpoint_every == 0:
            self.save()
        if self.is_main:
            self.log(row)

    def log(self, row: Row) -> None:
        """Write metrics.csv, whose last row is `row`; pass the row to the loggers and the progress bar."""
        shown = {k: v for k, v in row.items() if k in ("task_loss", "J") or k.endswith(("_accuracy", "_score"))}
        self.bar.set_postfix(shown, refresh=False)
        if self.bar.disable and self.config.progress:  # not a terminal: a line per epoch
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            print(f"{self.title}: epoch {row['epoch']}/{self.config.epochs}  {numbers}", file=sys.stderr, flush=True)
        if self.folder is None:
            return
        write_csv(self.folder / "metrics.csv", self.state.rows)
        speed = self.batches.samples_per_epoch / self.seconds
        for name, logger in self.loggers.items():
            try:
                logger.log_metrics({**row, "samples_per_second": speed}, row["step"])
            except OSError as error:
                raise write_error(self.folder / name, error) from error

    @property
    def is_finished(self) -> bool:
        return len(self.state.rows) >= self.config.epochs

    def choose(self, row: Row) -> None:
        """Store the weights of the epoch with the best accuracy on validation; the lower loss breaks ties."""
        if not self.experiment.chooses_epoch:
            return
        rank = [row["val_accuracy"], -row["val_loss"]]
        if self.state.best is None or rank > self.state.best["rank"]:
            self.state.best = {"epoch": row["epoch"], "rank": rank}
            weights = distributed.gather_full(self.module.final_model.state_dict())
            self.state.chosen = {name: t.detach().to("cpu", copy=True) for name, t in weights.items()}

    def save(self) -> None:
        """Write a checkpoint; all processes call this together."""
        if self.folder is None:
            return
        progress = {
            "global_step": self.module.global_step,
            "draws": draw_counts(self.module.model),
            "precision": self.fabric.strategy.precision.state_dict(),
            "run": vars(self.state),
        }
        checkpoint.save(self.folder / "checkpoints", self.module, self.optimizer, progress)
        self.fabric.barrier()

    def save_within_epoch(self, done: int) -> None:
        """Save after a batch of the epoch, or of its evaluation, if a checkpoint is due or SIGTERM came."""
        if self.folder is None:
            return
        every = self.config.checkpoint_steps
        stops = self.fabric.strategy.reduce_boolean_decision(self.got_sigterm, all=False)  # asks all processes
        if not stops and not (every and done % every == 0 and done < len(self.batches)):
            return
        states: list[Any] = [self.module.epoch_state()]
        if self.fabric.world_size > 1:
            own, states = states[0], [None] * self.fabric.world_size
            torch.distributed.all_gather_object(states, own)
        self.state.middle = {"steps": done, "seconds": self.seconds, "processes": states}
        self.save()
        self.state.middle = None
        if stops:
            raise Preempted(f"asked to stop: saved after batch {done} of epoch {len(self.state.rows) + 1}")

    # Finish

    def finish(self) -> Summary:
        """Evaluate the final model on test if the recipe asks for it, write its weights, and return the summary."""
        assert self.folder is not None
        model = self.module.final_model
        if self.experiment.chooses_epoch:
            assert self.state.chosen is not None
            distributed.load_full(model, self.state.chosen)
        test = self.module.evaluate(self.experiment.test.to(self.device)) if self.recipe.test else {}
        weights = distributed.gather_full(model.state_dict())
        if self.is_main:
            write_csv(self.folder / "metrics.csv", self.state.rows)  # a kill after the last checkpoint may have lost it
            write_weights(self.folder / "model.safetensors", weights)
        return summarize(self.recipe, self.experiment, self.state, test, self.device)


def evaluate(folder: Path) -> dict[str, dict[str, float]]:
    """Evaluate a finished run's weights on test again; return scores by training ("" or "validation")."""
    read_summary(folder)
    _, recipe = checkpoint.read_run(folder)
    scores = {}
    for part, phase in recipe.phases():
        experiment = build(phase)
        if checkpoint.has_other_data(folder / part, experiment.facts.get("sha256")):
            warnings.warn(f"the data is not that of the run in {folder / part}", stacklevel=2)
        device = distributed.pick_device(phase.trainer)
        load_weights(experiment.module.final_model, folder / part / "model.safetensors")
        experiment.module.to(device)
        scores[part] = experiment.module.evaluate(experiment.test.to(device))
    return scores
