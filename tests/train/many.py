"""Run by torchrun: trainings on all its ranks, one after the other, in folders under the given root.

torchrun --standalone --nproc-per-node 2 tests/train/many.py match ROOT     every way to share the work
torchrun --standalone --nproc-per-node 2 --max-restarts 2 tests/train/many.py kill ROOT
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import stopped
import toy
from killed import die_at

from primal_attention.train import module, runner
from primal_attention.train.config import Recipe, override
from primal_attention.train.lm import recipe_of
from primal_attention.train.uea import ClassificationModule
from primal_attention.utils.errors import Preempted

# Nothing random that depends on which process draws it; batches of 7 that two ranks cannot halve, and a rest of 2.
PLAIN = {
    "model.dropout": 0.0,
    "augment.warp": 0.0,
    "augment.scale": 0.0,
    "augment.jitter": 0.0,
    "augment.mixup": 0.0,
    "trainer.batch_size": 7,
    "trainer.accelerator": "cpu",
}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"trainer.strategy": "ddp"},
    "fsdp": {"trainer.strategy": "fsdp"},
    "context": {"trainer.strategy": "ddp", "trainer.context": 2},
    "context-fsdp": {"trainer.strategy": "fsdp", "trainer.context": 2},
}


def series(root: Path, **changes: Any) -> Recipe:
    return toy.recipe(root / "data", **{**PLAIN, **changes})


def text(root: Path, **changes: Any) -> Recipe:
    small = {
        "data.folder": root / "text",
        "data.context": 33,
        "model.attention": ("primal",),
        "model.primal_mode": "decay",
        "model.conv": 4,
        "model.embed_dim": 8,
        "model.num_heads": 2,
        "model.layers": 2,
        "model.ffn_dim": 16,
        "model.rank": 3,
        "model.dropout": 0.0,
        "trainer.epochs": 2,
        "trainer.steps_per_epoch": 3,
        "trainer.batch_size": 4,
        "trainer.precision": "32-true",
        "trainer.accelerator": "cpu",
        "trainer.progress": False,
        "trainer.tensorboard": False,
    }
    return override(recipe_of("wikitext-103"), {**small, **changes})


def write_text(root: Path) -> None:
    """Three splits of made-up words, enough for a few windows."""
    folder = root / "text"
    folder.mkdir()
    for number, (split, length) in enumerate({"train": 900, "valid": 80, "test": 80}.items()):
        words = (f"w{(5 * i + i * i // 23 + number) % 23}" for i in range(length))
        (folder / f"wiki.{split}.tokens").write_text(f" = w{number} = \n {' '.join(words)} \n")


def match(root: Path) -> None:
    """Each way, J squared per case and per batch, and the language model with its sequences split."""
    two = {"trainer.devices": 2}
    for name, way in WAYS.items():
        runner.train(series(root, **two, **way), root / name)
    ClassificationModule.ksvd_reduction = "batch"
    for name in ("ddp", "fsdp"):
        runner.train(series(root, **two, **WAYS[name]), root / f"{name}-batch")
    ClassificationModule.ksvd_reduction = "sample"
    for name in ("ddp", "context"):
        runner.train(text(root, **two, **WAYS[name]), root / f"text-{name}")
    # Asked to stop: one rank hears it, both save and leave; both go on.
    for name in ("ddp", "fsdp"):
        recipe, usual = series(root, **two, **WAYS[name]), module.TrainingModule.losses
        if os.environ["RANK"] == "1":
            stopped.ask_at(module.TrainingModule, "losses", 7)()
        with suppress(Preempted):
            runner.train(recipe, root / f"{name}-stopped")
            raise AssertionError("nobody stopped")
        module.TrainingModule.losses = usual
        if name == "ddp":  # the other is left for another number of ranks to go on with
            runner.train(recipe, root / f"{name}-stopped", resume=True)


def kill(root: Path) -> None:
    """A rank dies without a word in the middle of an epoch, behind a checkpoint in it; torchrun starts both again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        die_at(module.TrainingModule, "losses", 9)()
    changes = {"trainer.devices": 2, "trainer.checkpoint_steps": 2, **WAYS["fsdp"]}
    runner.train(series(root, **changes), root / "fsdp-killed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    {"match": match, "kill": kill}[sys.argv[1]](Path(sys.argv[2]))
