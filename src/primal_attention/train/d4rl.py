"""Batches of context windows cut from trajectories: K steps from a random row on, as Decision Transformer trains.

A row is drawn from all rows alike, which draws episodes in proportion to their length. Near an episode's end the window
is shorter than K. Its steps stand in front and padding behind them, where causal attention cannot see it; Decision
Transformer's padding on the left gives the same actions, since a step's place is told by its time stamp.

Training and measuring of Decision Transformers: squared error of the actions, returns of played episodes.

Offline reinforcement learning: the paper's Decision Transformers, one recipe per set of D4RL.

primal train d4rl/hopper-medium                                    Primal.+DT, the paper's settings
primal train d4rl/walker2d-medium-expert --model.attention softmax Decision Transformer
primal train d4rl/hopper-medium --data.minari mujoco/hopper/medium-v0
primal evaluate RUN --streaming rolling --video hopper.gif         play again, in another way, and film it

An epoch is 10,000 steps, as the benchmark counts. The model is measured by the return of episodes that it plays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from primal_attention.data import d4rl
from primal_attention.data.d4rl import HORIZON, Trajectories, normalized_score
from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.train import rollout
from primal_attention.train.batches import Batches, derive_seed
from primal_attention.train.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.train.task import Batch, TrainingModule, precision_context

if TYPE_CHECKING:
    from primal_attention.train.task import Experiment


class ContextBatches(Batches):
    """Batches (states (B, K, S), actions (B, K, A), returns to go (B, K), time stamps (B, K), padding (B, K))."""

    def __init__(
        self, data: Trajectories, context: int, batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        self.context = context
        lengths = torch.from_numpy(data.lengths)
        columns = [data.observations, data.actions, data.returns_to_go, data.timesteps]
        last = torch.from_numpy(data.ends - 1).repeat_interleave(lengths)  # each row's last row of its episode
        super().__init__([*(torch.from_numpy(c) for c in columns), last], batch_size, shuffle_seed, steps)

    def windows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The windows that begin at these rows, (B,) → (B, K, …)."""
        *columns, last = self.tensors
        index = rows.unsqueeze(-1) + torch.arange(self.context, device=rows.device)
        padding = index > last[rows].unsqueeze(-1)
        index = index.masked_fill(padding, 0)

        def cut(column: Tensor) -> Tensor:
            found = column[index]
            return found.masked_fill(padding.reshape(*padding.shape, *[1] * (column.ndim - 1)), 0)

        return (*(cut(column) for column in columns), padding)

    def __iter__(self) -> Iterator[Any]:
        for sizes, rows in self.turns():
            yield self.cut(self.windows(rows), sizes)


@dataclass(frozen=True)
class Game:
    """What is played to measure a model: an environment, the return asked for, and how many episodes."""

    name: str
    environment: str
    target: float
    episodes: int
    seed: int
    streaming: rollout.Streaming = "off"
    video: Path | None = None
    progress: bool = True

    def seeds(self) -> list[int]:
        """Of the episodes' starts: the same for every model that is trained with the run's seed."""
        return [derive_seed("episode", self.seed, i) % 2**31 for i in range(self.episodes)]


class Episodes(Batches):
    """Stands where other benchmarks have their test set: the model is measured by playing."""

    def __init__(self, game: Game) -> None:
        super().__init__([torch.empty(0)], 1)
        self.game = game


class DecisionModule(TrainingModule):
    """A Decision Transformer in training. A batch is what `ContextBatches` gives."""

    headline: ClassVar[str] = "score"
    model: DecisionTransformer

    def task_loss(self, batch: Batch) -> Tensor:
        """Mean squared error over the actions of the valid steps."""
        states, actions, returns, timesteps, padding = batch
        found = self.model.predict(states, actions, returns, timesteps, padding)
        valid = (~padding).unsqueeze(-1)
        error = (found.float() - actions).square() * valid
        return error.sum() / (valid.sum() * actions.shape[-1])

    def scores(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        raise NotImplementedError("a Decision Transformer is measured by playing episodes")

    def evaluate(self, batches: Batches) -> dict[str, float]:
        """Returns of the episodes and D4RL's normalised score of their mean; nothing where none are to be played."""
        assert isinstance(batches, Episodes)
        return measure(self.final_model, batches.game, self.recipe.trainer.precision) if batches.game.episodes else {}


def measure(model: Any, game: Game, precision: str = "32-true") -> dict[str, float]:
    """Play the game with the model in evaluation mode."""
    was_training = model.training
    model.eval()
    title = f"{game.name}: {game.episodes} episodes"
    with rollout.bar(title, HORIZON, game.progress) as tell, precision_context(precision, model.state_mean.device):
        played = rollout.play(
            model,
            game.environment,
            game.target,
            game.seeds(),
            streaming=game.streaming,
            video=game.video,
            tell=tell,
        )
    model.train(was_training)
    return {
        "score": normalized_score(game.name, float(played.returns.mean())),
        "return_mean": float(played.returns.mean()),
        "return_std": float(played.returns.std()),
        "length_mean": float(played.lengths.mean()),
        "episodes": game.episodes,
        "target": game.target,
    }


ETA = 0.05
STEPS, WARMUP, PER_EPOCH = 100_000, 10_000, 10_000
# The paper's rank s per level, for HalfCheetah, Hopper and Walker2d.
RANKS = {"medium-expert": (96, 64, 96), "medium": (64, 96, 96), "medium-replay": (32, 64, 96)}
PAPER = {
    f"{env}-{level}": rank
    for level, ranks in RANKS.items()
    for env, rank in zip(("halfcheetah", "hopper", "walker2d"), ranks, strict=True)
}


@dataclass(frozen=True)
class D4RLData:
    """Which trajectories."""

    name: str = "hopper-medium"
    """Environment and level; the file is NAME.hdf5 or NAME.npz, or has D4RL's own name."""
    folder: Path | None = None
    """Folder of the files; None is $PRIMAL_D4RL or data/d4rl."""
    minari: str | None = None
    """Read this Minari data set instead, by its identifier."""


@dataclass(frozen=True)
class DecisionModel:
    """The network; see primal_attention.models.d4rl."""

    attention: tuple[str, ...] = ("primal+",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 256
    num_heads: int = 4
    layers: int = 3
    context: int = 20
    """Steps K of a window; each is three tokens."""
    dropout: float = 0.1
    rank: int | None = None
    """Directions s of Primal-Attention; None takes the paper's for the set."""
    data_dependent: bool = False
    """Build Primal-Attention's projection weights from the tokens so far; the paper does not for this task."""
    decay: bool = False
    """Let the past fade in Primal-Attention, each head at a rate that it learns; the paper has the plain mean."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "layers", "context", "rank"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name.replace('_', '-')} must be at least 1 (got {value})")
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1) (got {self.dropout})")
        require(len(self.attention) > 0, "model.attention must name at least one kind")


@dataclass(frozen=True)
class EvaluationConfig:
    """What is played to measure the model."""

    episodes: int = 100
    """Episodes, all at once; 0 plays none, for machines without the environments ('primal evaluate' does it later)."""
    target: float | None = None
    """Return to ask for; None is the paper's: 3600 (hopper), 5000 (walker2d), 12000 (halfcheetah)."""
    streaming: Literal["off", "rolling", "whole"] = "off"
    """Keep the layers' state instead of reading the last K steps again at each step: of the last K/2 to K steps
    (rolling), or of the whole episode, which is more than the model was trained for."""
    while_training: bool = False
    """Play after every trainer.evaluate-every epochs too; the best of them is labelled as chosen on test."""
    env: str | None = None
    """Name of the environment in gymnasium; None is the -v4 of the set's."""
    video: Path | None = None
    """Film the first episode into this file (.gif)."""

    def __post_init__(self) -> None:
        require(self.episodes >= 0, f"evaluation.episodes must not be negative (got {self.episodes})")


@dataclass(frozen=True)
class D4RLRecipe(Recipe):
    """A Decision Transformer for one set."""

    benchmark: ClassVar[str] = "d4rl"

    data: D4RLData = field(default_factory=D4RLData)
    model: DecisionModel = field(default_factory=DecisionModel)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def resolved(self) -> D4RLRecipe:
        rank = self.model.rank or PAPER.get(self.data.name, 64)
        model = dataclasses.replace(self.model, rank=rank)
        return dataclasses.replace(self, eta=ETA if self.eta is None else self.eta, model=model)

    def label(self) -> str:
        return "-".join(self.model.attention)

    def game(self) -> Game:
        """What a model of this recipe is measured by."""
        from primal_attention.train.rollout import ENVIRONMENTS, TARGETS

        env, how = d4rl.environment_of(self.data.name), self.evaluation
        return Game(
            name=self.data.name,
            environment=how.env or ENVIRONMENTS[env],
            target=TARGETS[env][0] if how.target is None else how.target,
            episodes=how.episodes,
            seed=self.seed,
            streaming=how.streaming,
            video=how.video,
            progress=self.trainer.progress,
        )

    def build(self) -> Experiment:
        recipe, data = self.resolved(), self.data
        found = d4rl.read_minari(data.minari, data.name) if data.minari else d4rl.load(data.name, data.folder)
        return build_from(recipe, found)


def paper_recipe(name: str) -> D4RLRecipe:
    """The paper's settings: AdamW 1e-3 after a linear warm-up, batch 64, 100,000 steps."""
    return D4RLRecipe(
        data=D4RLData(name=name),
        optim=OptimConfig(
            name="adamw", lr=1e-3, weight_decay=1e-4, schedule="warmup", warmup=WARMUP / STEPS, clip=0.25
        ),
        trainer=TrainerConfig(epochs=STEPS // PER_EPOCH, steps_per_epoch=PER_EPOCH, batch_size=64),
    )


def make_model(config: DecisionModel, state_dim: int, action_dim: int) -> DecisionTransformer:
    """The network of a resolved configuration."""
    from primal_attention.models.d4rl import DecisionTransformer

    tokens = 3 * config.context
    primal: dict[str, Any] = {"rank": config.rank, "data_dependent": config.data_dependent}
    if config.data_dependent:
        primal |= {"max_length": tokens, "landmarks": tokens}
    if config.decay:
        primal["decay"] = "learned"
    keywords: dict[str, dict[str, Any]] = {
        "primal": primal,
        # A window is one chunk of Reformer's: nothing is hashed, so nothing needs to be drawn anew.
        "reformer": {"redraw_every": None},
        "cosformer": {"max_length": tokens},
    }
    return DecisionTransformer(
        state_dim,
        action_dim,
        attention=config.attention,
        embed_dim=config.embed_dim,
        num_heads=config.num_heads,
        layers=config.layers,
        context=config.context,
        max_episode=d4rl.HORIZON,
        dropout=config.dropout,
        attention_kwargs=keywords,
    )


def build_from(recipe: D4RLRecipe, data: Trajectories) -> Experiment:
    """The experiment of a resolved recipe on data that is already read."""
    import torch

    from primal_attention.train.task import Experiment

    episodes = Episodes(recipe.game())
    state_dim, action_dim = data.observations.shape[1], data.actions.shape[1]
    model = make_model(recipe.model, state_dim, action_dim)
    model.set_state_moments(*(torch.from_numpy(moment) for moment in data.state_moments()))
    return Experiment(
        module=DecisionModule(model, recipe),
        train=ContextBatches(
            data, recipe.model.context, recipe.trainer.batch_size, recipe.seed, recipe.trainer.steps_per_epoch
        ),
        test=episodes,
        watched={"test": episodes} if recipe.evaluation.while_training else {},
        facts={
            "set": data.name,
            "source": data.source,
            "environment": episodes.game.environment,
            "transitions": len(data),
            "trajectories": len(data.starts),
            "mean_return": float(data.returns.mean()),
            "best_return": float(data.returns.max()),
            "state_dim": state_dim,
            "action_dim": action_dim,
            "max_length": 3 * recipe.model.context,
        },
    )
