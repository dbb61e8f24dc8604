"""Episodes of gymnasium's MuJoCo environments, played by a Decision Transformer: all at once, one forward per step.

Three ways to read what happened so far. `Window` reads the last K steps again at every step, as the paper plays. The
others read each token once and keep the layers' state, and take the window's actions during the first K steps. After
them `Rolling` knows the last K/2 to K steps, and `Stream` the whole episode, which the model was not trained for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from primal_attention.data.d4rl import HORIZON
from primal_attention.models.d4rl import DecisionTransformer, Memory, select
from primal_attention.utils.errors import RunError

# The versions of today's gymnasium that keep the rewards of D4RL's environments.
ENVIRONMENTS = {"halfcheetah": "HalfCheetah-v4", "hopper": "Hopper-v4", "walker2d": "Walker2d-v4"}
# Returns to ask for: the paper's two per environment, the first of them is what D4RL tables report.
TARGETS = {"halfcheetah": (12000.0, 6000.0), "hopper": (3600.0, 1800.0), "walker2d": (5000.0, 2500.0)}
Streaming = Literal["off", "rolling", "whole"]
NEEDS = "pip install 'primal-attention[rl]'"


class Reader(Protocol):
    """How a model reads running episodes."""

    def act(self, states: Tensor, togo: Tensor, step: int) -> Tensor:
        """The next action of each episode, (n, action_dim)."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these episodes; the others have ended."""


class Window:
    """The last K steps, read again at every step."""

    def __init__(self, model: DecisionTransformer) -> None:
        self.model = model
        self.past: list[Tensor] = []

    def act(self, states: Tensor, togo: Tensor, step: int) -> Tensor:
        stamp = torch.full((len(states), 1), step, device=states.device)
        unknown = states.new_zeros(len(states), 1, self.model.action_dim)  # no causal layer sees it
        now = [states.unsqueeze(1), unknown, togo.unsqueeze(1), stamp]
        joined = [torch.cat([a, b], dim=1) for a, b in zip(self.past, now, strict=True)] if self.past else now
        self.past = [column[:, -self.model.context :] for column in joined]
        action = self.model.predict(*self.past)[:, -1].float()
        self.past[1] = torch.cat([self.past[1][:, :-1], action.unsqueeze(1)], dim=1)
        return action

    def keep(self, rows: Tensor) -> None:
        self.past = [column[rows] for column in self.past]


@dataclass
class Stream:
    """Each token read once, from the step `start` on; the layers' state holds what came between."""

    model: DecisionTransformer
    start: int
    memory: Memory
    previous: Tensor | None = None

    def act(self, states: Tensor, togo: Tensor, step: int) -> Tensor:
        stamps = torch.full((len(states),), step, device=states.device)
        action, self.memory = self.model.act(states, togo, stamps, self.previous, self.memory)
        self.previous = action.float()
        return self.previous

    def keep(self, rows: Tensor) -> None:
        self.memory = select(self.memory, rows)
        self.previous = None if self.previous is None else self.previous[rows]


class Rolling:
    """Two streams that overlap: when the elder has read K steps, the younger, which has read half as many, follows it.

    So the context has between K/2 and K steps, lengths that the model was trained with, and no step is read again.
    """

    def __init__(self, model: DecisionTransformer) -> None:
        self.model = model
        self.elder: Stream | None = None
        self.younger: Stream | None = None

    def act(self, states: Tensor, togo: Tensor, step: int) -> Tensor:
        context = self.model.context
        if self.elder is not None and step - self.elder.start == context:
            self.elder, self.younger = self.younger, None
        if self.elder is None:
            self.elder = self._fresh(len(states), step)
        if self.younger is None and step - self.elder.start == (context + 1) // 2:
            self.younger = self._fresh(len(states), step)
        action = self.elder.act(states, togo, step)
        if self.younger is not None:
            self.younger.act(states, togo, step)
            self.younger.previous = action  # what was done, not what it would have done
        return action

    def _fresh(self, episodes: int, step: int) -> Stream:
        return Stream(self.model, step, self.model.initial_state(episodes))

    def keep(self, rows: Tensor) -> None:
        for stream in (self.elder, self.younger):
            if stream is not None:
                stream.keep(rows)


def reader_of(model: DecisionTransformer, episodes: int, streaming: Streaming) -> Reader:
    """The way of reading that was asked for, if every layer can do it."""
    if streaming == "off":
        return Window(model)
    tokens = 3 * (model.context if streaming == "rolling" else HORIZON)
    for i, (name, block) in enumerate(zip(model.attention_names, model.blocks, strict=True)):
        built_for = getattr(block.attention, "max_length", None)
        if not block.streams:
            why = "keeps no state to go on from: play with streaming off"
        elif built_for is not None and built_for < tokens:
            why = f"is built for {built_for} tokens, and an episode has up to {tokens}: play with streaming rolling"
        else:
            continue
        raise RunError(f"layer {i + 1}'s attention {name!r} {why}")
    return Rolling(model) if streaming == "rolling" else Stream(model, 0, model.initial_state(episodes))


@dataclass
class Played:
    """What the episodes came to."""

    returns: np.ndarray
    lengths: np.ndarray
    actions: list[np.ndarray] = field(repr=False)
    """Per step the actions of the episodes that ran."""


Tell = Callable[[int, int, float], None]
"""Called at every step with its number, how many episodes run, and the mean return so far."""


@torch.no_grad()
def play(
    model: DecisionTransformer,
    environment: str,
    target: float,
    seeds: Sequence[int],
    *,
    streaming: Streaming = "off",
    video: Path | None = None,
    tell: Tell = lambda *_: None,
) -> Played:
    """One episode per seed, side by side, each asked for the return `target`. `video` films the first one."""
    envs = [make(environment, film=video is not None and i == 0) for i in range(len(seeds))]
    try:
        check_fit(model, envs[0], environment)
        return _play(model, envs, target, seeds, streaming, video, tell)
    finally:
        for env in envs:
            env.close()


def _play(
    model: DecisionTransformer,
    envs: list[Any],
    target: float,
    seeds: Sequence[int],
    streaming: Streaming,
    video: Path | None,
    tell: Tell,
) -> Played:
    device = model.state_mean.device
    reader = reader_of(model, len(envs), streaming)
    states = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), int)
    running, taken, frames = np.arange(len(envs)), [], []
    step = 0
    while len(running):
        togo = torch.as_tensor(target - returns[running], dtype=torch.float32, device=device)
        actions = reader.act(torch.as_tensor(states, dtype=torch.float32, device=device), togo, step).cpu().numpy()
        taken.append(actions)
        after, goes_on = [], []
        for i, action in zip(running, actions, strict=True):
            state, reward, fell, out_of_time, _ = envs[i].step(action)
            returns[i] += reward
            lengths[i] += 1
            after.append(state)
            goes_on.append(not (fell or out_of_time))
        if video is not None and running[0] == 0:
            frames.append(envs[0].render())
        left = np.flatnonzero(goes_on)
        if len(left) < len(running):
            reader.keep(torch.as_tensor(left, device=device))
        running, states = running[left], np.stack(after)[left]
        step += 1
        tell(step, len(running), float(returns.mean()))
    if video is not None:
        write_video(video, frames)
    return Played(returns, lengths, taken)


def make(environment: str, *, film: bool = False) -> Any:
    """A gymnasium environment by its name."""
    try:
        import gymnasium
    except ImportError:
        raise RunError(f"playing episodes needs gymnasium with MuJoCo: {NEEDS}") from None
    if film and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # no screen to draw on
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium would rather have -v5, which pays other rewards
            quiet_mujoco()
            return gymnasium.make(environment, render_mode="rgb_array" if film else None)
    except gymnasium.error.DependencyNotInstalled as error:
        raise RunError(f"environment {environment!r} is not installed ({_one_line(error)}): {NEEDS}") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise RunError(f"environment {environment!r} cannot be made here ({_one_line(error)})") from None


def quiet_mujoco() -> None:
    """Keep MuJoCo from writing its notes about model files into MUJOCO_LOG.TXT of the working directory."""
    with contextlib.suppress(ImportError, AttributeError):
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None)


def check_fit(model: DecisionTransformer, env: Any, environment: str) -> None:
    """The data's widths and the environment's must be the same."""
    widths = {"states": (env.observation_space, model.state_dim), "actions": (env.action_space, model.action_dim)}
    for what, (space, ours) in widths.items():
        if tuple(space.shape) != (ours,):
            raise RunError(
                f"environment {environment!r} has {what} of shape {tuple(space.shape)} where the data has ({ours},): "
                "name the data's own with --evaluation.env"
            )


def write_video(file: Path, frames: Sequence[np.ndarray]) -> None:
    """An animated picture at half the environment's rate; every other frame is enough to see a gait."""
    import imageio

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        imageio.mimsave(file, list(frames[::4]), duration=40, loop=0)
    except (ValueError, OSError) as error:
        raise RunError(f"cannot write a video to {file} ({_one_line(error)}): try a name that ends in .gif") from error


@contextlib.contextmanager
def bar(title: str, horizon: int, shown: bool = True) -> Iterator[Tell]:
    """A progress bar over an episode's steps; nothing where rich is not installed or nobody looks."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        shown = False
    if not shown:
        yield lambda *_: None
        return
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(bar_width=16), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    said = TextColumn("{task.fields[numbers]}")
    with Progress(*columns, TimeRemainingColumn(), said, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=horizon, numbers="")

        def tell(step: int, running: int, mean: float) -> None:
            done = horizon if running == 0 else step
            progress.update(task, completed=done, numbers=f"{running} running  mean return {mean:.0f}")

        yield tell


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
