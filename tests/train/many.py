"""Run by torchrun: trainings on all its ranks, one after the other, in folders under the given root.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 tests/train/many.py ROOT

The last training kills a rank. torchrun starts both again: finished trainings are skipped, the killed one resumes.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import toy
from faults import signal_at

from primal_attention.train import distributed, loop
from primal_attention.train.config import Recipe
from primal_attention.train.task import TrainingModule
from primal_attention.train.uea import ClassificationModule
from primal_attention.utils.errors import Preempted

# Batches of 7 that two ranks cannot halve, and a last one of 2.
PLAIN = {**toy.PLAIN, "trainer.batch_size": 7, "trainer.epochs": 2}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"trainer.strategy": "ddp"},
    "fsdp": {"trainer.strategy": "fsdp"},
    "context": {"trainer.strategy": "ddp", "trainer.context": 2},
}


def series(root: Path, **changes: Any) -> Recipe:
    return toy.recipe(root / "data", **{**PLAIN, **changes})


def text(root: Path, **changes: Any) -> Recipe:
    model = {"model.attention": ("primal",), "model.primal_mode": "decay", "model.conv": 4, "model.dropout": 0.0}
    settings = {"data.context": 33, "trainer.epochs": 1, **model, **changes}
    return toy.small("lm/wikitext-103", root / "text", **settings)


def expressions(root: Path, **changes: Any) -> Recipe:
    """Long-Range Arena with landmarks that move at every step."""
    settings = {"trainer.epochs": 1, "model.sampling": "random", **changes}
    return toy.small("lra/listops", root / "listops", **settings)


def write_data(root: Path) -> None:
    """Series, text and expressions, enough for a few batches."""
    toy.folder(root / "data")
    write_text(root)
    toy.write_expressions(root / "listops")


def write_text(root: Path) -> None:
    """Three splits of made-up words, enough for a few windows."""
    folder = root / "text"
    folder.mkdir()
    for number, (split, length) in enumerate({"train": 900, "valid": 80, "test": 80}.items()):
        words = (f"w{(5 * i + i * i // 23 + number) % 23}" for i in range(length))
        (folder / f"wiki.{split}.tokens").write_text(f" = w{number} = \n {' '.join(words)} \n")


def train_all(root: Path) -> None:
    """Train in every way, with J squared per sample and per batch, and with split sequences of text and expressions."""
    two = {"trainer.devices": 2}
    for name, way in WAYS.items():
        loop.train(series(root, **two, **way), root / name)
    ClassificationModule.ksvd_reduction = "batch"
    loop.train(series(root, **two, **WAYS["ddp"]), root / "ddp-batch")
    ClassificationModule.ksvd_reduction = "sample"
    loop.train(text(root, **two, **WAYS["context"]), root / "text-context")
    loop.train(expressions(root, **two, **WAYS["context"]), root / "landmarks")
    # One rank receives SIGTERM; both save and stop.
    for name in ("ddp", "fsdp"):
        if distributed.restarted():
            break
        recipe, losses = series(root, **two, **WAYS[name]), TrainingModule.losses
        if os.environ["RANK"] == "1":
            signal_at(signal.SIGTERM, TrainingModule, "losses", 7)
        with suppress(Preempted):
            loop.train(recipe, root / f"{name}-stopped")
            raise AssertionError("no rank stopped")
        TrainingModule.losses = losses
        if name == "ddp":  # a test resumes the other one with another number of ranks
            loop.train(recipe, root / f"{name}-stopped", resume=True)
    # A rank dies in the middle of an epoch, after a checkpoint within it.
    if not distributed.restarted() and os.environ["RANK"] == "1":
        signal_at(signal.SIGKILL, TrainingModule, "losses", 9)
    loop.train(series(root, **two, **WAYS["fsdp"], **{"trainer.checkpoint_steps": 2}), root / "fsdp-killed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train_all(Path(sys.argv[1]))
