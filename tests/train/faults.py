"""Kill and stop trainings at chosen moments and compare what they end with.

Run as a script: every moment of `KILLS` and `STOPS` in a forked child (the imports are paid once), then a resumed run;
prints one line per moment, which ends in ": same" if weights and metrics are those of an uninterrupted run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.fabric  # noqa: F401 (once, not in every child)
import pytest
import torch
import toy

from primal_attention.train import distributed, logs, loop
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
        assert (folder / file).read_bytes() == (other / file).read_bytes(), file


def assert_resumes_to_the_same(recipe: Recipe, folder: Path, *, step: int) -> None:
    """Train without a break, and again with a cut at a step: metrics and weights must agree to the byte."""
    loop.train(recipe, folder / "whole")
    cut_off(recipe, folder / "cut", step)
    loop.train(recipe, folder / "cut", resume=True)
    assert_same(folder / "cut", folder / "whole")


def signal_at(number: signal.Signals, owner: object, name: str, call: int) -> Callable[[], None]:
    """Return a function that arms this process: the n-th call of `owner.name` sends it a signal first."""

    def arm() -> None:
        original, count = getattr(owner, name), [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    return arm


kill_at, stop_at = partial(signal_at, signal.SIGKILL), partial(signal_at, signal.SIGTERM)

# 30 samples in batches of 8 are 4 steps per epoch; protocol both is two trainings of 2 epochs.
KILLS = {
    "while a checkpoint is written": kill_at(files.os, "fsync", 5),  # config, then (checkpoint, folder, metrics)
    "between checkpoint and metrics": kill_at(logs, "write_csv", 2),
    "after training, before the weights": kill_at(loop, "write_weights", 1),
    "in the training with validation samples": kill_at(TrainingModule, "losses", 14),
}
STOPS = {
    "in the first step": stop_at(TrainingModule, "losses", 1),
    "in the last step of an epoch": stop_at(TrainingModule, "losses", 4),
    "while the last epoch is evaluated": stop_at(TrainingModule, "evaluate", 2),
}


def child(work: Callable[[], object]) -> int:
    """Run a function in a forked process and return its exit code."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            with distributed.leave_at_once():
                work()
        except Preempted:
            os._exit(distributed.EXIT_CODE)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def interrupt(recipe: Recipe, whole: Path, place: Path, arm: Callable[[], None], expected: int) -> None:
    def interrupted() -> None:
        arm()
        loop.train(recipe, place)

    code = child(interrupted)
    saved = expected == -signal.SIGKILL or (place / "checkpoints" / "last.ckpt").exists()
    again = child(lambda: loop.train(recipe, place, resume=True))
    parts = [part for part in ("", "validation") if (whole / part).exists()]
    same = again == 0 and all(
        (place / part / file).read_bytes() == (whole / part / file).read_bytes() for part in parts for file in FILES
    )
    left = [p.name for p in place.rglob("*.partial")]
    fine = (code, saved, same, left) == (expected, True, True, [])
    print(f"{place.name}: {'same' if fine else f'NOT THE SAME (exit {code}, saved {saved}, {again}, left {left})'}")


def main(root: Path) -> None:
    data = toy.folder(root / "data")
    cases = [
        ("kill", {"protocol": "both"}, KILLS, -signal.SIGKILL),
        ("stop", {}, STOPS, distributed.EXIT_CODE),
    ]
    for kind, changes, moments, code in cases:
        recipe = toy.recipe(data, **changes, **{"trainer.epochs": 2})
        whole = root / f"whole {kind}"
        assert child(lambda: loop.train(recipe, whole)) == 0  # noqa: B023
        for moment, arm in moments.items():
            interrupt(recipe, whole, root / f"{kind} {moment}", arm, code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
