"""Kill and stop trainings at chosen moments and compare what they end with.

Run as a script: every moment of `MOMENTS` in a forked child (the imports are paid once), then a resumed run, whose
weights and metrics must be those of an uninterrupted one.
"""

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.fabric  # noqa: F401 (once, not in every child)
import pytest
import torch
import toy

from primal_attention.train import distributed, loop
from primal_attention.train.config import Recipe
from primal_attention.train.task import TrainingModule
from primal_attention.utils import files
from primal_attention.utils.errors import Preempted

FILES = ("metrics.csv", "model.safetensors")


class PowerCutError(Exception):
    pass


def cut_off(recipe: Recipe, folder: Path, step: int) -> None:
    """Train until a step raises."""
    losses = TrainingModule.losses

    def fail(self: TrainingModule, batch: Any) -> Any:
        if self.global_step == step:
            raise PowerCutError
        return losses(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingModule, "losses", fail)
        with pytest.raises(PowerCutError):
            loop.train(recipe, folder)


def assert_same(folder: Path, other: Path) -> None:
    for file in FILES:
        assert (folder / file).read_bytes() == (other / file).read_bytes(), folder / file


def assert_resumes_to_the_same(recipe: Recipe, folder: Path, *, step: int) -> None:
    """Train without a break, and again with a cut at a step: metrics and weights must agree to the byte."""
    loop.train(recipe, folder / "whole")
    cut_off(recipe, folder / "cut", step)
    loop.train(recipe, folder / "cut", resume=True)
    assert_same(folder / "cut", folder / "whole")


def signal_at(number: signal.Signals, owner: Any, name: str, call: int) -> None:
    """Let the n-th call of `owner.name` send this process a signal first."""
    original, count = getattr(owner, name), itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


# 30 samples in batches of 8 are 4 steps per epoch; protocol both is two trainings of 2 epochs.
MOMENTS: dict[str, tuple[signal.Signals, Any, str, int]] = {
    # config, then (checkpoint, folder, metrics)
    "while a checkpoint is written": (signal.SIGKILL, files.os, "fsync", 5),
    "between checkpoint and metrics": (signal.SIGKILL, loop, "write_csv", 2),
    "after training, before the weights": (signal.SIGKILL, loop, "write_weights", 1),
    "in the training with validation samples": (signal.SIGKILL, TrainingModule, "losses", 14),
    "in the first step": (signal.SIGTERM, TrainingModule, "losses", 1),
    "in the last step of an epoch": (signal.SIGTERM, TrainingModule, "losses", 4),
    "while the last epoch is evaluated": (signal.SIGTERM, TrainingModule, "evaluate", 2),
}


def child(recipe: Recipe, place: Path, moment: str | None = None, **options: bool) -> int:
    """Train in a forked process, up to a moment if one is named, and return the exit code."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            with distributed.leave_at_once():
                if moment is not None:
                    signal_at(*MOMENTS[moment])
                loop.train(recipe, place, **options)
        except Preempted:
            os._exit(distributed.EXIT_CODE)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(root: Path) -> None:
    recipe = toy.recipe(toy.folder(root / "data"), protocol="both", trainer__epochs=2)
    assert child(recipe, root / "whole") == 0
    for moment, (number, *_) in MOMENTS.items():
        place = root / moment
        code = child(recipe, place, moment)
        assert code == (distributed.EXIT_CODE if number == signal.SIGTERM else -number), (moment, code)
        assert number == signal.SIGKILL or (place / "checkpoints" / "last.ckpt").exists(), moment
        assert child(recipe, place, resume=True) == 0, moment
        for part in (".", "validation"):
            assert_same(place / part, root / "whole" / part)
        assert not list(place.rglob("*.partial")), moment


if __name__ == "__main__":
    main(Path(sys.argv[1]))
