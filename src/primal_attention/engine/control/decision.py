"""Training and measuring of Decision Transformers: squared error of the actions, returns of played episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from primal_attention.data.d4rl import HORIZON, normalized_score
from primal_attention.engine.batches import Batches, derive_seed
from primal_attention.engine.control import rollout
from primal_attention.engine.module import Batch, TrainingModule, precision_context
from primal_attention.models.decision import DecisionTransformer


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
