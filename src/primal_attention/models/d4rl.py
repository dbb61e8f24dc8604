"""Decision Transformer: control as sequence modelling, with any causal attention in any layer.

An episode is read as (R̂_1, s_1, a_1, R̂_2, s_2, a_2, …), R̂ the return still to come; the action a_t is predicted at the
token of s_t. Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS 2021. With
attention="primal+", Primal-Attention's running-mean form in the last layer, it is the paper's Primal.+DT.

    model = DecisionTransformer(11, 3, attention="primal+", attention_kwargs={"primal": {"rank": 64}})
    actions = model(states, actions, returns_to_go, timesteps)      # (B, K, …): all steps of a window at once
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.nn.baselines import make_attention
from primal_attention.nn.blocks import DecoderBlock, attention_names
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.padding import Padding

INITIAL_SCALE = 0.02  # GPT-2's, which Decision Transformer is built on
RETURN_SCALE = 1000.0  # divisor of returns


class DecisionBlock(DecoderBlock):
    """GPT-2's block as in Decision Transformer: ReLU between the two linear maps, one dropout after them."""

    def __init__(self, embed_dim: int, num_heads: int, attention: nn.Module, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, attention, dropout=dropout)
        self.feed_forward = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(embed_dim, 4 * embed_dim),
            nn.ReLU(),
            nn.Linear(4 * embed_dim, embed_dim),
            nn.Dropout(dropout),
        )


class DecisionTransformer(nn.Module):
    """Predicts the actions of an episode from the returns to go, the states and the actions before.

    Args:
        state_dim: Width of a state.
        action_dim: Width of an action.
        attention: A name, a name with a plus (last layer only, softmax before it), or one name per layer.
        embed_dim: Width of the tokens.
        num_heads: Number of heads.
        layers: Number of blocks.
        context: K, the steps of a window.
        max_episode: Time steps that have an embedding; later steps share the last one.
        dropout: Dropout rate.
        attention_kwargs: Keywords by attention name. The default of Primal layers is data_dependent=False.

    States are passed as they are: the model stores their mean and deviation (`set_state_moments`) and normalises them.
    """

    state_mean: Tensor
    state_std: Tensor

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        *,
        attention: str | Sequence[str] = "primal+",
        embed_dim: int = 256,
        num_heads: int = 4,
        layers: int = 3,
        context: int = 20,
        max_episode: int = 1000,
        dropout: float = 0.1,
        attention_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.state_dim, self.action_dim, self.context = state_dim, action_dim, context
        self.return_map = nn.Linear(1, embed_dim)
        self.state_map = nn.Linear(state_dim, embed_dim)
        self.action_map = nn.Linear(action_dim, embed_dim)
        self.time_stamps = nn.Embedding(max_episode, embed_dim)
        self.embed_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        keywords = attention_kwargs or {}
        self.attention_names = attention_names(attention, layers)
        self.blocks = nn.ModuleList(
            DecisionBlock(
                embed_dim, num_heads, causal_attention(name, embed_dim, num_heads, dropout, keywords), dropout
            )
            for name in self.attention_names
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.action_head = nn.Linear(embed_dim, action_dim)
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_std", torch.ones(state_dim))
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=INITIAL_SCALE)
                nn.init.zeros_(layer.bias)

    def set_state_moments(self, mean: Tensor, std: Tensor) -> None:
        """Set the moments that normalise states; they are saved with the weights."""
        self.state_mean.copy_(mean)
        self.state_std.copy_(std + 1e-6)  # a coordinate may be constant

    def embed(self, states: Tensor, actions: Tensor, returns: Tensor, timesteps: Tensor) -> Tensor:
        """Tokens R̂_1, s_1, a_1, R̂_2, …: (B, K, …) → (B, 3K, d)."""
        parts = (
            self.return_map((returns / RETURN_SCALE).unsqueeze(-1)),
            self.state_map((states - self.state_mean) / self.state_std),
            self.action_map(actions),
        )
        stamps = self.time_stamps(timesteps.clamp(0, self.time_stamps.num_embeddings - 1))
        tokens = torch.stack(parts, dim=2) + stamps.unsqueeze(2)  # (B, K, 3, d)
        return self.dropout(self.embed_norm(tokens)).flatten(1, 2)

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        returns: Tensor,
        timesteps: Tensor,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the action of every step, (B, K, action_dim), in [−1, 1].

        Args:
            states: (B, K, state_dim), not normalised.
            actions: (B, K, action_dim).
            returns: (B, K), returns to go.
            timesteps: (B, K), steps since the start of the episode.
            padding_mask: (B, K) bool, True at padding, which may be anywhere; predictions there are zero.
        """
        if padding_mask is None:
            return self.predict(states, actions, returns, timesteps)
        padding = Padding(padding_mask, compact=True)
        states, actions, returns, timesteps = map(padding.enter, (states, actions, returns, timesteps))
        assert padding.tokens.present is not None
        return padding.leave(self.predict(states, actions, returns, timesteps, ~padding.tokens.present))

    def predict(
        self, states: Tensor, actions: Tensor, returns: Tensor, timesteps: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """As `forward` for windows whose padding is after their steps, where no causal layer sees it.

        Only the average of Primal-Attention's objective needs the mask.
        """
        x = self.embed(states, actions, returns, timesteps)
        mask = None if padding_mask is None else padding_mask.repeat_interleave(3, dim=1)
        for block in self.blocks:
            needs_mask = self.training and isinstance(block.attention, PrimalAttention)
            x = block(x, mask if needs_mask else None)
        return self.action_head(self.norm(x[:, 1::3])).tanh()  # at the tokens of the states


def causal_attention(
    name: str, embed_dim: int, num_heads: int, dropout: float, keywords: Mapping[str, Mapping[str, Any]]
) -> nn.Module:
    """Return the causal attention of a name."""
    # Dropout on the weights, as in GPT-2; the block has one on the output.
    defaults: dict[str, dict[str, Any]] = {"softmax": {"dropout": dropout}, "primal": {"data_dependent": False}}
    arguments = {"causal": True, **defaults.get(name, {}), **keywords.get(name, {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rank=")  # the paper's 96 directions in heads of width 64
        return make_attention(name, embed_dim, num_heads, **arguments)
