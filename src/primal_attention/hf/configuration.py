"""The configuration of the language model under the names of transformers, as stored in config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from primal_attention.models.lm import LanguageConfig, check_primal_mode
from primal_attention.nn.blocks import attention_names
from primal_attention.nn.checks import one_of

# Fields of LanguageConfig that have another name in transformers.
NAMES = {
    "vocabulary": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
    "activation": "hidden_act",
    "max_length": "max_context",  # max_length is an argument of `generate` there
}


class PrimalConfig(PreTrainedConfig):
    """Configuration of `PrimalForCausalLM`: the fields of `LanguageConfig` under the names of transformers.

    Args:
        vocab_size: number of tokens.
        attention: one name for all layers, a name with a plus for the last layer only, or one name per layer.
        hidden_size: width of the tokens.
        num_attention_heads: heads of each layer.
        num_hidden_layers: number of layers.
        intermediate_size: hidden width of the MLPs.
        hidden_act: activation of the MLPs, "gelu" or "relu".
        dropout: as in `LanguageConfig`.
        primal_mode: "mean", "landmarks", "decay" or "delta".
        primal_heads: heads of the Primal layers; None is `num_attention_heads`.
        rank: directions of the Primal layers.
        landmarks: landmarks of the mode "landmarks".
        max_context: the longest text of the mode "landmarks"; the other modes have no limit.
        conv: kernel of a short causal convolution at each Primal layer; 0 is none.
        conv_place: "beside" or "before".
        gate: multiply each Primal layer's output by a gate.
        positions: "rotary", "sinusoidal" or "none".
        eta: weight of the KSVD loss, which is added to the loss in training.
        use_cache: return the streaming state.
        bos_token_id: token that begins a text.
        eos_token_id: token that ends a text.
        pad_token_id: token at padding.
        tie_word_embeddings: must be True.
        kwargs: of `PreTrainedConfig`.
    """

    model_type = "primal"

    def __init__(
        self,
        vocab_size: int = 8192,
        attention: str | Sequence[str] = ("primal",),
        hidden_size: int = 512,
        num_attention_heads: int = 8,
        num_hidden_layers: int = 6,
        intermediate_size: int = 2048,
        hidden_act: str = "gelu",
        dropout: float = 0.0,
        primal_mode: str = "mean",
        primal_heads: int | None = None,
        rank: int = 30,
        landmarks: int = 300,
        max_context: int = 512,
        conv: int = 0,
        conv_place: str = "beside",
        gate: bool = False,
        positions: str = "rotary",
        eta: float = 5e-5,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        if not tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be True: input and output embeddings are one tensor here")
        check_primal_mode(primal_mode)
        one_of("positions", positions, ("rotary", "sinusoidal", "none"))
        self.vocab_size = vocab_size
        self.attention = [attention] if isinstance(attention, str) else list(attention)
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.dropout = dropout
        self.primal_mode = primal_mode
        self.primal_heads = primal_heads
        self.rank = rank
        self.landmarks = landmarks
        self.max_context = max_context
        self.conv = conv
        self.conv_place = conv_place
        self.gate = gate
        self.positions = positions
        self.eta = eta
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        attention_names(tuple(self.attention), num_hidden_layers)  # raises for unknown names
        super().__init__(**kwargs)

    def language(self) -> LanguageConfig:
        """Return the configuration of `LanguageModel`."""
        fields = {f.name: getattr(self, NAMES.get(f.name, f.name)) for f in dataclasses.fields(LanguageConfig)}
        return LanguageConfig(**{**fields, "attention": tuple(self.attention)})

    @classmethod
    def from_language(cls, config: LanguageConfig, **settings: Any) -> PrimalConfig:
        """Return the configuration of a `LanguageModel`; settings: fields of transformers."""
        fields = {NAMES.get(f.name, f.name): getattr(config, f.name) for f in dataclasses.fields(config)}
        return cls(**fields, **settings)
