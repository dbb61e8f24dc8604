"""Run as a script: kill trainings with SIGKILL at chosen moments, resume them, print which ended as the unbroken one.

Trainings run in forked children, so the heavy imports are paid once and the parent never starts a thread of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import toy

from primal_attention.train import callbacks, module, runner
from primal_attention.utils import files


def die_at(owner: object, name: str, call: int) -> Callable[[], None]:
    """Make the n-th call of a function the last thing the process does."""

    def arm() -> None:
        original, count = getattr(owner, name), [0]

        def counted(*args, **kwargs):
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    return arm


MOMENTS = {
    "before the first checkpoint": die_at(module.TrainingModule, "training_step", 2),
    "in the middle of an epoch": die_at(module.TrainingModule, "training_step", 7),
    "while a checkpoint is written": die_at(files.os, "fsync", 6),  # lock, config, then (checkpoint, folder, metrics)
    "between checkpoint and metrics": die_at(callbacks, "write_csv", 2),
    "after training, before the weights": die_at(runner, "write_weights", 1),
    "before the summary": die_at(runner, "write_json", 1),
    "in the training with held-out cases": die_at(module.TrainingModule, "training_step", 16),
}


def child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(root: Path) -> None:
    recipe = toy.recipe(toy.folder(root / "data"), protocol="both")
    assert child(lambda: runner.train(recipe, root / "whole")) == 0
    for moment, arm in MOMENTS.items():
        place = root / moment.replace(" ", "-")

        def killed(place: Path = place, arm: Callable[[], None] = arm) -> None:
            arm()
            runner.train(recipe, place)

        code = child(killed)
        again = child(lambda place=place: runner.train(recipe, place, resume=True))
        same = all(
            (place / file).read_bytes() == (root / "whole" / file).read_bytes()
            for part in ("", "validation")
            for file in (Path(part) / "model.safetensors", Path(part) / "metrics.csv")
        )
        left = [p.name for p in place.rglob("*.partial")]
        fine = code == -signal.SIGKILL and again == 0 and same and not left
        print(f"{moment}: {'same' if fine else f'NOT THE SAME (exit {code}, then {again}, left {left})'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
