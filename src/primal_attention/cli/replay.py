"""`primal evaluate RUN` for runs that are measured by playing: episodes again, in the same or in another way.

A run that was trained where no environment is installed has no score yet; its first evaluation writes it into the
summary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from primal_attention.cli.flags import parse
from primal_attention.report.headline import in_full
from primal_attention.train import checkpoint, d4rl, distributed, loop
from primal_attention.train.config import to_plain
from primal_attention.train.d4rl import measure
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import COUNT, check, write_json

ABOUT = """Play episodes with a finished run's weights.

Example: primal evaluate runs/d4rl/hopper-medium/primal+-seed0 --episodes 20 --streaming rolling --video hopper.gif"""

SUMMARY = {
    "scores": {"last": dict}, "data": {"state_dim": COUNT, "action_dim": COUNT}, "config": {"evaluation": dict},
}  # fmt: skip


def main(folder: Path, args: Sequence[str]) -> int:
    summary = read_summary(folder)
    recipe = read(folder)
    before = summary["scores"]["last"]
    score = replay(folder, parse_flags(recipe.evaluation, args))
    had = f": the run had {before['score']:.1f}" if "score" in before else ""
    print(f"{in_full(score)}{had}")
    return 0


def read_summary(folder: Path) -> loop.Summary:
    """The summary of a run that is measured by playing."""
    summary = loop.read_summary(folder)
    check(summary, SUMMARY, folder / "summary.json")
    return summary


def read(folder: Path) -> d4rl.D4RLRecipe:
    _, recipe = checkpoint.read_run(folder)
    if not isinstance(recipe, d4rl.D4RLRecipe):
        raise RunError(f"{folder} is not a run of d4rl but of {recipe.benchmark}")
    return recipe


def parse_flags(default: d4rl.EvaluationConfig, args: Sequence[str]) -> d4rl.EvaluationConfig:
    import tyro

    if default.episodes == 0:  # trained where nothing could be played
        default = dataclasses.replace(default, episodes=d4rl.EvaluationConfig().episodes)
    fields: list[Any] = [("evaluation", Annotated[d4rl.EvaluationConfig, tyro.conf.arg(name="")])]
    arguments: Any = dataclasses.make_dataclass("Replay", fields)
    return parse(arguments, args, prog="primal evaluate RUN", about=ABOUT, default=arguments(default)).evaluation


def replay(folder: Path, evaluation: d4rl.EvaluationConfig, *, progress: bool = True) -> dict[str, float]:
    """Play with the run's weights; the score goes into a summary that has none."""
    summary = read_summary(folder)
    recipe = dataclasses.replace(read(folder), evaluation=evaluation)
    recipe = dataclasses.replace(recipe, trainer=dataclasses.replace(recipe.trainer, progress=progress))
    data = summary["data"]
    model = d4rl.make_model(recipe.resolved().model, data["state_dim"], data["action_dim"])
    loop.load_weights(model, folder / "model.safetensors")
    score = measure(model.to(distributed.pick_device(recipe.trainer)), recipe.game(), recipe.trainer.precision)
    if "score" not in summary["scores"]["last"]:
        summary["scores"]["last"].update(score)
        summary["test"] = score
        summary["config"]["evaluation"] = to_plain(dataclasses.replace(evaluation, video=None))
        write_json(folder / "summary.json", summary)
    return score
