"""Run as a script: send SIGTERM to trainings at chosen moments, resume them, print which ended as the unbroken one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import killed
import toy

from primal_attention.train import distributed as preempt
from primal_attention.train import module, runner
from primal_attention.utils.errors import Preempted


def ask_at(owner: object, name: str, call: int) -> Callable[[], None]:
    """Send the signal when a function is called for the n-th time, and let it go on."""

    def arm() -> None:
        original, count = getattr(owner, name), [0]

        def counted(*args, **kwargs):
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    return arm


# 30 cases in batches of 8 are 4 steps per epoch; an evaluation of 15 has 2 batches.
STEP, MEASURE = (module.TrainingModule, "losses"), (module.TrainingModule, "evaluate")
MOMENTS = {
    "in the first step": ask_at(*STEP, 1),
    "in the middle of an epoch": ask_at(*STEP, 6),
    "in the last step of an epoch": ask_at(*STEP, 8),
    "while an epoch is measured": ask_at(*MEASURE, 2),
    "in the last step": ask_at(*STEP, 12),
    "while the last epoch is measured": ask_at(*MEASURE, 3),
}


def train(recipe, place: Path, *, resume: bool = False) -> None:
    try:
        with preempt.leave_at_once():
            runner.train(recipe, place, resume=resume)
    except (Preempted, SystemExit) as stop:
        os._exit(preempt.CODE if isinstance(stop, Preempted) else stop.code)


def main(root: Path) -> None:
    data = toy.folder(root / "data")
    kinds = {"": ({}, list(MOMENTS)), "accumulated, ": ({"trainer.accumulate": 2}, ["in the first step"])}
    for kind, (changes, moments) in kinds.items():
        recipe = toy.recipe(data, **changes)
        whole = root / f"whole {kind}"
        assert killed.child(lambda: train(recipe, whole)) == 0  # noqa: B023
        for moment in moments:
            place = root / f"{kind}{moment}"

            def asked(place: Path = place, arm: Callable[[], None] = MOMENTS[moment]) -> None:
                arm()
                train(recipe, place)  # noqa: B023

            code = killed.child(asked)
            saved = (place / "checkpoints" / "last.ckpt").exists()
            again = killed.child(lambda place=place: train(recipe, place, resume=True))  # noqa: B023
            files = ("model.safetensors", "metrics.csv")
            same = again == 0 and all((place / f).read_bytes() == (whole / f).read_bytes() for f in files)
            fine = code == preempt.CODE and saved and same
            print(f"{kind}{moment}: {'same' if fine else f'NOT THE SAME (exit {code}, saved {saved}, then {again})'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
