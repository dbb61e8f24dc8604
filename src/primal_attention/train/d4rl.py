"""Offline reinforcement learning: the paper's Decision Transformers, one recipe per data set of D4RL.

    primal train d4rl/hopper-medium                                     Primal.+DT, the paper's settings
    primal train d4rl/walker2d-medium-expert --model.attention softmax  Decision Transformer
    primal train d4rl/hopper-medium --data.minari mujoco/hopper/medium-v0
    primal evaluate RUN --episodes 20                                   play episodes again

A training sample is a window of K steps that starts at a random row of the data, as Decision Transformer trains; rows
are drawn uniformly, so episodes in proportion to their length. A window at an episode's end is padded on the right,
where causal attention cannot see the padding. The loss is the squared error of the actions. An epoch is 10,000 steps.
The score is the normalised return of episodes in gymnasium's MuJoCo environments, all played at once with one forward
pass per step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from primal_attention.data import d4rl
from primal_attention.data.d4rl import HORIZON, Trajectories, normalized_score
from primal_attention.data.storage import one_line
from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, require_range
from primal_attention.train.registry import D4RL_SETS
from primal_attention.train.task import (
    Batch,
    Batches,
    Experiment,
    TrainingModule,
    derive_seed,
    hash_data,
    precision_context,
)
from primal_attention.utils.errors import RunError, import_package, install_hint

ETA = 0.05
# The paper's rank s of each data set: medium-expert, medium, medium-replay.
PAPER = dict(zip(D4RL_SETS, (96, 64, 96, 64, 96, 96, 32, 64, 96), strict=True))
# These versions keep the rewards of D4RL's environments.
ENVIRONMENTS = {"halfcheetah": "HalfCheetah-v4", "hopper": "Hopper-v4", "walker2d": "Walker2d-v4"}
# The returns that D4RL tables ask for.
TARGETS = {"halfcheetah": 12000.0, "hopper": 3600.0, "walker2d": 5000.0}


@dataclass(frozen=True)
class D4RLData:
    """The trajectories."""

    name: str = "hopper-medium"
    """Environment and level; the file is NAME.hdf5 or NAME.npz, or has D4RL's own name."""
    folder: Path | None = None
    """Folder of the files; None is $PRIMAL_D4RL or data/d4rl."""
    minari: str | None = None
    """Read this Minari data set instead, by its identifier."""


@dataclass(frozen=True)
class DecisionModel(NetworkConfig):
    """The network; see primal_attention.models.d4rl."""

    attention: tuple[str, ...] = ("primal+",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 256
    num_heads: int = 4
    layers: int = 3
    context: int = 20
    """Steps K of a window; each is three tokens."""
    dropout: float = 0.1
    data_dependent: bool = False
    """Build Primal-Attention's projection weights from the tokens so far; the paper does not for this task."""
    decay: bool = False
    """Learned decay of the running sums of Primal-Attention, one rate per head; the paper has the plain mean."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The episodes that measure the model."""

    episodes: int = 100
    """Episodes, all at once; 0 plays none, for machines without the environments ('primal evaluate' plays later)."""
    target: float | None = None
    """Return to ask for; None is the paper's: 3600 (hopper), 5000 (walker2d), 12000 (halfcheetah)."""
    while_training: bool = False
    """Play after every trainer.evaluate-every epochs too; the best of them is labelled as chosen on test."""
    env: str | None = None
    """Name of the environment in gymnasium; None is the -v4 of the data set's."""

    def __post_init__(self) -> None:
        require_range(self, "evaluation", "episodes", "not be negative")


@dataclass(frozen=True)
class D4RLRecipe(Recipe):
    """A Decision Transformer for one data set."""

    benchmark: ClassVar[str] = "d4rl"

    data: D4RLData = field(default_factory=D4RLData)
    model: DecisionModel = field(default_factory=DecisionModel)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def resolved(self) -> D4RLRecipe:
        model = replace(self.model, rank=self.model.rank or PAPER.get(self.data.name, 64))
        return replace(self, eta=ETA if self.eta is None else self.eta, model=model)

    @property
    def environment(self) -> str:
        env = d4rl.environment_of(self.data.name)  # refuses a data set without reference scores
        return self.evaluation.env or ENVIRONMENTS[env]

    @property
    def target(self) -> float:
        target = self.evaluation.target
        return TARGETS[d4rl.environment_of(self.data.name)] if target is None else target

    def build(self) -> Experiment:
        name, minari = self.data.name, self.data.minari
        data = d4rl.read_minari(minari, name) if minari else d4rl.load(name, self.data.folder)
        return build_from(self.resolved(), data)


def paper_recipe(name: str) -> D4RLRecipe:
    """Return the paper's settings: AdamW 1e-3, batch 64, 100,000 steps of which 10,000 are a linear warm-up."""
    return D4RLRecipe(
        data=D4RLData(name=name),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=1e-4, schedule="warmup", warmup=0.1, clip=0.25),
        trainer=TrainerConfig(epochs=10, steps_per_epoch=10_000, batch_size=64),
    )


def make_model(config: DecisionModel, state_dim: int, action_dim: int) -> DecisionTransformer:
    """Return the network of a resolved configuration."""
    tokens = 3 * config.context
    primal: dict[str, Any] = {"rank": config.rank, "data_dependent": config.data_dependent}
    primal["decay"] = "learned" if config.decay else None
    if config.data_dependent:
        primal |= {"max_length": tokens, "landmarks": tokens}
    keywords: dict[str, dict[str, Any]] = {
        "primal": primal,
        "reformer": {"redraw_every": None},  # a window is one chunk, so nothing is hashed
        "cosformer": {"max_length": tokens},
    }
    names = ("attention", "embed_dim", "num_heads", "layers", "context", "dropout")
    shared = {name: getattr(config, name) for name in names}
    return DecisionTransformer(state_dim, action_dim, max_episode=HORIZON, attention_kwargs=keywords, **shared)


def build_from(recipe: D4RLRecipe, data: Trajectories) -> Experiment:
    """Return the experiment of a resolved recipe on data in memory."""
    episodes, config = Batches([torch.empty(0)], 1), recipe.trainer  # the model is evaluated by playing
    state_dim, action_dim = data.observations.shape[1], data.actions.shape[1]
    model = make_model(recipe.model, state_dim, action_dim)
    model.set_state_moments(*(torch.from_numpy(moment) for moment in data.state_moments()))
    return Experiment(
        module=DecisionModule(model, recipe),
        train=ContextBatches(data, recipe.model.context, config.batch_size, recipe.seed, config.steps_per_epoch),
        test=episodes,
        watched={"test": episodes} if recipe.evaluation.while_training else {},
        facts={
            "set": data.name,
            "sha256": hash_data(data),
            "source": data.source,
            "environment": recipe.environment,
            "transitions": len(data),
            "trajectories": len(data.starts),
            "mean_return": float(data.returns.mean()),
            "best_return": float(data.returns.max()),
            "state_dim": state_dim,
            "action_dim": action_dim,
            "max_length": 3 * recipe.model.context,
        },
    )


class ContextBatches(Batches):
    """Batches (states (B, K, S), actions (B, K, A), returns to go (B, K), time stamps (B, K), padding (B, K))."""

    def __init__(
        self, data: Trajectories, context: int, batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        self.context = context
        columns = [torch.from_numpy(c) for c in (data.observations, data.actions, data.returns_to_go, data.timesteps)]
        last = torch.from_numpy(data.ends - 1).repeat_interleave(torch.from_numpy(data.lengths))  # row of its episode
        super().__init__([*columns, last], batch_size, shuffle_seed, steps)

    def gather(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the windows that begin at these rows, (B,) → (B, K, …)."""
        *columns, last = self.tensors
        index = rows.unsqueeze(-1) + torch.arange(self.context, device=rows.device)
        padding = index > last[rows].unsqueeze(-1)
        index = index.masked_fill(padding, 0)
        windows = (column[index] for column in columns)
        return (*(w.masked_fill(padding.reshape(*padding.shape, *[1] * (w.ndim - 2)), 0) for w in windows), padding)


class DecisionModule(TrainingModule):
    """A Decision Transformer in training on `ContextBatches`."""

    headline: ClassVar[str] = "score"
    model: DecisionTransformer
    recipe: D4RLRecipe

    def task_loss(self, batch: Batch) -> Tensor:
        """Return the mean squared error of the actions of the valid steps."""
        states, actions, returns, timesteps, padding = batch
        predicted = self.model.predict(states, actions, returns, timesteps, padding)
        valid = (~padding).unsqueeze(-1)
        error = (predicted.float() - actions).square() * valid
        return error.sum() / (valid.sum() * actions.shape[-1])

    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Play the recipe's episodes: their returns and D4RL's normalised score of the mean; empty without episodes."""
        return measure(self.final_model, self.recipe) if self.recipe.evaluation.episodes else {}


def measure(model: Any, recipe: D4RLRecipe) -> dict[str, float]:
    """Play a recipe's episodes. Their initial states are the same for every model trained with the recipe's seed."""
    name, config = recipe.data.name, recipe.evaluation
    seeds = [derive_seed("episode", recipe.seed, i) % 2**31 for i in range(config.episodes)]
    title = f"{name}: {config.episodes} episodes" if recipe.trainer.progress else None
    was_training = model.training
    model.eval()
    with precision_context(recipe.trainer.precision, model.state_mean.device):
        returns, lengths = play(model, recipe.environment, recipe.target, seeds, title)
    model.train(was_training)
    return {
        "score": normalized_score(name, float(returns.mean())),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "length_mean": float(lengths.mean()),
        "episodes": config.episodes,
        "target": recipe.target,
    }


@torch.no_grad()
def play(
    model: DecisionTransformer, environment: str, target: float, seeds: Sequence[int], title: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Play one episode per seed, all in parallel; each step reads the last K steps again, as the paper does.

    Args:
        model: In evaluation mode.
        environment: Its name in gymnasium.
        target: The return that every episode is asked for.
        seeds: Seeds of the initial states.
        title: Title of a progress bar; None shows none.

    Returns:
        The returns and the lengths of the episodes.
    """
    from tqdm import tqdm

    device, count = model.state_mean.device, len(seeds)
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(contextlib.closing(make_environment(environment))) for _ in seeds]
        check_widths(model, envs[0], environment)
        bar = stack.enter_context(tqdm(desc=title, total=HORIZON, leave=False, disable=None if title else True))
        states = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
        returns, lengths, running = np.zeros(count), np.zeros(count, int), np.arange(count)
        window: list[Tensor] = []  # states, actions, returns to go and time stamps of the last K steps
        step = 0
        while len(running):
            state = torch.as_tensor(states, dtype=torch.float32, device=device)
            togo = torch.as_tensor(target - returns[running], dtype=torch.float32, device=device)
            unknown = state.new_zeros(len(state), model.action_dim)  # no causal layer sees it
            now = [column.unsqueeze(1) for column in (state, unknown, togo, torch.full_like(togo, step).long())]
            joined = [torch.cat(pair, dim=1) for pair in zip(window, now, strict=True)] if window else now
            window = [column[:, -model.context :] for column in joined]
            window[1][:, -1] = model.predict(*window)[:, -1].float()
            actions = window[1][:, -1].cpu().numpy()
            played = [envs[i].step(action) for i, action in zip(running, actions, strict=True)]
            returns[running] += [reward for _, reward, *_ in played]
            lengths[running] += 1
            left = np.flatnonzero([not (fell or timed_out) for _, _, fell, timed_out, _ in played])
            if len(left) < len(running):
                window = [column[torch.as_tensor(left, device=device)] for column in window]
            running, states = running[left], np.stack([after for after, *_ in played])[left]
            step += 1
            bar.set_postfix_str(f"{len(running)} running, mean return {returns.mean():.0f}", refresh=False)
            bar.update()
    return returns, lengths


def make_environment(name: str) -> Any:
    """Make a gymnasium environment by its name."""
    gymnasium = import_package("gymnasium", "playing episodes")
    try:
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None)  # else it writes MUJOCO_LOG.TXT into the working directory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium recommends -v5, which has other rewards
            return gymnasium.make(name)
    except (gymnasium.error.Error, ImportError) as error:
        hint = f": {install_hint('mujoco')}" if isinstance(error, ImportError) else ""
        raise RunError(f"environment {name!r} cannot be made here ({one_line(error)}){hint}") from None


def check_widths(model: DecisionTransformer, env: Any, environment: str) -> None:
    """Raise if the data and the environment have other widths."""
    widths = {"states": (env.observation_space, model.state_dim), "actions": (env.action_space, model.action_dim)}
    for what, (space, width) in widths.items():
        if tuple(space.shape) != (width,):
            raise RunError(
                f"environment {environment!r} has {what} of shape {tuple(space.shape)} where the data has ({width},): "
                "name the data's own with --evaluation.env"
            )
